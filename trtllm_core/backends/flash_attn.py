"""FLASH_ATTN: FlashAttention 4 on Blackwell, else FlashAttention 3, else 2."""

from __future__ import annotations

import torch

from ..device import Device
from . import HALF, AttentionCall, Package, Requirements, Unavailable

BLACKWELL = ((10, 0), (10, 3), (12, 0), (12, 1))
HOPPER = ((9, 0),)

REQUIREMENTS = Requirements(
    backend="FLASH_ATTN",
    summary="FlashAttention 4, 3 or 2",
    minimum_capability=(8, 0),
    dtypes=HALF,
    head_dim_multiple=8,
    head_dim_max=256,
    mask="padding",
    any_package=(
        Package("flash-attn-4", "pip install flash-attn-4", "4.0.0b18", BLACKWELL),
        Package("flash-attn-3", "build flash-attention/hopper", None, HOPPER),
        Package("fa3-fwd", "pip install fa3-fwd", None, HOPPER),
        Package("flash-attn", "pip install flash-attn --no-build-isolation"),
    ),
)


def load(device: Device) -> None:
    raise Unavailable(REQUIREMENTS.backend, ("it is not part of this version yet",))


def run(call: AttentionCall) -> torch.Tensor:
    raise Unavailable(REQUIREMENTS.backend, ("it is not part of this version yet",))
