"""The SDPA call that TORCH_SDPA and CUDNN_ATTN share."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..masks import with_lengths
from . import AttentionCall

# Some of PyTorch's CUDA kernels fail on larger batches; ComfyUI splits at the same size.
BATCH_LIMIT = 2**15


def scaled_dot_product(call: AttentionCall) -> torch.Tensor:
    """PyTorch's SDPA on the [B, H, L, D] views that ComfyUI's `attention_pytorch` gives it.

    Arguments that hold their default are not passed, so that the kernel, and every bit of its
    result, is the one ComfyUI gets.
    """
    query, key, value = (x.transpose(1, 2) for x in (call.query, call.key, call.value))
    options = {}
    if call.scale != query.shape[-1] ** -0.5:
        options["scale"] = call.scale
    if query.shape[1] != key.shape[1]:
        options["enable_gqa"] = True
    mask = with_lengths(call.mask, call.key_lengths, key.shape[2])
    if query.shape[0] <= BATCH_LIMIT:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
        return out.transpose(1, 2)
    parts = []
    for start in range(0, query.shape[0], BATCH_LIMIT):
        rows = slice(start, start + BATCH_LIMIT)
        part = mask[rows] if mask is not None and mask.ndim == 4 and mask.shape[0] > 1 else mask
        parts.append(
            F.scaled_dot_product_attention(
                query[rows], key[rows], value[rows], attn_mask=part, **options
            )
        )
    return torch.cat(parts).transpose(1, 2)
