"""SAGE_ATTN_3: SageAttention 3's FP4 attention for Blackwell."""

from __future__ import annotations

import torch

from ..device import Device
from . import HALF, AttentionCall, Package, Requirements, Unavailable

REQUIREMENTS = Requirements(
    backend="SAGE_ATTN_3",
    summary="SageAttention 3 (FP4), lossy",
    capabilities=((10, 0), (10, 3), (12, 0), (12, 1)),
    dtypes=HALF,
    head_dims=(64, 128),
    gqa=False,
    mask="none",
    scale=False,
    packages=(Package("sageattn3", "build SageAttention/sageattention3_blackwell"),),
    lossy=True,
)


def load(device: Device) -> None:
    raise Unavailable(REQUIREMENTS.backend, ("it is not part of this version yet",))


def run(call: AttentionCall) -> torch.Tensor:
    raise Unavailable(REQUIREMENTS.backend, ("it is not part of this version yet",))
