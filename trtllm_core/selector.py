"""Which backend runs a site: a pure function of what is asked and what the machine is."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from . import backends
from .backends import Request, Unavailable
from .device import (
    ADA,
    AMPERE,
    DATACENTER_BLACKWELL,
    HOPPER,
    WORKSTATION_BLACKWELL,
    Device,
)
from .kernels import hopper
from .specs import BACKEND_NAMES, AttentionSpec

log = logging.getLogger("trtllm_attention")

PLATFORM_DEFAULT = "platform default"
AUTO = "auto"
CUDNN_MINIMUM = 90500
FA4_MINIMUM = "4.0.0b18"

# The order in which auto tries backends for a dense site; TORCH_SDPA ends every list. TRITON_ATTN
# is dense's choice on Hopper only while FlashAttention-3 is not installed, and only through its
# Hopper kernels: exact, and at FlashAttention-3's speed (benchmarks/results/hopper_h200.md).
PLATFORMS = {
    DATACENTER_BLACKWELL: ("TRTLLM_ATTN", "CUDNN_ATTN", "FLASHINFER_ATTN", "FLASH_ATTN"),
    WORKSTATION_BLACKWELL: ("CUDNN_ATTN", "FLASHINFER_ATTN", "FLASH_ATTN"),
    HOPPER: ("TRITON_ATTN", "FLASH_ATTN"),
    ADA: ("FLASH_ATTN",),
    AMPERE: ("FLASH_ATTN",),
}
# The same when Skip-Softmax or SAGE is asked for: the first that can do all of it. TRITON_ATTN stands
# before FMHA_V2 at every size: on an H200 at λ = 0.01 and in cubes it takes 111 ms where FMHA_V2 takes
# 172 (75,600 tokens, 40 heads; benchmarks/results/hopper_h200.md and fmha_v2_h200.md).
LOSSY = ("TRTLLM_ATTN", "TRITON_ATTN", "FMHA_V2")


@dataclass(frozen=True)
class Selection:
    """backend: what runs. source: which setting decided. detail: what of the machine decided, for
    the log. reasons: why better candidates were passed over. warnings: to be said once each.
    """

    backend: str
    source: str
    detail: str = ""
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def select(
    spec: AttentionSpec,
    device: Device,
    *,
    head_dim: int | None,
    role: str = "self",
    source: str = PLATFORM_DEFAULT,
    mask_free: bool = True,
    mask: str = "none",
    dtype: torch.dtype | None = None,
    gqa: bool = False,
) -> Selection:
    """The backend for one attention site.

    source: which setting `spec` came from. mask_free: whether the model never passes a mask.
    mask: the most general mask of this site, "none", "padding" or "any". None for head_dim or
    dtype: not known. Raises `Unavailable` with every reason.
    """
    request = Request(spec, role, head_dim, dtype, gqa, mask)
    if spec.backend is not None:
        return _explicit(spec.backend, request, device, source)
    if spec.is_lossy:
        return _auto_lossy(request, device, mask_free)
    return _auto_dense(request, device, mask_free)


def dense_companion(
    spec: AttentionSpec,
    device: Device,
    *,
    head_dim: int | None,
    role: str = "self",
    source: str = PLATFORM_DEFAULT,
    mask_free: bool = True,
    mask: str = "none",
    dtype: torch.dtype | None = None,
    gqa: bool = False,
) -> Selection:
    """What runs a call of the same site while Skip-Softmax is off (gate closed, layer ignored).

    A quant block stays in force, so its backend stays. Otherwise auto and TRITON_ATTN hand over to
    the platform's best dense backend; every other explicit backend runs its own dense kernel.
    """
    dense = replace(spec, skip_softmax=None)
    if spec.backend == "TRITON_ATTN" and not dense.is_lossy:
        dense = replace(dense, backend=None)
    return select(
        dense,
        device,
        head_dim=head_dim,
        role=role,
        source=source,
        mask_free=mask_free,
        mask=mask,
        dtype=dtype,
        gqa=gqa,
    )


def candidates(request: Request, device: Device) -> tuple[str, ...]:
    """Every backend that could serve `request` on `device`, REFERENCE last."""
    return tuple(name for name in BACKEND_NAMES if not backends.reasons(name, request, device))


def _explicit(name: str, request: Request, device: Device, source: str) -> Selection:
    backend, warnings = _documented_fallback(name, request, device)
    reasons = backends.reasons(backend, request, device)
    if reasons:
        if backend != name:
            reasons = (*warnings, *(f"{backend}: {reason}" for reason in reasons))
        advice = (_advice(request, device), *_cast_warning(backend, request))
        raise Unavailable(name, reasons, ". ".join(advice))
    cast = _cast_warning(backend, request)
    return Selection(backend, source, device.label, warnings=warnings + cast)


def _documented_fallback(
    name: str, request: Request, device: Device
) -> tuple[str, tuple[str, ...]]:
    """The three fall-backs that vLLM-Omni documents; nothing else falls back."""
    if name == "SAGE_ATTN_3" and request.gqa:
        without_gqa = replace(request, gqa=False)
        if not backends.reasons(name, without_gqa, device):
            return "TORCH_SDPA", ("SAGE_ATTN_3 has no GQA: this site runs TORCH_SDPA",)
        return name, ()
    warnings = []
    is_old = device.capability is not None and device.capability < (9, 0)
    if name == "FLASH_ATTN_3_HUB" and device.type == "cuda" and is_old:
        warnings.append(
            f"FLASH_ATTN_3_HUB needs Hopper, this is {device.label}: using FLASH_ATTN_HUB"
        )
        name = "FLASH_ATTN_HUB"
    if name in ("FLASH_ATTN_HUB", "FLASH_ATTN_3_HUB") and not device.has("kernels"):
        why = device.broken.get("kernels", "not installed (pip install kernels==0.14.1)")
        warnings.append(f"{name} needs the kernels library, {why}: using FLASH_ATTN")
        name = "FLASH_ATTN"
    return name, tuple(warnings)


def _auto_lossy(request: Request, device: Device, mask_free: bool) -> Selection:
    """The best backend that can do all of what is asked."""
    names = LOSSY if device.type != "cpu" else ("REFERENCE",)
    found = []
    for name in names:
        reasons = backends.reasons(name, request, device)
        found.append((name, reasons + _mask_reasons(name, mask_free)))
    name, passed_over, warnings = _first_able(found, device)
    if name is None:
        asked = f"auto with {_asked(request.spec)}"
        raise Unavailable(asked, passed_over, _advice(request, device))
    detail = f"{_generation(device)}, {_asked(request.spec)}"
    return Selection(name, AUTO, detail, passed_over, warnings + _cast_warning(name, request))


def _auto_dense(request: Request, device: Device, mask_free: bool) -> Selection:
    """The platform's default; TORCH_SDPA ends every list."""
    found = []
    for name in PLATFORMS.get(device.family, ()):
        reasons = backends.reasons(name, request, device) + _mask_reasons(name, mask_free)
        found.append((name, reasons + _platform_reasons(name, request, device)))
    found.append(("TORCH_SDPA", backends.reasons("TORCH_SDPA", request, device)))
    name, passed_over, warnings = _first_able(found, device)
    if name is None:
        raise Unavailable("auto", passed_over, _advice(request, device))
    return Selection(name, PLATFORM_DEFAULT, _detail(name, request, device), passed_over, warnings)


def _first_able(
    found: list[tuple[str, tuple[str, ...]]], device: Device
) -> tuple[str | None, tuple[str, ...], tuple[str, ...]]:
    """The first name without reasons, the reasons of those before it, and which of them broke."""
    passed_over, warnings = [], []
    for name, reasons in found:
        if not reasons:
            return name, tuple(passed_over), tuple(warnings)
        passed_over += (f"{name}: {reason}" for reason in reasons)
        if name in device.broken:
            warnings.append(f"{name} would be chosen here, but {device.broken[name]}")
    return None, tuple(passed_over), tuple(warnings)


def _mask_reasons(name: str, mask_free: bool) -> tuple[str, ...]:
    if name == "TRTLLM_ATTN" and not mask_free:
        return ("it cannot honour an attention mask, and this model may pass one",)
    return ()


def _platform_reasons(name: str, request: Request, device: Device) -> tuple[str, ...]:
    """Why auto passes over a backend that would run if it were named."""
    reasons = []
    if name == "TRTLLM_ATTN" and request.head_dim is None:
        reasons.append("the head size is not known")
    if name == "CUDNN_ATTN" and (device.cudnn or 0) < CUDNN_MINIMUM:
        reasons.append(f"cuDNN {CUDNN_MINIMUM} or newer is wanted, found {device.cudnn}")
    if name == "TRITON_ATTN":
        has_flash_3 = device.has("flash-attn-3") or device.has("fa3-fwd")
        if has_flash_3 and "FLASH_ATTN" not in device.broken:
            reasons.append("FlashAttention-3 is installed")
        reasons += hopper.unsupported(
            device.capability, request.dtype or torch.bfloat16, request.head_dim, None, device.triton
        )
    is_blackwell = device.family in (DATACENTER_BLACKWELL, WORKSTATION_BLACKWELL)
    if name == "FLASH_ATTN" and is_blackwell and not device.has("flash-attn-4", FA4_MINIMUM):
        reasons.append(f"on Blackwell auto wants flash-attn-4 {FA4_MINIMUM} or newer")
    return (*reasons, *_cast_warning(name, request))


def _detail(name: str, request: Request, device: Device) -> str:
    """What decided for the platform's default, in the words of vLLM-Omni's log line."""
    if name == "TRTLLM_ATTN":
        return f"{device.family} {device.arch}, head_dim {request.head_dim}"
    if name == "CUDNN_ATTN":
        return f"{_generation(device)}, cuDNN {device.cudnn}"
    return _generation(device)


def _generation(device: Device) -> str:
    return f"{device.family.split()[-1]} {device.arch}" if device.family else device.label


def _cast_warning(name: str, request: Request) -> tuple[str, ...]:
    """Said when q, k and v will be rounded to a dtype that the backend takes."""
    if request.dtype is None:
        return ()
    dtype = backends.requirements(name).compute_dtype(request.dtype)
    if dtype == request.dtype:
        return ()
    given, taken = (str(d).removeprefix("torch.") for d in (request.dtype, dtype))
    return (f"{name} computes {given} inputs in {taken} and casts the output back",)


def _asked(spec: AttentionSpec) -> str:
    parts = []
    if spec.skip_softmax is not None:
        parts.append("skip_softmax")
    if spec.quant is not None and spec.quant.is_sage:
        parts.append(f"quant.dtype_qk={spec.quant.dtype_qk}")
    return " and ".join(parts)


def _advice(request: Request, device: Device) -> str:
    able = candidates(request, device)
    if not able:
        return f"On {device.label} nothing can do what was asked"
    if able == ("REFERENCE",):
        return f"On {device.label} only REFERENCE can, which is slow"
    return f"On {device.label} {', '.join(name for name in able if name != 'REFERENCE')} can"


_SAID: set[str] = set()


def announce(selection: Selection, role: str, said: set[str] = _SAID) -> None:
    """Log which backend runs `role` and why, and the selection's warnings; each line once.

    said: the lines already logged, by default those of this process.
    """
    for level, line in ((logging.INFO, line_of(selection, role)),) + tuple(
        (logging.WARNING, warning) for warning in selection.warnings
    ):
        key = f"{role}: {line}"
        if key not in said:
            said.add(key)
            log.log(level, line)


def line_of(selection: Selection, role: str) -> str:
    """vLLM-Omni's log line for a selection."""
    name = selection.backend
    if selection.source in (PLATFORM_DEFAULT, AUTO):
        name = "SDPA" if name == "TORCH_SDPA" else name
        return f"Defaulting to diffusion attention backend {name} ({selection.detail})"
    if selection.source.startswith("attention_config."):
        return (
            f"Resolved diffusion attention backend {name!r} for role={role!r} "
            f"via {selection.source}"
        )
    return f"Using diffusion attention backend {name!r}"
