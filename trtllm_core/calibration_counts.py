"""Counting, in a dense run, the tiles that each of ModelOpt's trial thresholds would skip.

A tile (128 queries x 128 keys) would be skipped at λ iff no row's best score in it comes within ln λ of
that row's running maximum over the tiles visited before. In a dense pass the maximum always rises,
and the first visited tile is never skipped.
"""

from __future__ import annotations

import functools
import logging
import math

import torch
import torch.nn.functional as F

from .calibration import Point
from .skip_rule import KV_ORDERS, SkipRule
from .specs import one_of

# Those of ModelOpt's diffusion example (examples/diffusers/sparsity)
TRIAL_THRESHOLDS = (
    *(1e-12, 1e-10, 1e-8, 1e-6, 5e-6, 1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3),
    *(1e-2, 2e-2, 5e-2, 1e-1, 2e-1, 3e-1, 5e-1, 7e-1, 8e-1, 9e-1, 9.9e-1),
)

_SCORES_AT_ONCE = 2**23  # the reference's working set: 32 MiB of float32 scores
_log = logging.getLogger(__name__)


def count_skipped_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    scale: float | None = None,
    thresholds: tuple[float, ...] = TRIAL_THRESHOLDS,
    tile: tuple[int, int] = (128, 128),
    kv_order: str = "sequential",
) -> torch.Tensor:
    """How many tiles each threshold would skip: int64 [len(thresholds)] on query's device, no sync.

    query [B, Lq, Hq, D], key [B, Lk, Hkv, D], Hq a multiple of Hkv, in the token order that the
    kernel would see. scale > 0 defaults to D ** -0.5. tile is (query rows, keys). On CUDA a fused
    kernel counts; elsewhere, and if that kernel fails (said once), plain PyTorch does.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    check(query, key, scale, thresholds, kv_order)
    kernel = _kernel_module() if query.is_cuda and not _failures else None
    if kernel is not None and kernel.supports(query, key, tile):
        try:
            return kernel.count_skipped_tiles(query, key, scale, thresholds, tile, kv_order)
        except Exception as error:
            _failures.append(str(error))
            _log.warning("the calibration kernel failed, PyTorch counts instead: %s", error)
    return reference_count(query, key, scale, thresholds, tile, kv_order)


_failures: list[str] = []  # why the fused kernel is no longer tried


@functools.cache
def _kernel_module():
    """The Triton kernel's module, or None, said once, where Triton is missing."""
    try:
        from .kernels import calibrate
    except ImportError as error:
        _log.warning("Triton is missing (%s): PyTorch counts for the calibration", error)
        return None
    return calibrate


def check(query, key, scale, thresholds, kv_order) -> None:
    """Raise ValueError for shapes and values that cannot be counted."""
    one_of("kv_order", kv_order, KV_ORDERS)
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}"
    if query.ndim != 4 or key.ndim != 4:
        raise ValueError(f"query and key must be [batch, tokens, heads, head_dim]: {shapes}")
    same = query.shape[0] == key.shape[0] and query.shape[3] == key.shape[3]
    if not same or query.shape[2] % key.shape[2] or not (query.shape[1] and key.shape[1]):
        raise ValueError(f"query and key do not fit each other: {shapes}")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale={scale!r} must be finite and above 0")
    if not thresholds or not all(0 < t < math.inf for t in thresholds):
        raise ValueError(f"thresholds={thresholds!r} must be finite and above 0")


def reference_count(query, key, scale, thresholds, tile, kv_order) -> torch.Tensor:
    """`count_skipped_tiles` in plain PyTorch: any device and dtype, memory bounded by chunks."""
    rows, keys = tile
    batch, q_length, heads, dim = query.shape
    k_length, groups = key.shape[1], heads // key.shape[2]
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    k_tiles = math.ceil(k_length / keys)
    order = torch.arange(k_tiles, device=query.device)
    logs = torch.tensor([math.log(t) for t in thresholds], dtype=compute, device=query.device)
    counts = torch.zeros(len(thresholds), dtype=torch.int64, device=query.device)
    rows_at_once = max(1, _SCORES_AT_ONCE // (k_tiles * keys) // rows) * rows
    for b in range(batch):
        for head in range(heads):
            k = key[b, :, head // groups].to(compute)
            for first in range(0, q_length, rows_at_once):
                q = query[b, first : first + rows_at_once, head].to(compute)
                scores = F.pad(q @ k.T, (0, k_tiles * keys - k_length), value=-math.inf)
                peaks = scores.view(-1, k_tiles, keys).amax(-1) * scale
                pad = -len(peaks) % rows
                # padded rows copy the last one: they change no maximum
                peaks = torch.cat([peaks, peaks[-1:].expand(pad, -1)]).view(-1, rows, k_tiles)
                visits = order.expand(len(peaks), -1)
                if kv_order == "own_first" and q_length == k_length:
                    tiles = torch.arange(len(peaks), device=query.device) + first // rows
                    visits = (order + (tiles * rows // keys)[:, None]) % k_tiles
                peaks = peaks.gather(2, visits[:, None].expand(-1, rows, -1))
                rises = (peaks[..., 1:] - peaks.cummax(-1).values[..., :-1]).amax(1)
                counts += (rises.reshape(-1, 1) < logs).sum(0)
    return counts


def total_tiles(query: torch.Tensor, key: torch.Tensor, tile: tuple[int, int]) -> int:
    """How many tiles one attention call has, the never skipped first ones included."""
    batch, q_length, heads, _ = query.shape
    return batch * heads * math.ceil(q_length / tile[0]) * math.ceil(key.shape[1] / tile[1])


class CalibrationCounts:
    """Counts of any number of attention calls, over layers, steps and runs; counters only.

    As in ModelOpt, the n-th call of every layer in a run is one sample: its sparsity is the mean
    over the layers. Counters stay on their device until they are read.
    """

    def __init__(
        self, rule: SkipRule = SkipRule(), thresholds: tuple[float, ...] = TRIAL_THRESHOLDS
    ):
        self.rule = rule
        self.thresholds = tuple(thresholds)
        self.runs = 0
        self._calls: dict[str, int] = {}  # this run's calls by layer
        self._samples: dict[tuple[int, int, int], dict[str, tuple[torch.Tensor, int]]] = {}

    def start_run(self) -> None:
        """A new sampling run: its calls are counted beside those before."""
        self.runs += 1
        self._calls.clear()

    def count(self, layer: str, query: torch.Tensor, key: torch.Tensor, scale=None) -> None:
        """Count one attention call of `layer`. Launches, but waits for nothing."""
        rule = self.rule
        skipped = count_skipped_tiles(
            query,
            key,
            scale=scale,
            thresholds=self.thresholds,
            tile=rule.tile,
            kv_order=rule.kv_order,
        )
        self.add(layer, key.shape[1], skipped, total_tiles(query, key, rule.tile))

    def add(self, layer: str, key_length: int, skipped: torch.Tensor, total: int) -> None:
        """skipped: int64 [thresholds], how many of this call's `total` tiles each would skip."""
        index = self._calls.get(layer, 0)
        self._calls[layer] = index + 1
        sample = self._samples.setdefault((self.runs, index, key_length), {})
        sample[layer] = (skipped, total)

    def fetch(self) -> None:
        """Bring the counters to the host, the one wait after a run, and let the device's go."""
        away = [(s, layer) for s in self._samples.values() for layer in s if not s[layer][0].is_cpu]
        if away:
            # of several GPUs, all on the first
            device = away[0][0][away[0][1]][0].device
            rows = torch.stack([sample[layer][0].to(device) for sample, layer in away]).cpu()
            for (sample, layer), row in zip(away, rows, strict=True):
                sample[layer] = (row, sample[layer][1])

    @property
    def calls(self) -> int:
        return sum(len(sample) for sample in self._samples.values())

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(layer for s in self._samples.values() for layer in s))

    @property
    def key_lengths(self) -> tuple[int, ...]:
        return tuple(sorted({length for _, _, length in self._samples}))

    def points(self) -> list[Point]:
        """One point per sample and threshold, for `Calibration.fit`.

        A sample that misses layers that others of its run and length have, such as the one in
        which a run was cancelled, is left out.
        """
        self.fetch()
        widest: dict[tuple[int, int], int] = {}
        for (run, _, length), sample in self._samples.items():
            widest[run, length] = max(widest.get((run, length), 0), len(sample))
        points = []
        for (run, _, length), sample in self._samples.items():
            if len(sample) < widest[run, length]:
                continue
            skipped = torch.stack([s for s, _ in sample.values()]).double()
            totals = torch.tensor([[total] for _, total in sample.values()])
            mean = (skipped / totals).mean(0).tolist()
            points += [Point(x, t * length) for x, t in zip(mean, self.thresholds, strict=True)]
        return points

    def merge(self, other: CalibrationCounts) -> None:
        """Add another object's runs to this one's."""
        if (self.rule, self.thresholds) != (other.rule, other.thresholds):
            raise ValueError(
                f"cannot add calls counted with {other.rule} to calls counted with {self.rule}"
            )
        for (run, index, length), sample in other._samples.items():
            self._samples[self.runs + 1 + run, index, length] = dict(sample)
        self.runs += 1 + other.runs
