"""TRTLLM_ATTN: TensorRT-LLM's generated FMHA kernels through FlashInfer."""

from __future__ import annotations

import torch

from ..device import Device
from ..specs import SAGE_DTYPES
from . import AttentionCall, Package, Request, Requirements, Unavailable

REQUIREMENTS = Requirements(
    backend="TRTLLM_ATTN",
    summary="FlashInfer trtllm-gen FMHA",
    capabilities=((10, 0), (10, 3)),
    dtypes=(torch.bfloat16,),
    head_dims=(128,),
    mask="padding",
    skip_softmax=True,
    quant_dtypes=SAGE_DTYPES,
    options=("q_block_size", "k_block_size"),
    packages=(Package("flashinfer", "pip install flashinfer-python"),),
)

SKIP_VERSION = "0.6.4"
SAGE_VERSION = "0.6.16rc1"


def refusals(request: Request, device: Device) -> tuple[str, ...]:
    """What each lossy mode needs beyond the dense kernel."""
    found = []
    spec = request.spec
    if "flashinfer" in device.packages:
        if spec.skip_softmax is not None:
            found.append(_too_old("skip_softmax", SKIP_VERSION, device))
        if spec.quant is not None and spec.quant.is_sage:
            found.append(_too_old("quant.dtype_qk", SAGE_VERSION, device))
    if spec.quant is not None and spec.quant.dtype_qk == "int8" and device.capability == (10, 3):
        found.append("quant.dtype_qk='int8' has kernels on sm_100 only (use 'fp8_e4m3')")
    return tuple(reason for reason in found if reason)


def _too_old(feature: str, minimum: str, device: Device) -> str | None:
    if device.has("flashinfer", minimum):
        return None
    version = device.packages["flashinfer"]
    return f"{feature} needs flashinfer {minimum} or newer, found {version}"


def load(device: Device) -> None:
    raise Unavailable(REQUIREMENTS.backend, ("it is not part of this version yet",))


def run(call: AttentionCall) -> torch.Tensor:
    raise Unavailable(REQUIREMENTS.backend, ("it is not part of this version yet",))
