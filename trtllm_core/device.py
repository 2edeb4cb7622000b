"""What this machine is, as plain data: a test can imagine any GPU and any set of packages."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

UNKNOWN_VERSION = "unknown"

# The name used everywhere in trtllm_core -> (module to find, distributions that may carry it).
# A module name with a slash is a file inside a package, looked for without importing the package.
PACKAGES = {
    "triton": ("triton", ("triton", "triton-windows", "pytorch-triton")),
    "flash-attn": ("flash_attn/flash_attn_interface.py", ("flash-attn",)),
    "flash-attn-3": ("flash_attn_interface", ("flash-attn-3", "flash_attn_3")),
    "fa3-fwd": ("fa3_fwd_interface", ("fa3-fwd",)),
    "flash-attn-4": ("flash_attn/cute", ("flash-attn-4", "fa4")),
    "flashinfer": ("flashinfer", ("flashinfer-python",)),
    "flashinfer-cubin": ("flashinfer_cubin", ("flashinfer-cubin",)),
    "flashinfer-jit-cache": ("flashinfer_jit_cache", ("flashinfer-jit-cache",)),
    "sageattention": ("sageattention", ("sageattention",)),
    "sageattn3": ("sageattn3", ("sageattn3",)),
    "kernels": ("kernels", ("kernels",)),
}

DATACENTER_BLACKWELL = "datacenter Blackwell"
WORKSTATION_BLACKWELL = "workstation Blackwell"
HOPPER = "Hopper"
ADA = "Ada"
AMPERE = "Ampere"


@dataclass(frozen=True)
class Device:
    """One device and what is installed beside it. Nothing here is looked up lazily.

    type: "cuda" (NVIDIA), "rocm", "cpu", or what torch calls it. capability: (major, minor) of a
    CUDA device. torch: its version. cudnn: e.g. 91002, or None. packages: name (a key of
    `PACKAGES`) -> version, only what can be found. broken: package or backend name -> the error
    with which importing it failed. index: which of several CUDA devices, None for the current one; equal GPUs
    are equal devices.
    """

    type: str = "cuda"
    capability: tuple[int, int] | None = None
    name: str = ""
    torch: str = str(torch.__version__)
    cudnn: int | None = None
    packages: Mapping[str, str] = field(default_factory=dict, hash=False)
    broken: Mapping[str, str] = field(default_factory=dict, hash=False)
    index: int | None = field(default=None, compare=False)

    @classmethod
    def current(cls, torch_device: torch.device | str | None = None) -> Device:
        """The device that `torch_device` names (default: the current CUDA device, else the CPU).

        Cached; reads package metadata but imports none of the packages.
        """
        if torch_device is None:
            torch_device = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(torch_device)
        index = device.index
        if device.type == "cuda" and index is None:
            index = torch.cuda.current_device()
        return _describe(device.type, index)

    @property
    def family(self) -> str | None:
        """The row of the platform tables that this GPU belongs to, None for every other device."""
        if self.type != "cuda" or self.capability is None:
            return None
        major, minor = self.capability
        if self.capability in ((10, 0), (10, 3)):
            return DATACENTER_BLACKWELL
        if major == 12:
            return WORKSTATION_BLACKWELL
        if self.capability == (9, 0):
            return HOPPER
        if self.capability == (8, 9):
            return ADA
        return AMPERE if major == 8 else None

    @property
    def arch(self) -> str:
        """`sm_90`, or the device's type where that means nothing."""
        return f"sm_{self.capability[0]}{self.capability[1]}" if self.capability else self.type

    @property
    def label(self) -> str:
        """`NVIDIA H200 (sm_90)`, for messages."""
        if self.type == "cpu":
            return "the CPU"
        return f"{self.name} ({self.arch})" if self.name else self.arch

    @property
    def triton(self) -> str | None:
        return self.packages.get("triton")

    def has(self, package: str, minimum: str | None = None) -> bool:
        """Whether `package` is installed, importable as far as known, and new enough."""
        version = self.packages.get(package)
        if version is None or package in self.broken:
            return False
        return minimum is None or at_least(version, minimum)

    def with_broken(self, name: str, error: str) -> Device:
        """This device, knowing that package or backend `name` failed with `error`."""
        return replace(self, broken={**self.broken, name: error})


def at_least(version: str, minimum: str) -> bool:
    """PEP 440 order; a version nobody knows is not enough."""
    return version != UNKNOWN_VERSION and TorchVersion(version) >= minimum


def capability_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The compute capability of the GPU that holds `tensor`; None for every other device."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else None


def _exists(module: str) -> bool:
    package, _, inside = module.partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    if not inside:
        return spec.origin is not None  # not a stray folder of that name
    return any(Path(folder, inside).exists() for folder in spec.submodule_search_locations or ())


def _version(distributions: tuple[str, ...]) -> str:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return UNKNOWN_VERSION


@functools.cache
def installed() -> Mapping[str, str]:
    """Every package of `PACKAGES` that can be found, with its version."""
    return {
        name: _version(distributions)
        for name, (module, distributions) in PACKAGES.items()
        if _exists(module)
    }


@functools.cache
def _describe(kind: str, index: int | None) -> Device:
    capability, name = None, ""
    if kind == "cuda":
        name = torch.cuda.get_device_name(index)
        if torch.version.hip:
            kind = "rocm"
        else:
            capability = torch.cuda.get_device_capability(index)
    cudnn = torch.backends.cudnn.version() if kind == "cuda" else None
    return Device(kind, capability, name, cudnn=cudnn, packages=installed(), index=index)


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """A context in which `tensor`'s GPU is the current one, and after which the one before is again."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
