"""The table of backends, what each can do as data, and the form in which a backend gets a call.

A backend is a module with three names:
    REQUIREMENTS      a `Requirements`, plain data: what it can do, read by the selector
    load(device)      import the exact callable that `run` calls; raises `Unavailable`
    run(call)         compute one `AttentionCall`, returns [batch, query tokens, heads, head_dim]
where data cannot say it all:
    refusals(request, device)  further reasons, as a tuple of sentences, why it cannot run
and, where it can skip tiles and count them:
    tile_count(call)  how many (query tile, KV tile) pairs `call` consists of, all heads and batches
    variant(call)     which of several kernels runs `call`, for reports

Modules are imported when they are first asked for. Importing one imports nothing but torch: the
library behind it is imported by `load`, so that a missing or broken package costs nothing until
somebody selects it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

import torch

from ..device import UNKNOWN_VERSION, Device, at_least
from ..specs import BACKEND_NAMES, AttentionSpec, AttnQuantSpec

_MODULES = {name: name.lower() for name in BACKEND_NAMES}

MASKS = ("none", "padding", "any")
HALF = (torch.bfloat16, torch.float16)
QUANT_DEFAULTS = AttnQuantSpec()


class Unavailable(RuntimeError):
    """A backend that cannot run here. `reasons` holds every reason, in plain words."""

    def __init__(self, backend: str, reasons: tuple[str, ...], advice: str = ""):
        self.backend = backend
        self.reasons = tuple(reasons)
        text = f"{backend} cannot run: " + "; ".join(self.reasons)
        super().__init__(f"{text}. {advice}" if advice else text)


@dataclass(slots=True)
class AttentionCall:
    """One attention call, already validated. The backend owns it and may drop its tensors.

    query: [batch, query tokens, heads, head_dim]; key, value: [batch, key tokens, key heads,
        head_dim], any strides. mask: None, or broadcastable to [batch, heads, query tokens, key
        tokens], boolean (True attends) or additive. key_lengths: None, or int32 [batch]: keys from
        there on are padding; host_key_lengths: the same numbers where reading them costs no wait.
    threshold: λ, or None for no skipping. quant: SAGE, or None.
    kv_order: "own_first" or "sequential". skipped: None, or an int64 tensor of one element on the
        call's device to which the number of skipped tiles is added without a sync.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    mask: torch.Tensor | None = None
    key_lengths: torch.Tensor | None = None
    host_key_lengths: tuple[int, ...] | None = None
    threshold: float | None = None
    quant: AttnQuantSpec | None = None
    kv_order: str = "own_first"
    skipped: torch.Tensor | None = None


@dataclass(frozen=True)
class Request:
    """What one attention site needs. None means not known (yet), and refuses nothing.

    mask: "none", "padding" (lengths say it all) or "any".
    """

    spec: AttentionSpec = AttentionSpec()
    role: str = "self"
    head_dim: int | None = None
    dtype: torch.dtype | None = None
    gqa: bool = False
    mask: str = "none"


@dataclass(frozen=True)
class Package:
    """A package a backend imports. name: a key of `device.PACKAGES`; install: how to get it.

    capabilities: the GPUs on which this package is one that could serve, None for all.
    """

    name: str
    install: str
    minimum: str | None = None
    capabilities: tuple[tuple[int, int], ...] | None = None

    def is_for(self, device: Device) -> bool:
        return self.capabilities is None or device.capability in self.capabilities

    def reason(self, device: Device) -> str | None:
        """Why it cannot be used on `device`, or None."""
        if not self.is_for(device):
            return f"{self.name} serves {_archs(self.capabilities)} only"
        wanted = f"{self.name} {self.minimum} or newer" if self.minimum else self.name
        version = device.packages.get(self.name)
        if version is None:
            return f"{wanted} is not installed ({self.install})"
        if self.name in device.broken:
            return f"{self.name} {version} cannot be imported: {device.broken[self.name]}"
        if self.minimum and not at_least(version, self.minimum):
            found = "of unknown version" if version == UNKNOWN_VERSION else version
            return f"{wanted} is needed, found {found} ({self.install})"
        return None


@dataclass(frozen=True)
class Requirements:
    """What a backend can do, as data.

    devices: device types, None for any. capabilities: exact compute capabilities, or
    minimum_capability: the lowest. dtypes: what it computes in. head_dims: exact head sizes, or
    head_dim_multiple and head_dim_max. mask: the most general mask it honours. quant_dtypes: the
    `quant.dtype_qk` it takes; options: the other keys of the quant block that it reads.
    packages: all of them are needed; any_package: one of them is. Packages are tried in order.
    lossy: it differs from exact attention by more than rounding whatever is asked.
    """

    backend: str
    summary: str
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[str, ...] | None = ("cuda",)
    capabilities: tuple[tuple[int, int], ...] | None = None
    minimum_capability: tuple[int, int] | None = None
    head_dims: tuple[int, ...] | None = None
    head_dim_multiple: int = 1
    head_dim_max: int | None = None
    gqa: bool = True
    mask: str = "none"
    scale: bool = True
    skip_softmax: bool = False
    quant_dtypes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    packages: tuple[Package, ...] = ()
    any_package: tuple[Package, ...] = ()
    lossy: bool = False

    def reasons(self, request: Request, device: Device) -> tuple[str, ...]:
        """Every reason why this backend cannot serve `request` on `device`; empty if it can."""
        found = [
            self._device_reason(device),
            *(package.reason(device) for package in self.packages),
            self._any_package_reason(device),
            self._head_dim_reason(request.head_dim),
            self._dtype_reason(request.dtype),
            self._mask_reason(request.mask),
            *self._spec_reasons(request.spec),
        ]
        if request.gqa and not self.gqa:
            found.append("it needs as many key heads as query heads (no GQA)")
        if self.backend in device.broken:
            found.append(f"it failed to load: {device.broken[self.backend]}")
        return tuple(reason for reason in found if reason)

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype to cast q, k and v to: `dtype` itself where the backend takes it."""
        return dtype if dtype in self.dtypes else self.dtypes[0]

    def supports_mask(self, mask: str) -> bool:
        return MASKS.index(mask) <= MASKS.index(self.mask)

    def describe(self) -> str:
        """One line for a table: what runs, on what."""
        gpus = "any device" if self.devices is None else _kinds(self.devices)
        if self.capabilities is not None:
            gpus = _archs(self.capabilities)
        elif self.minimum_capability is not None:
            gpus = f"sm_{self.minimum_capability[0]}{self.minimum_capability[1]} and newer"
        parts = [
            gpus,
            "/".join(_dtype_name(d) for d in self.dtypes),
            f"head size {self._head_dims()}",
        ]
        parts.append(f"masks: {self.mask}")
        parts.append("GQA" if self.gqa else "no GQA")
        if not self.scale:
            parts.append("scale by prescaling q")
        if self.skip_softmax:
            parts.append("Skip-Softmax")
        if self.quant_dtypes:
            parts.append("dtype_qk " + "/".join(self.quant_dtypes))
        return ", ".join(parts)

    def _head_dims(self) -> str:
        if self.head_dims is not None:
            return ", ".join(str(d) for d in self.head_dims)
        limit = "any" if self.head_dim_max is None else f"up to {self.head_dim_max}"
        if self.head_dim_multiple > 1:
            limit += f", a multiple of {self.head_dim_multiple}"
        return limit

    def _device_reason(self, device: Device) -> str | None:
        if self.devices is not None and device.type not in self.devices:
            return f"it needs {_kinds(self.devices)}, this is {device.label}"
        if self.capabilities is not None and device.capability not in self.capabilities:
            return f"it needs {_archs(self.capabilities)}, this is {device.label}"
        low = self.minimum_capability
        if low is not None and (device.capability is None or device.capability < low):
            return f"it needs sm_{low[0]}{low[1]} or newer, this is {device.label}"
        return None

    def _any_package_reason(self, device: Device) -> str | None:
        reasons = [package.reason(device) for package in self.any_package if package.is_for(device)]
        if not self.any_package or (reasons and not all(reasons)):
            return None
        return " and ".join(reasons or (package.reason(device) for package in self.any_package))

    def _head_dim_reason(self, head_dim: int | None) -> str | None:
        if head_dim is None:
            return None
        fits = self.head_dims is None or head_dim in self.head_dims
        fits = fits and head_dim % self.head_dim_multiple == 0
        fits = fits and (self.head_dim_max is None or head_dim <= self.head_dim_max)
        return None if fits else f"head size {head_dim} is not supported (only {self._head_dims()})"

    def _dtype_reason(self, dtype: torch.dtype | None) -> str | None:
        """float32 and the other half type are cast, and that is said; nothing else is."""
        if dtype is None or dtype in self.dtypes or dtype in (*HALF, torch.float32):
            return None
        takes = ", ".join(_dtype_name(d) for d in self.dtypes)
        return f"it does not take {_dtype_name(dtype)} (only {takes})"

    def _mask_reason(self, mask: str) -> str | None:
        if self.supports_mask(mask):
            return None
        kind = "a padding mask" if mask == "padding" else "an attention mask"
        honours = "no mask" if self.mask == "none" else "only masks that cut a padded suffix"
        return f"it cannot honour {kind} ({honours})"

    def _spec_reasons(self, spec: AttentionSpec) -> list[str]:
        found = []
        if spec.skip_softmax is not None and not self.skip_softmax:
            found.append("it has no Skip-Softmax (remove skip_softmax or choose another backend)")
        quant = spec.quant
        if quant is None:
            return found
        if quant.dtype_qk is not None and quant.dtype_qk not in self.quant_dtypes:
            takes = " or ".join(repr(d) for d in self.quant_dtypes)
            takes = f"only {takes}" if takes else "it reads no quant block"
            found.append(f"quant.dtype_qk={quant.dtype_qk!r} is not for it ({takes})")
        for option in ("dtype_vo", "q_block_size", "k_block_size", "flashinfer_backend"):
            value = getattr(quant, option)
            if value != getattr(QUANT_DEFAULTS, option) and option not in self.options:
                found.append(f"quant.{option}={value!r} is not read by it (remove that key)")
        return found


def load_module(name: str) -> ModuleType:
    """The module of backend `name`, imported on first use."""
    return importlib.import_module(f".{_MODULES[name]}", __name__)


def last_contiguous(x: torch.Tensor) -> torch.Tensor:
    """x, copied if the numbers of a head are not consecutive, as where a model interleaves q, k and v."""
    return x if x.stride(-1) == 1 else x.contiguous()


def import_names(backend: str, module: str, *names: str) -> tuple:
    """`names` from `module`, as `backend` needs them; `Unavailable` if that fails in any way."""
    try:
        found = importlib.import_module(module)
        return tuple(getattr(found, name) for name in names)
    except Exception as error:  # a broken package may raise anything while it is imported
        lines = str(error).splitlines() or [""]
        reason = f"{module} cannot be imported: {type(error).__name__}: {lines[0]}"
        raise Unavailable(backend, (reason,)) from error


def requirements(name: str) -> Requirements:
    return load_module(name).REQUIREMENTS


def reasons(name: str, request: Request, device: Device) -> tuple[str, ...]:
    """Every reason why backend `name` cannot serve `request` on `device`, data and code."""
    module = load_module(name)
    found = module.REQUIREMENTS.reasons(request, device)
    refusals = getattr(module, "refusals", None)
    return found if refusals is None else found + tuple(refusals(request, device))


def _kinds(devices: tuple[str, ...]) -> str:
    return " or ".join("an NVIDIA GPU" if kind == "cuda" else kind for kind in devices)


def _archs(capabilities: tuple[tuple[int, int], ...]) -> str:
    return "/".join(f"sm_{major}{minor}" for major, minor in capabilities)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
