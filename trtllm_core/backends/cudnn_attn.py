"""CUDNN_ATTN: scaled_dot_product_attention pinned to cuDNN's kernel.

The pin matters for masked calls: PyTorch's own choice for them is its memory-efficient kernel.
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..device import Device
from . import HALF, AttentionCall, Request, Requirements
from ._sdpa import scaled_dot_product

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
    """A torch without cuDNN has nothing to pin."""
    if device.type == "cuda" and device.cudnn is None:
        return ("this torch has no cuDNN",)
    return ()


def load(device: Device) -> None:
    """Nothing to import: cuDNN comes with torch."""


def run(call: AttentionCall) -> torch.Tensor:
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        return scaled_dot_product(call)
