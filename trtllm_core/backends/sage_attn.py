"""SAGE_ATTN: the sageattention package's INT8 attention, version 2 or 1."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..device import Device
from . import HALF, AttentionCall, Package, Request, Requirements, Unavailable, import_names, last_contiguous

REQUIREMENTS = Requirements(
    backend="SAGE_ATTN",
    summary="SageAttention (INT8 QK), lossy",
    minimum_capability=(8, 0),
    dtypes=HALF,
    head_dim_max=128,
    packages=(
        Package("sageattention", "build SageAttention 2.2 or pip install sageattention==1.0.6"),
    ),
    lossy=True,
)

# Version 2 dispatches by architecture, to extensions that its build may have left out. None is a
# branch in plain Triton.
ARCHITECTURES = {
    (8, 0): "SM80_ENABLED",
    (8, 6): None,
    (8, 9): "SM89_ENABLED",
    (9, 0): "SM90_ENABLED",
    (12, 0): "SM89_ENABLED",
    (12, 1): "SM89_ENABLED",
}
VERSION_1_HEAD_DIMS = (64, 96, 128)

_sageattn: Callable | None = None
_changes_key = False


def refusals(request: Request, device: Device) -> tuple[str, ...]:
    """What differs between versions 1 (Triton, any GPU) and 2 (one build per architecture)."""
    version = device.packages.get("sageattention")
    if version is None:
        return ()
    if _is_version_1(version):
        if request.head_dim is None or request.head_dim in VERSION_1_HEAD_DIMS:
            return ()
        return (f"sageattention {version} has head sizes 64, 96 and 128, not {request.head_dim}",)
    new_enough = device.capability is not None and device.capability >= (8, 0)
    if new_enough and device.capability not in ARCHITECTURES:
        return (
            f"sageattention {version} has no kernel for {device.arch} "
            "(sageattention==1.0.6, which is plain Triton, does)",
        )
    return ()


def load(device: Device) -> None:
    """Import `sageattn`, and see that its branch for this architecture was built."""
    global _sageattn, _changes_key
    (function,) = import_names(REQUIREMENTS.backend, "sageattention", "sageattn")
    is_version_1 = _is_version_1(device.packages.get("sageattention", "2"))
    extension = ARCHITECTURES.get(device.capability)
    if not is_version_1 and extension is not None:
        (built,) = import_names(REQUIREMENTS.backend, "sageattention.core", extension)
        if not built:
            raise Unavailable(
                REQUIREMENTS.backend,
                (f"this build of sageattention lacks its kernels for {device.arch} ({extension})",),
            )
    _sageattn, _changes_key = function, is_version_1


def run(call: AttentionCall) -> torch.Tensor:
    """No mask gets here: sageattn takes `attn_mask` among its unused keywords and drops it."""
    query, key, value = map(last_contiguous, (call.query, call.key, call.value))
    if _changes_key:
        key = key.clone()  # version 1 subtracts K's mean in place
    return _sageattn(query, key, value, tensor_layout="NHD", is_causal=False, sm_scale=call.scale)


def _is_version_1(version: str) -> bool:
    return version.partition(".")[0] == "1"
