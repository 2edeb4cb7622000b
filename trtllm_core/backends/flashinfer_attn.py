"""FLASHINFER_ATTN: FlashInfer's dense single_prefill_with_kv_cache."""

from __future__ import annotations

import torch

from ..device import Device
from ..specs import FLASHINFER_DTYPES
from . import HALF, AttentionCall, Package, Requirements, Unavailable

REQUIREMENTS = Requirements(
    backend="FLASHINFER_ATTN",
    summary="FlashInfer single_prefill_with_kv_cache",
    minimum_capability=(8, 0),
    dtypes=HALF,
    head_dims=(64, 128, 256),
    mask="any",
    quant_dtypes=FLASHINFER_DTYPES,
    options=("dtype_vo", "flashinfer_backend"),
    packages=(Package("flashinfer", "pip install flashinfer-python"),),
)


def load(device: Device) -> None:
    raise Unavailable(REQUIREMENTS.backend, ("it is not part of this version yet",))


def run(call: AttentionCall) -> torch.Tensor:
    raise Unavailable(REQUIREMENTS.backend, ("it is not part of this version yet",))
