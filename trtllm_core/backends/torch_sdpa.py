"""TORCH_SDPA: PyTorch's scaled_dot_product_attention with its own choice of kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..device import Device
from ..masks import with_lengths
from . import HALF, AttentionCall, Requirements

REQUIREMENTS = Requirements(
    backend="TORCH_SDPA",
    summary="PyTorch scaled_dot_product_attention",
    devices=None,
    dtypes=(*HALF, torch.float32, torch.float64),
    mask="any",
)


def load(device: Device) -> None:
    """Nothing to import: torch is here."""


def run(call: AttentionCall) -> torch.Tensor:
    """The same call that ComfyUI's `attention_pytorch` makes, on the same [B, H, L, D] views."""
    query, key, value = (x.transpose(1, 2) for x in (call.query, call.key, call.value))
    extra = {}
    if call.scale != query.shape[-1] ** -0.5:
        extra["scale"] = call.scale
    if query.shape[1] != key.shape[1]:
        extra["enable_gqa"] = True
    mask = with_lengths(call.mask, call.key_lengths, key.shape[2])
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **extra)
    return out.transpose(1, 2)
