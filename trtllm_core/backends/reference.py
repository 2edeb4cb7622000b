"""REFERENCE: the oracle as a backend. Slow, any device; for tests, demos and debugging."""

from __future__ import annotations

import math

import torch

from .. import reference
from ..device import Device
from ..masks import with_lengths
from ..specs import SAGE_DTYPES
from . import AttentionCall, Requirements

REQUIREMENTS = Requirements(
    backend="REFERENCE",
    summary="plain PyTorch, tile by tile (slow: tests and debugging)",
    devices=None,
    dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    mask="any",
    skip_softmax=True,
    quant_dtypes=SAGE_DTYPES,
    options=("q_block_size", "k_block_size"),
)

TILE = (128, 64)


def load(device: Device) -> None:
    """Nothing to import: torch is here."""


def run(call: AttentionCall) -> torch.Tensor:
    mask = with_lengths(call.mask, call.key_lengths, call.key.shape[1])
    out, stats = reference.attention(
        call.query,
        call.key,
        call.value,
        scale=call.scale,
        mask=mask,
        threshold=call.threshold,
        quant=call.quant,
        tile=TILE,
        kv_order=call.kv_order,
    )
    if call.skipped is not None:
        call.skipped += stats.skipped
    return out


def tile_count(call: AttentionCall) -> int:
    """Pairs of a query tile and a KV tile in `call`, all batches and heads."""
    batch, q_length, heads, _ = call.query.shape
    rows, keys = TILE
    return batch * heads * math.ceil(q_length / rows) * math.ceil(call.key.shape[1] / keys)
