"""The calling conventions of the FlashAttention libraries, whichever way they were installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import AttentionCall, last_contiguous


@dataclass(frozen=True)
class FlashLibrary:
    """One FlashAttention library.

    name: e.g. "FlashAttention 3 (fa3_fwd_interface)". dense: its flash_attn_func. ragged: runs with
    per-batch key lengths. Head sizes above head_dim_max are not its own.
    """

    name: str
    dense: Callable
    ragged: Callable
    head_dim_max: int = 256

    def run(self, call: AttentionCall) -> torch.Tensor:
        """`call` without a mask; q, k, v are [B, L, H, D] as they come."""
        if call.key_lengths is None:
            out = self.dense(call.query, call.key, call.value, softmax_scale=call.scale)
        else:
            out = self.ragged(call)
        # some versions return the log-sum-exp beside the output
        return out[0] if isinstance(out, tuple) else out


def by_cache(flash_attn_with_kvcache: Callable) -> Callable:
    """Key lengths through the decoding interface of FlashAttention 2 and 3.

    It takes them as a tensor on the GPU and leaves K and V where they are; the variable-length
    interface of version 2 would need them packed.
    """

    def run(call: AttentionCall):
        key, value = (last_contiguous(x) for x in (call.key, call.value))
        return flash_attn_with_kvcache(
            call.query,
            key,
            value,
            cache_seqlens=call.key_lengths,
            softmax_scale=call.scale,
            num_splits=1,
        )

    return run


def by_used_lengths(flash_attn_varlen_func: Callable) -> Callable:
    """Key lengths through FlashAttention 4's `seqused_k`, which takes unpacked tensors."""

    def run(call: AttentionCall):
        return flash_attn_varlen_func(
            call.query,
            call.key,
            call.value,
            seqused_k=call.key_lengths,
            softmax_scale=call.scale,
        )

    return run
