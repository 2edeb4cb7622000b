"""`python -m trtllm_core [DEVICE]`: what this machine can run, to be pasted into a bug report."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator

from . import backends
from .backends import Request, Unavailable
from .device import Device
from .selector import Selection, select
from .specs import BACKEND_NAMES, AttentionSpec, AttnQuantSpec, SkipSoftmaxSpec

# Loading these does more than import: said instead of done.
NOT_LOADED = {
    "FMHA_V2": "its kernels are compiled on first use",
    "FLASH_ATTN_HUB": "its kernel is downloaded on first use",
    "FLASH_ATTN_3_HUB": "its kernel is downloaded on first use",
}
HEAD_DIM = 128
ASKED = {
    "nothing lossy": AttentionSpec(),
    "Skip-Softmax": AttentionSpec(skip_softmax=SkipSoftmaxSpec(threshold=0.01)),
    "SAGE int8": AttentionSpec(quant=AttnQuantSpec(dtype_qk="int8")),
    "SAGE fp8_e4m3": AttentionSpec(quant=AttnQuantSpec(dtype_qk="fp8_e4m3")),
}


def lines(device: Device) -> Iterator[str]:
    """The table, line by line."""
    family = f", {device.family}" if device.family else ""
    yield f"device    {device.label}{family}"
    cudnn = f", cuDNN {device.cudnn}" if device.cudnn else ""
    python = f"Python {platform.python_version()}, {platform.system()}"
    yield f"torch     {device.torch}{cudnn}, {python}"
    packages = ", ".join(f"{name} {version}" for name, version in device.packages.items())
    yield f"packages  {packages or 'none of those that backends use'}"
    yield ""
    yield f"auto chooses, for head size {HEAD_DIM} and no masks:"
    device = with_failures(device)
    for asked, spec in ASKED.items():
        yield f"  {asked:<16}{_auto(spec, device)}"
    yield ""
    for name in BACKEND_NAMES:
        reasons = backends.reasons(name, Request(head_dim=HEAD_DIM), device)
        if reasons:
            yield f"{name:<18}no: {reasons[0]}"
            yield from (f"{'':<18}    {reason}" for reason in reasons[1:])
        else:
            note = f" ({NOT_LOADED[name]})" if name in NOT_LOADED else ""
            yield f"{name:<18}can run{note}"
            yield f"{'':<18}    {backends.requirements(name).describe()}"


def with_failures(device: Device) -> Device:
    """`device`, knowing which of the backends that should run fail to load."""
    for name in BACKEND_NAMES:
        if name in NOT_LOADED or backends.reasons(name, Request(head_dim=HEAD_DIM), device):
            continue
        try:
            backends.load_module(name).load(device)
        except Unavailable as error:
            device = device.with_broken(name, "; ".join(error.reasons))
    return device


def _auto(spec: AttentionSpec, device: Device) -> str:
    try:
        selection: Selection = select(spec, device, head_dim=HEAD_DIM)
    except Unavailable:
        return "nothing here can do that"
    return f"{selection.backend} ({selection.detail})"


if __name__ == "__main__":
    print("\n".join(lines(Device.current(*sys.argv[1:2]))))
