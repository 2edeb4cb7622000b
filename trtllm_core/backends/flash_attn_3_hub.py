"""FLASH_ATTN_3_HUB: FlashAttention 3 from the Hugging Face `kernels` library. Hopper."""

from __future__ import annotations

import torch

from ..device import Device
from . import HALF, AttentionCall, Requirements
from ._flash import FlashLibrary
from ._hub import KERNELS, load_from_hub

REQUIREMENTS = Requirements(
    backend="FLASH_ATTN_3_HUB",
    summary="FlashAttention 3 from the kernels library",
    capabilities=((9, 0),),
    dtypes=HALF,
    head_dim_multiple=8,
    head_dim_max=256,
    mask="padding",
    packages=(KERNELS,),
)

_library: FlashLibrary | None = None


def load(device: Device) -> None:
    global _library
    if _library is None:
        _library = load_from_hub(
            REQUIREMENTS.backend, "kernels-community/flash-attn3", 1, "FlashAttention 3 (Hub)"
        )


def run(call: AttentionCall) -> torch.Tensor:
    return _library.run(call)
