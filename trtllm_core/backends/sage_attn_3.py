"""SAGE_ATTN_3: SageAttention 3's FP4 attention for Blackwell."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..device import Device
from . import HALF, AttentionCall, Package, Requirements, import_names

REQUIREMENTS = Requirements(
    backend="SAGE_ATTN_3",
    summary="SageAttention 3 (FP4), lossy",
    capabilities=((10, 0), (10, 3), (12, 0), (12, 1)),
    dtypes=HALF,
    head_dims=(64, 128),
    gqa=False,
    packages=(Package("sageattn3", "build it from SageAttention/sageattention3_blackwell"),),
    scale=False,
    lossy=True,
)

_sageattn3: Callable | None = None


def load(device: Device) -> None:
    global _sageattn3
    (_sageattn3,) = import_names(REQUIREMENTS.backend, "sageattn3", "sageattn3_blackwell")


def run(call: AttentionCall) -> torch.Tensor:
    """No mask gets here: the function takes `attn_mask` and ignores it."""
    query, key, value = (x.transpose(1, 2) for x in (call.query, call.key, call.value))
    default = query.shape[-1] ** -0.5
    if call.scale != default:
        query = query * (call.scale / default)  # it knows only the default scale
    # it subtracts K's mean in place, so it gets a copy
    key = key.clone(memory_format=torch.contiguous_format)
    return _sageattn3(query, key, value, is_causal=False).transpose(1, 2)
