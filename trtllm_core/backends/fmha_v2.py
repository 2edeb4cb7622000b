"""FMHA_V2: TensorRT-LLM's FMHA v2 kernels, compiled by FlashInfer on first use. Hopper."""

from __future__ import annotations

import torch

from ..device import Device
from . import HALF, AttentionCall, Package, Requirements, Unavailable

REQUIREMENTS = Requirements(
    backend="FMHA_V2",
    summary="TensorRT-LLM FMHA v2 through FlashInfer",
    capabilities=((9, 0),),
    dtypes=HALF,
    head_dims=(64, 128),
    mask="padding",
    skip_softmax=True,
    packages=(Package("flashinfer", "pip install flashinfer-python"),),
)


def load(device: Device) -> None:
    raise Unavailable(REQUIREMENTS.backend, ("it is not part of this version yet",))


def run(call: AttentionCall) -> torch.Tensor:
    raise Unavailable(REQUIREMENTS.backend, ("it is not part of this version yet",))
