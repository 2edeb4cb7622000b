"""What the FlashInfer backends share: its packages, its compiler, one workspace, whole sequences."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ..device import UNKNOWN_VERSION, Device
from . import AttentionCall, Package, Unavailable

log = logging.getLogger("trtllm_attention")

INSTALL = "pip install flashinfer-python"
FLASHINFER = Package("flashinfer", INSTALL)

COMPILER = (
    "FlashInfer compiles with ninja and a CUDA toolkit (nvcc) of the CUDA version that torch was built "
    "for; set CUDA_HOME if nvcc is not on the PATH"
)

# One nvcc process on one core per file; measured, see benchmarks/results/fmha_v2_h200.md.
SECONDS_PER_FILE = 20.0
PROGRESS_SECONDS = 15.0

# (backend, what) -> why it cannot be built, or None; no exception, whose traceback would hold a caller's tensors
_built: dict[tuple[str, str], str | None] = {}
_workspaces: dict[torch.device, torch.Tensor] = {}


def mismatches(device: Device) -> tuple[str, ...]:
    """FlashInfer refuses to be imported beside kernel packages of another version: say so first."""
    version = device.packages.get("flashinfer")
    if version in (None, UNKNOWN_VERSION) or os.environ.get("FLASHINFER_DISABLE_VERSION_CHECK"):
        return ()
    found = []
    for name in ("flashinfer-cubin", "flashinfer-jit-cache"):
        other = device.packages.get(name)
        # the jit cache's version ends in the CUDA version it was built for
        if other not in (None, UNKNOWN_VERSION) and other.partition("+")[0] != version:
            found.append(f"{name} {other} does not fit flashinfer {version} (install {name}=={version})")
    return tuple(found)


def too_old(feature: str, minimum: str, device: Device) -> tuple[str, ...]:
    """Why `feature` cannot be had from the installed FlashInfer: one reason or none."""
    version = device.packages.get("flashinfer")
    if version is None or device.has("flashinfer", minimum) or "flashinfer" in device.broken:
        return ()
    return (f"{feature} needs flashinfer {minimum} or newer, found {version}",)


def build(
    backend: str,
    what: str,
    load: Callable[[], object],
    advice: str,
    recipe: Callable[[], object] | None = None,
):
    """What `load` returns, which makes FlashInfer compile `what` first if this machine lacks it.

    recipe: makes FlashInfer's build recipe, read for whether and how much is to be compiled. Says so
    before, and how far it is meanwhile. A failure is remembered and raised again, as `Unavailable`
    with `advice`.
    """
    key = (backend, what)
    if _built.get(key) is not None:
        raise Unavailable(backend, (_built[key],), advice)
    try:
        with contextlib.nullcontext() if key in _built else _progress(backend, what, recipe):
            module = load()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # nvcc, ninja, a download, a driver: anything may be missing
        _built[key] = f"{what} could not be built: {said(error)}"
        raise Unavailable(backend, (_built[key],), advice) from error
    _built[key] = None
    return module


def said(error: Exception, limit: int = 400) -> str:
    """The error's type and, of a long compiler log, the lines that say what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() or "not found" in line.lower()]
    text = " | ".join(dict.fromkeys(lines[:1] + telling[:3]))
    return f"{type(error).__name__}: {text[:limit]}"


@contextlib.contextmanager
def _progress(backend: str, what: str, recipe: Callable[[], object] | None):
    """Announce a compilation of several minutes, and count its finished files while it runs."""
    if recipe is None:
        log.info("%s: loading %s, compiled first if this machine lacks them (a minute)", backend, what)
        yield
        return
    specification = recipe()
    if specification.is_compiled:
        yield
        return
    files = len(specification.sources)
    cores = min(int(os.environ.get("MAX_JOBS", 0)) or os.cpu_count() or 1, files)
    minutes = max(1.0, files * SECONDS_PER_FILE / cores / 60)
    log.info(
        "%s: compiling %s once for this machine: %d files on %d cores, about %.0f min",
        *(backend, what, files, cores, minutes),
    )
    folder = Path(specification.jit_library_path).parent
    begin, clock, done = time.time() - 1, time.monotonic(), threading.Event()

    def watch():
        while not done.wait(PROGRESS_SECONDS):
            finished = sum(path.stat().st_mtime >= begin for path in folder.glob("*.o"))
            seconds = time.monotonic() - clock
            log.info("%s: %d of %d files compiled after %.0f s", backend, finished, files, seconds)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()
    log.info("%s: compiled in %.1f min", backend, (time.monotonic() - clock) / 60)


def workspace(device: torch.device, size: int) -> torch.Tensor:
    """The zeroed uint8 buffer of `size` bytes for kernels on `device`, made once."""
    buffer = _workspaces.get(device)
    if buffer is None or buffer.numel() < size:
        buffer = _workspaces[device] = torch.zeros(size, dtype=torch.uint8, device=device)
    return buffer


@dataclass(slots=True)
class Sequences:
    """Sequences of equal lengths, laid end to end as FlashInfer wants them.

    query: [count * query_length, heads, head_dim]; key, value: [count * key_length, key heads,
    head_dim]; out: where the result goes, like query. All contiguous.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    count: int
    query_length: int
    key_length: int

    def lengths(self) -> torch.Tensor:
        """int32 [count], the key lengths."""
        return torch.full((self.count,), self.key_length, dtype=torch.int32, device=self.query.device)

    def starts(self, length: int) -> torch.Tensor:
        """int32 [count + 1], where each sequence of `length` begins; made on the GPU, no copy."""
        end = self.count * length
        return torch.arange(0, end + 1, length, dtype=torch.int32, device=self.query.device)


def sequences(call: AttentionCall, out: torch.Tensor, together: bool = True) -> Iterator[Sequences]:
    """The batch of `call` as `Sequences`: all at once if they are equally long, else one by one.

    One by one, padded keys are cut off by a view where packing would copy, and λ, which the
    kernels derive from a sequence's own length, stays what was asked for. out: [batch, query
    tokens, heads, head_dim], contiguous; rows of a sequence without keys are set to zero.
    """
    batch, query_length = call.query.shape[:2]
    lengths = key_lengths(call)
    if together and len(set(lengths)) == 1:
        parts = [(slice(0, batch), lengths[0])]
    else:
        parts = [(slice(row, row + 1), lengths[row]) for row in range(batch)]
    for rows, length in parts:
        if length == 0:
            out[rows].zero_()
            continue
        yield Sequences(
            _end_to_end(call.query[rows]),
            _end_to_end(call.key[rows, :length]),
            _end_to_end(call.value[rows, :length]),
            out[rows].flatten(0, 1),
            rows.stop - rows.start,
            query_length,
            length,
        )


def key_lengths(call: AttentionCall) -> tuple[int, ...]:
    """Keys of each sequence of the batch; waits for the GPU only if nobody has read them yet."""
    if call.key_lengths is None:
        return (call.key.shape[1],) * call.key.shape[0]
    if call.host_key_lengths is None:
        call.host_key_lengths = tuple(call.key_lengths.tolist())
    return call.host_key_lengths


def _end_to_end(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(0, 1).contiguous()
