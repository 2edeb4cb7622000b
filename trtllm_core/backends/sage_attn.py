"""SAGE_ATTN: the sageattention package's INT8 attention."""

from __future__ import annotations

import torch

from ..device import Device
from . import HALF, AttentionCall, Package, Requirements, Unavailable

REQUIREMENTS = Requirements(
    backend="SAGE_ATTN",
    summary="SageAttention (INT8 QK), lossy",
    minimum_capability=(8, 0),
    dtypes=HALF,
    head_dim_max=128,
    mask="none",
    packages=(Package("sageattention", "pip install sageattention"),),
    lossy=True,
)


def load(device: Device) -> None:
    raise Unavailable(REQUIREMENTS.backend, ("it is not part of this version yet",))


def run(call: AttentionCall) -> torch.Tensor:
    raise Unavailable(REQUIREMENTS.backend, ("it is not part of this version yet",))
