"""Every backend against the library behind it: `python -m benchmarks.backends_bench` on one GPU.

Prints time, error against float64 on sampled rows, and what the pack adds to a direct call of the
library, for self-attention and for cross-attention over 512 keys, as a Markdown table. The two ways
are timed in turn, and must launch the same GPU kernels: that is how it is known which library ran.
A backend that is slower than direct by 1% or more, or wrong, makes the command fail.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from benchmarks.workload import GRIDS, SampledRows, video_heads
from trtllm_core.api import Plan, plan
from trtllm_core.backends import AttentionCall, Unavailable, requirements
from trtllm_core.device import Device
from trtllm_core.specs import AttentionSpec

CROSS_KEYS = 512
OVERHEAD_LIMIT = 0.01
# Of an exact backend: this many times what PyTorch's own attention gets wrong in the same dtype.
EXACT_FACTOR = 1.5
LOSSY_ERROR = 0.1


def torch_sdpa(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def cudnn_attn(q, k, v):
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        return torch_sdpa(q, k, v)


def flash_attn() -> Callable:
    for module in ("flash_attn_interface", "fa3_fwd_interface", "flash_attn"):
        try:
            function = importlib.import_module(module).flash_attn_func
        except ImportError:
            continue
        return lambda q, k, v: _first(function(q, k, v, softmax_scale=q.shape[-1] ** -0.5))
    raise ImportError("no FlashAttention 3 or 2")


def flashinfer_attn() -> Callable:
    prefill = importlib.import_module("flashinfer.prefill").single_prefill_with_kv_cache
    return lambda q, k, v: prefill(q[0], k[0], v[0])[None]


def sage_attn() -> Callable:
    library = importlib.import_module("sageattention")
    version_1 = Device.current().packages["sageattention"].startswith("1")

    def run(q, k, v):
        k = k.clone() if version_1 else k  # version 1 changes K in place
        return library.sageattn(q, k, v, tensor_layout="NHD", sm_scale=q.shape[-1] ** -0.5)

    return run


# name -> a function that imports the library and returns q, k, v -> output, all [B, L, H, D]
DIRECT: dict[str, Callable[[], Callable]] = {
    "TORCH_SDPA": lambda: torch_sdpa,
    "CUDNN_ATTN": lambda: cudnn_attn,
    "FLASH_ATTN": flash_attn,
    "FLASHINFER_ATTN": flashinfer_attn,
    "SAGE_ATTN": sage_attn,
}


@dataclass(frozen=True)
class Measured:
    """One row: milliseconds through the pack and direct, the error, the kernel, what went wrong."""

    pack_ms: float
    direct_ms: float
    host_us: float
    error: float
    kernel: str
    faults: tuple[str, ...]

    @property
    def overhead(self) -> float:
        return self.pack_ms / self.direct_ms - 1


def through_pack(name: str, device: Device, head_dim: int) -> tuple[Plan, Callable]:
    """The plan for backend `name`, and q, k, v -> output by it, as the model hook calls it."""
    decided = plan(AttentionSpec(name), device, head_dim=head_dim, dtype=torch.bfloat16)
    if decided.active.backend != name:
        raise AssertionError(f"asked for {name}, planned {decided.active.backend}")

    def run(q, k, v):
        return decided.run(AttentionCall(q, k, v, scale=q.shape[-1] ** -0.5))

    return decided, run


def kernels(function: Callable) -> dict[str, float]:
    """The GPU kernels that `function` launches, with their microseconds."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        function()
        torch.cuda.synchronize()
    events = recorded.key_averages()
    is_kernel = torch.autograd.DeviceType.CUDA
    return {e.key: e.self_device_time_total for e in events if e.device_type == is_kernel}


def measure(name: str, tensors: tuple, exact: SampledRows, limit: float, rounds: int) -> Measured:
    """Time and judge backend `name` on q, k, v; Unavailable or ImportError if it cannot run."""
    q, k, v = tensors
    _, pack = through_pack(name, Device.current(q.device), q.shape[-1])
    direct = DIRECT[name]()
    for function in (direct, pack):
        for _ in range(3):
            out = function(q, k, v)
    error = exact.error(out)
    faults = []
    ours, theirs = (kernels(lambda f=f: f(q, k, v)) for f in (pack, direct))
    if set(ours) != set(theirs):
        faults.append(f"other kernels than the library's: {sorted(set(ours) ^ set(theirs))}")
    if not error <= limit:
        faults.append(f"error {error:.1e} above {limit:.1e}")
    pack_ms, direct_ms = timed_in_turn(lambda: pack(q, k, v), lambda: direct(q, k, v), rounds)
    host_us = host_microseconds(lambda: pack(q, k, v)) - host_microseconds(lambda: direct(q, k, v))
    measured = Measured(pack_ms, direct_ms, host_us, error, max(ours, key=ours.get), tuple(faults))
    if measured.overhead >= OVERHEAD_LIMIT:
        fault = f"{measured.overhead:.2%} slower than the library itself"
        return Measured(pack_ms, direct_ms, host_us, error, measured.kernel, (*faults, fault))
    return measured


def timed_in_turn(first: Callable, second: Callable, rounds: int) -> tuple[float, float]:
    """Median milliseconds per call of two functions, run in turn so that clocks drift for both.

    A round times so many calls in a row that the GPU is never waiting for the host.
    """
    calls = max(1, round(100 / max(one_round(first, 1), 0.1)))
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(rounds):
        order = ((first, times[0]), (second, times[1]))
        for function, into in order if index % 2 else reversed(order):
            into.append(one_round(function, calls))
    return statistics.median(times[0]), statistics.median(times[1])


def one_round(function: Callable, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def host_microseconds(function: Callable, calls: int = 20) -> float:
    """Median time until a call returns to Python, with the GPU idle before each."""
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def rows(grid: tuple[int, int, int], heads: int, rounds: int) -> Iterator[tuple[str, bool]]:
    """Markdown rows, each with whether it is in order; one for every backend and site."""
    q, k, v = video_heads(grid, heads)
    cross = tuple(x[:, :CROSS_KEYS].contiguous() for x in (k, v))
    for site, tensors in (("self", (q, k, v)), ("cross", (q, *cross))):
        exact = SampledRows(*tensors)
        reference_error = exact.error(torch_sdpa(*tensors))
        for name in DIRECT:
            limit = LOSSY_ERROR if requirements(name).lossy else EXACT_FACTOR * reference_error
            try:
                measured = measure(name, tensors, exact, limit, rounds)
            except (Unavailable, ImportError) as error:
                yield f"| {name} | {site} | not run: {error} | | | | | |", True
                continue
            yield row(name, site, measured), not measured.faults


def row(name: str, site: str, m: Measured) -> str:
    cells = [name, site, f"{m.pack_ms:.2f}", f"{m.direct_ms:.2f}", f"{m.overhead:+.2%}"]
    cells += [f"{m.host_us:+.0f}", f"{m.error:.1e}", f"`{m.kernel[:60]}`"]
    return "| " + " | ".join(cells) + " |" + "".join(f" **{fault}**" for fault in m.faults)


def _first(out):
    return out[0] if isinstance(out, tuple) else out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", choices=GRIDS, default="32k")
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: no CUDA device")
        return 0
    device = Device.current()
    frames, height, width = GRIDS[arguments.grid]
    print(f"`python -m benchmarks.backends_bench {' '.join(sys.argv[1:])}`")
    versions = ", ".join(f"{name} {version}" for name, version in device.packages.items())
    print(f"{device.label}, torch {device.torch}, cuDNN {device.cudnn}, {versions}")
    print(f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}; ", end="")
    print(
        f"{frames * height * width} tokens x {arguments.heads} heads x 128, bf16, synthetic heads\n"
    )
    print("| backend | site | pack ms | library ms | added | host us added | error | kernel |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    in_order = True
    with torch.inference_mode():
        for text, is_good in rows(GRIDS[arguments.grid], arguments.heads, arguments.rounds):
            print(text, flush=True)
            in_order &= is_good
    return 0 if in_order else 1


if __name__ == "__main__":
    sys.exit(main())
