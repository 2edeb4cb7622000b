"""Attention in float64, tile by tile, written from the definitions and from nothing in trtllm_core."""

import math
from typing import NamedTuple

import torch


def attention(query, key, value, scale=None):
    """Dense attention in float64; [batch, tokens, heads, head_dim], grouped heads allowed."""
    group = query.shape[2] // key.shape[2]
    q = query.double().transpose(1, 2)
    k = key.double().transpose(1, 2).repeat_interleave(group, 1)
    v = value.double().transpose(1, 2).repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    return (scores.softmax(-1) @ v).transpose(1, 2)


class Skipped(NamedTuple):
    """output; the skipped (batch, head, query tile, KV tile); how near the nearest decision was to λ, in nats."""

    output: torch.Tensor
    tiles: set
    margin: float


def skip_softmax(query, key, value, threshold, tile, *, own_first, scale=None, query_tiles=None):
    """Skip-Softmax by its definition; `query_tiles` limits the work to these (other rows stay NaN)."""
    batch, query_length, heads, head_dim = query.shape
    key_length = key.shape[1]
    rows, columns = tile
    group = heads // key.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    log_threshold = math.log(threshold) if threshold > 0 else -math.inf
    tiles = -(-key_length // columns)
    output = torch.full(query.shape, math.nan, dtype=torch.float64, device=query.device)
    skipped, margin = set(), math.inf
    for b in range(batch):
        for h in range(heads):
            k, v = key[b, :, h // group].double(), value[b, :, h // group].double()
            for i in range(-(-query_length // rows)) if query_tiles is None else query_tiles:
                first_row = i * rows
                q = query[b, first_row : first_row + rows, h].double()
                start = min(first_row // columns, tiles - 1) if own_first else 0
                scores = (q @ k.T * scale).split(columns, 1)
                kept = []
                row_max = torch.full((q.shape[0],), -math.inf, dtype=torch.float64, device=q.device)
                for step in range(tiles):
                    j = (start + step) % tiles
                    tile_max = scores[j].amax(1)
                    if step > 0:
                        rise = (tile_max - row_max).amax().item()
                        if math.isfinite(log_threshold):
                            margin = min(margin, abs(rise - log_threshold))
                        if rise < log_threshold:
                            skipped.add((b, h, i, j))
                            continue
                    kept.append(j)
                    row_max = torch.maximum(row_max, tile_max)
                weights = torch.cat([scores[j] for j in kept], 1).softmax(-1)
                output[b, first_row : first_row + rows, h] = weights @ torch.cat([v.split(columns)[j] for j in kept])
    return Skipped(output, skipped, margin)


def _quantize(x, amax, dtype):
    largest = 127.0 if dtype == "int8" else 448.0
    scale = (amax / largest).clamp_min(1e-30)
    scaled = x / scale
    rounded = scaled.round() if dtype == "int8" else scaled.float().to(torch.float8_e4m3fn).double()
    return rounded * scale


def _diffuse(v):
    """[batch, tokens, heads, head_dim] in e4m3 with a scale per channel that takes the largest number to 416; in each
    four tokens, the rounding error of one is added to the next before that is rounded."""
    scale = (v.abs().amax(1) / 416).clamp_min(1e-30)
    rounded = torch.empty_like(v)
    for first in range(4):
        tokens = slice(first, None, 4)
        x = v[:, tokens]
        if first:
            error = carried[:, : x.shape[1]]
            x = torch.where(error.abs() <= x.abs() / 4, x + error, x)
        rounded[:, tokens] = (x / scale[:, None]).float().to(torch.float8_e4m3fn).double() * scale[:, None]
        carried = x - rounded[:, tokens]
    return rounded


def _by_token_blocks(x, block, dtype):
    """Quantize [batch, tokens, heads, head_dim] with one scale per `block` tokens of a head."""
    batch, tokens, heads, head_dim = x.shape
    padded = torch.zeros(batch, -(-tokens // block) * block, heads, head_dim, dtype=x.dtype, device=x.device)
    padded[:, :tokens] = x
    blocks = padded.unflatten(1, (-1, block))
    return _quantize(blocks, blocks.abs().amax((2, 4), keepdim=True), dtype).flatten(1, 2)[:, :tokens]


def sage_inputs(query, key, value, dtype_qk, q_block, k_block, fp8_value=True):
    """What SAGE makes of q, k and v, back in float64: K less its mean over tokens, V per channel."""
    k = key.double()
    k = k - k.mean(1, keepdim=True)
    v = value.double()
    if fp8_value:
        mean = v.mean(1, keepdim=True)  # taken off where it makes every number smaller
        mean = torch.where((v - mean).abs().amax(1, keepdim=True) <= mean.abs() / 2, mean, 0.0)
        v = _diffuse(v - mean) + mean
    return _by_token_blocks(query.double(), q_block, dtype_qk), _by_token_blocks(k, k_block, dtype_qk), v


def sage(query, key, value, dtype_qk, q_block, k_block, fp8_value=True, scale=None):
    """SAGE attention in float64 but for what SAGE itself rounds: Q, K, V, and P in e4m3 below a row maximum of 256."""
    q, k, v = sage_inputs(query, key, value, dtype_qk, q_block, k_block, fp8_value)
    group = query.shape[2] // key.shape[2]
    k, v = (x.transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
    scores = q.transpose(1, 2) @ k.transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    if fp8_value:
        weights = (weights * 256).float().to(torch.float8_e4m3fn).double() / 256
    return (weights @ v / total).transpose(1, 2)


def error(output, expected) -> float:
    """Relative L2 error; NaN if either holds NaN."""
    return ((output.double() - expected).norm() / expected.norm()).item()


def plain_error(query, key, value, scale=None, expected=None) -> float:
    """The error of plain PyTorch in the inputs' own dtype, to judge others by."""
    expected = attention(query, key, value, scale) if expected is None else expected
    group = query.shape[2] // key.shape[2]
    q = query.transpose(1, 2)
    k, v = (x.transpose(1, 2).repeat_interleave(group, 1) for x in (key, value))
    scores = q @ k.transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    return error((scores.softmax(-1) @ v).transpose(1, 2), expected)


def lone_large_values(query, key, value):
    """q, k, v where a few keys have a V a hundred times larger and no weight, as some text tokens in cross-attention."""
    query, key, value = query.clone(), key.clone(), value.clone()
    query[..., 0], key[..., 0] = 8.0, 0.0
    key[:, 1::11, :, 0] = -12.0
    value[:, 1::11] *= 100.0
    return query, key, value
