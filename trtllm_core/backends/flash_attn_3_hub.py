"""FLASH_ATTN_3_HUB: FlashAttention 3 from the Hugging Face `kernels` library. Hopper."""

from __future__ import annotations

import torch

from ..device import Device
from . import HALF, AttentionCall, Package, Requirements, Unavailable

REQUIREMENTS = Requirements(
    backend="FLASH_ATTN_3_HUB",
    summary="FlashAttention 3 from the kernels library",
    minimum_capability=(9, 0),
    dtypes=HALF,
    head_dim_multiple=8,
    head_dim_max=256,
    mask="none",
    packages=(Package("kernels", "pip install kernels==0.14.1"),),
)


def load(device: Device) -> None:
    raise Unavailable(REQUIREMENTS.backend, ("it is not part of this version yet",))


def run(call: AttentionCall) -> torch.Tensor:
    raise Unavailable(REQUIREMENTS.backend, ("it is not part of this version yet",))
