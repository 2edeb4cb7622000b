"""CUDNN_ATTN: scaled_dot_product_attention pinned to cuDNN's kernel."""

from __future__ import annotations

import torch

from ..device import Device
from . import HALF, AttentionCall, Request, Requirements, Unavailable

REQUIREMENTS = Requirements(
    backend="CUDNN_ATTN",
    summary="PyTorch SDPA pinned to cuDNN",
    minimum_capability=(8, 0),
    dtypes=HALF,
    head_dim_multiple=8,
    head_dim_max=128,
    mask="any",
)


def refusals(request: Request, device: Device) -> tuple[str, ...]:
    if device.type == "cuda" and device.cudnn is None:
        return ("this torch was built without cuDNN",)
    return ()


def load(device: Device) -> None:
    raise Unavailable(REQUIREMENTS.backend, ("it is not part of this version yet",))


def run(call: AttentionCall) -> torch.Tensor:
    raise Unavailable(REQUIREMENTS.backend, ("it is not part of this version yet",))
