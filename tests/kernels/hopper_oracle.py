"""Attention in float64, tile by tile, written from the definitions: what the Hopper kernels are compared with.

Nothing here is shared with the kernels. Any device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Expected:
    """output: float64 [batch, query tokens, heads, head_dim]; skipped: tiles; unsure: tiles within `margin` of λ."""

    output: torch.Tensor
    skipped: int
    unsure: int


def attention(
    query, key, value, *, scale=None, threshold=None, key_lengths=None, own_first=True,
    rows=64, keys=128, order_rows=192, fp8_weights=False, margin=2e-3,
) -> Expected:  # fmt: skip
    """softmax(scale q k^T) v with Skip-Softmax per (rows x keys) tile; tiles of one order_rows share a visit order.

    fp8_weights rounds exp(score - running maximum) * 256 to e4m3 before it meets V, and not in the row sum.
    """
    batch, query_tokens, heads, head_dim = query.shape
    scale = head_dim**-0.5 if scale is None else scale
    own_first = own_first and query_tokens == key.shape[1]
    repeat = heads // key.shape[2]
    output = torch.empty(query.shape, dtype=torch.float64, device=query.device)
    skipped = unsure = 0
    for b in range(batch):
        length = key.shape[1] if key_lengths is None else int(key_lengths[b])
        q = query[b].transpose(0, 1).double()
        k, v = (x[b, :length].transpose(0, 1).double().repeat_interleave(repeat, 0) for x in (key, value))
        scores = (q @ k.transpose(1, 2)) * scale
        tiles = -(-length // keys)
        for group in range(0, query_tokens, order_rows):
            group_scores = scores[:, group : group + order_rows]
            first = min(group // keys, tiles - 1) if own_first else 0
            order = [(first + i) % tiles for i in range(tiles)]
            result, more, close = _group(group_scores, v, order, rows, keys, threshold, fp8_weights, margin)
            output[b, group : group + order_rows] = result.transpose(0, 1)
            skipped, unsure = skipped + more, unsure + close
    return Expected(output, int(skipped), int(unsure))


def _group(scores, v, order, rows, keys, threshold, fp8_weights, margin):
    heads, count, _ = scores.shape
    tiles = -(-count // rows)
    running = torch.full((heads, count), -math.inf, dtype=torch.float64, device=scores.device)
    total = torch.zeros_like(running)
    summed = torch.zeros(heads, count, v.shape[2], dtype=torch.float64, device=scores.device)
    skipped = unsure = 0
    limit = None if threshold is None else math.log(threshold) if threshold > 0 else -math.inf
    for visit, tile in enumerate(order):
        part = scores[:, :, tile * keys : (tile + 1) * keys]
        tile_max = part.amax(2)
        keep = torch.ones(heads, tiles, dtype=torch.bool, device=scores.device)
        if limit is not None and visit > 0:
            rise = torch.nn.functional.pad(tile_max - running, (0, tiles * rows - count), value=-math.inf)
            rise = rise.reshape(heads, tiles, rows).amax(2)
            keep = ~(rise < limit)
            skipped += (~keep).sum()
            unsure += ((rise - limit).abs() < margin).sum()
        kept = keep.repeat_interleave(rows, 1)[:, :count]
        raised = torch.maximum(running, tile_max)
        reference = torch.where(raised == -math.inf, 0.0, raised)
        weights = torch.exp(part - reference[:, :, None])
        shrink = torch.exp(running - reference)
        rounded = (weights.float() * 256).to(FP8).double() / 256 if fp8_weights else weights
        total = torch.where(kept, total * shrink + weights.sum(2), total)
        product = summed * shrink[:, :, None] + rounded @ v[:, tile * keys : (tile + 1) * keys]
        summed = torch.where(kept[:, :, None], product, summed)
        running = torch.where(kept, raised, running)
    return summed / total[:, :, None], skipped, unsure


def quantized(query, key, value, spec, key_lengths=None):
    """What SAGE's quantized copies stand for, float64: query, key less its mean over tokens, value."""
    batch, tokens = key.shape[:2]
    lengths = [tokens] * batch if key_lengths is None else [int(n) for n in key_lengths]
    q = torch.cat([_rounded(query[b : b + 1].double(), spec.q_block_size, spec.dtype_qk) for b in range(batch)])
    k, v = key.double().clone(), value.double().clone()
    for b, length in enumerate(lengths):
        centred = k[b : b + 1, :length] - k[b : b + 1, :length].mean(1, keepdim=True)
        k[b : b + 1, :length] = _rounded(centred, spec.k_block_size, spec.dtype_qk)
        mean = v[b, :length].mean(0)  # taken off where it makes every number smaller
        mean = torch.where((v[b, :length] - mean).abs().amax(0) <= mean.abs() / 2, mean, 0.0)
        v[b, :length] = _carried(v[b, :length] - mean) + mean
    return q, k, v


def _carried(x):
    """[tokens, heads, head_dim] in e4m3, a scale per channel that takes its largest number to 416; within each four
    tokens, what rounding took from one is added to the next before that is rounded, unless it is more than a quarter of it."""
    step = x.abs().amax(0) / 416
    step = torch.where(step == 0, 1.0, step)
    rounded = torch.empty_like(x)
    carry = torch.zeros_like(step)
    for token in range(len(x)):
        wanted = x[token] / step
        if token % 4:
            wanted = wanted + carry * (carry.abs() <= wanted.abs() / 4)
        rounded[token] = wanted.float().to(FP8).double()
        carry = wanted - rounded[token]
    return rounded * step


def _rounded(x, group, dtype_qk):
    """[1, tokens, heads, head_dim] rounded with one scale per `group` tokens and head."""
    _, tokens, heads, head_dim = x.shape
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -tokens % group))
    grouped = padded.reshape(-1, group, heads, head_dim)
    largest = 127 if dtype_qk == "int8" else 448
    step = grouped.abs().amax((1, 3), keepdim=True) / largest
    step = torch.where(step == 0, 1.0, step)
    if dtype_qk == "int8":
        rounded = (grouped / step).round() * step
    else:
        rounded = (grouped / step).float().to(FP8).double() * step
    return rounded.reshape(1, -1, heads, head_dim)[:, :tokens]
