"""TRITON_ATTN: our own Triton kernels, Ampere and later."""

from __future__ import annotations

import torch

from ..device import Device
from ..specs import SAGE_DTYPES
from . import HALF, AttentionCall, Package, Request, Requirements, Unavailable

REQUIREMENTS = Requirements(
    backend="TRITON_ATTN",
    summary="this pack's Triton kernels",
    minimum_capability=(8, 0),
    dtypes=HALF,
    head_dims=(64, 80, 96, 128, 256),
    mask="padding",
    skip_softmax=True,
    quant_dtypes=SAGE_DTYPES,
    options=("q_block_size", "k_block_size"),
    packages=(Package("triton", "pip install triton"),),
)


def refusals(request: Request, device: Device) -> tuple[str, ...]:
    """FP8 products need the tensor cores of Ada or later."""
    quant = request.spec.quant
    is_fp8 = quant is not None and quant.dtype_qk == "fp8_e4m3"
    if is_fp8 and device.capability is not None and device.capability < (8, 9):
        return ("quant.dtype_qk='fp8_e4m3' needs sm_89 or newer (use 'int8')",)
    return ()


def load(device: Device) -> None:
    raise Unavailable(REQUIREMENTS.backend, ("it is not part of this version yet",))


def run(call: AttentionCall) -> torch.Tensor:
    raise Unavailable(REQUIREMENTS.backend, ("it is not part of this version yet",))
