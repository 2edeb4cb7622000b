"""TORCH_SDPA: PyTorch's scaled_dot_product_attention with its own choice of kernel."""

from __future__ import annotations

import torch

from ..device import Device
from . import HALF, AttentionCall, Requirements
from ._sdpa import scaled_dot_product

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
    return scaled_dot_product(call)
