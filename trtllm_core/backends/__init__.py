"""The table of backends, and the one form in which every backend receives a call.

A backend is a module with three names:
    REQUIREMENTS      a `Requirements`, plain data: what it can do, read by the selector
    load(device)      import the exact callable that `run` calls; raises `Unavailable`
    run(call)         compute one `AttentionCall`, returns [batch, query tokens, heads, head_dim]
and, where it can skip tiles and count them:
    tile_count(call)  how many (query tile, KV tile) pairs `call` consists of, all heads and batches

Modules are imported when they are first asked for, so that a missing or broken package costs
nothing until somebody selects it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

import torch

from ..specs import BACKEND_NAMES, AttnQuantSpec

_MODULES = {name: name.lower() for name in BACKEND_NAMES}


class Unavailable(RuntimeError):
    """A backend that cannot run here. `reasons` holds every reason, in plain words."""

    def __init__(self, backend: str, reasons: tuple[str, ...]):
        self.backend = backend
        self.reasons = tuple(reasons)
        super().__init__(f"{backend} cannot run: " + "; ".join(self.reasons))


@dataclass(slots=True)
class AttentionCall:
    """One attention call, already validated. The backend owns it and may drop its tensors.

    query: [batch, query tokens, heads, head_dim]; key, value: [batch, key tokens, key heads,
        head_dim], any strides. mask: None, or broadcastable to [batch, heads, query tokens, key
        tokens], boolean (True attends) or additive. key_lengths: None, or int32 [batch]: keys from
        there on are padding. threshold: λ, or None for no skipping. quant: SAGE, or None.
    kv_order: "own_first" or "sequential". skipped: None, or an int64 tensor of one element on the
        call's device to which the number of skipped tiles is added without a sync.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    mask: torch.Tensor | None = None
    key_lengths: torch.Tensor | None = None
    threshold: float | None = None
    quant: AttnQuantSpec | None = None
    kv_order: str = "own_first"
    skipped: torch.Tensor | None = None


def load_module(name: str) -> ModuleType:
    """The module of backend `name`, imported on first use."""
    return importlib.import_module(f".{_MODULES[name]}", __name__)
