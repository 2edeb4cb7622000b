"""The oracle: tile-wise attention with Skip-Softmax and SAGE quantization in plain PyTorch.

Any device, float32 (float64 for float64 inputs), written to be read and compared with. The skip
rule is that of TensorRT-LLM's and ModelOpt's kernels: a (query tile, KV tile) pair is dropped when
no row's score in it comes within ln λ of the running maximum before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .specs import AttnQuantSpec, one_of

INT8_MAX = 127.0
FP8_MAX = 448.0
KV_ORDERS = ("own_first", "sequential")


@dataclass(frozen=True)
class TileStats:
    """Which tiles were skipped: `kept` is bool [batch, heads, query tiles, KV tiles]."""

    skipped: int
    total: int
    kept: torch.Tensor

    @property
    def sparsity(self) -> float:
        return self.skipped / self.total if self.total else 0.0


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    threshold: float | None = None,
    quant: AttnQuantSpec | None = None,
    tile: tuple[int, int] = (128, 64),
    kv_order: str = "own_first",
) -> tuple[torch.Tensor, TileStats]:
    """Attention over KV tiles, with an online softmax.

    query [B, Lq, Hq, D]; key, value [B, Lk, Hkv, D] with Hq a multiple of Hkv. mask broadcasts to
    [B, Hq, Lq, Lk], boolean (True attends) or additive; rows with no key give zeros. threshold is
    λ; None and 0 skip nothing. quant with an INT8 or FP8 `dtype_qk` quantizes Q, K, P and V as SAGE
    does. tile is (query rows, keys). Raises ValueError for shapes that do not fit.
    Returns the output [B, Lq, Hq, D] in query's dtype and the tile statistics.
    """
    one_of("kv_order", kv_order, KV_ORDERS)
    _check_shapes(query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    groups = query.shape[2] // key.shape[2]
    q, k, v = (x.to(compute).transpose(1, 2) for x in (query, key, value))  # [B, H, L, D]
    is_sage = quant is not None and quant.is_sage
    v_scale = None
    if is_sage:
        q = quantize_blocks(q, quant.dtype_qk, quant.q_block_size)
        k = quantize_blocks(k - k.mean(2, keepdim=True), quant.dtype_qk, quant.k_block_size)
        v, v_scale = quantize_channels(v)
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    out, kept = _tiles(q * scale, k, v, mask, threshold, tile, kv_order, quantize_p=is_sage)
    if v_scale is not None:
        out = out * v_scale.repeat_interleave(groups, 1)
    total = kept.numel()
    stats = TileStats(skipped=total - int(kept.sum()), total=total, kept=kept)
    return out.transpose(1, 2).to(query.dtype), stats


def quantize_blocks(x: torch.Tensor, dtype: str, block: int) -> torch.Tensor:
    """x [B, H, L, D] rounded to `dtype` with one scale per head and `block` consecutive tokens.

    Returns the dequantized values, which is what an exact integer or FP8 product would see.
    """
    batch, heads, length, dim = x.shape
    padded = F.pad(x, (0, 0, 0, -length % block)).view(batch, heads, -1, block, dim)
    peak = padded.abs().amax((3, 4), keepdim=True).clamp_min(1e-12)
    if dtype == "int8":
        step = peak / INT8_MAX
        rounded = (padded / step).round()
    else:
        step = peak / FP8_MAX
        rounded = to_fp8(padded / step)
    return (rounded * step).view(batch, heads, -1, dim)[:, :, :length]


def quantize_channels(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [B, H, L, D] as FP8 values, and the scales [B, H, 1, D], one per head and channel."""
    step = x.abs().amax(2, keepdim=True).clamp_min(1e-12) / FP8_MAX
    return to_fp8(x / step), step


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """x rounded to the nearest FP8 E4M3 value, in x's dtype; |x| <= 448."""
    return x.to(torch.float32).to(torch.float8_e4m3fn).to(x.dtype)


def _check_shapes(query, key, value):
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        raise ValueError("query, key and value must be [batch, tokens, heads, head_dim]")
    same = key.shape[:3] == value.shape[:3] and query.shape[0] == key.shape[0]
    if not same or query.shape[-1] != key.shape[-1] or query.shape[-1] != value.shape[-1]:
        shapes = f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        raise ValueError(f"query, key and value do not fit each other: {shapes}")
    if key.shape[1] == 0:
        raise ValueError("key has no tokens: attention over nothing is undefined")
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"{query.shape[2]} query heads are not a multiple of {key.shape[2]} key heads")


def _tiles(q, k, v, mask, threshold, tile, kv_order, quantize_p):
    """The online softmax. All query tiles advance together, each along its own order of KV tiles."""
    rows, keys = tile
    batch, heads, q_length, dim = q.shape
    k_length = k.shape[2]
    q_tiles, k_tiles = math.ceil(q_length / rows), math.ceil(k_length / keys)
    q = F.pad(q, (0, 0, 0, q_tiles * rows - q_length)).view(batch, heads, q_tiles, rows, dim)
    k, v = (F.pad(x, (0, 0, 0, k_tiles * keys - k_length)) for x in (k, v))
    k, v = (x.view(batch, heads, k_tiles, keys, dim) for x in (k, v))
    bias = _bias(mask, q, k, q_length, k_length)  # [b, h, q tiles, rows, k tiles, keys]
    is_row = (torch.arange(q_tiles * rows, device=q.device) < q_length).view(q_tiles, rows)
    log_threshold = math.log(threshold) if threshold else -math.inf

    start = torch.zeros(q_tiles, dtype=torch.long, device=q.device)
    if kv_order == "own_first" and q_length == k_length:
        start = torch.arange(q_tiles, device=q.device) * rows // keys
    peak = q.new_full((batch, heads, q_tiles, rows), -math.inf)
    total = torch.zeros_like(peak)
    out = torch.zeros_like(q)
    kept = torch.zeros(batch, heads, q_tiles, k_tiles, dtype=torch.bool, device=q.device)
    every = torch.arange(q_tiles, device=q.device)
    for step in range(k_tiles):
        index = (start + step) % k_tiles  # which KV tile each query tile visits now
        scores = q @ k[:, :, index].transpose(-1, -2)
        scores = scores + bias[:, :, every, :, index].movedim(0, 2)
        tile_peak = scores.amax(-1)
        rise = torch.where(is_row, tile_peak - peak, -math.inf).amax(-1)  # [B, H, q tiles]
        keep = ~(rise < log_threshold)  # written so that NaN is kept
        if step == 0:
            keep = torch.ones_like(keep)
        kept.scatter_(3, index.view(1, 1, -1, 1).expand(batch, heads, -1, 1), keep[..., None])
        new_peak = torch.maximum(peak, tile_peak)
        finite_peak = new_peak.masked_fill(new_peak == -math.inf, 0.0)
        decay = (peak - finite_peak).exp()
        p = (scores - finite_peak[..., None]).exp()
        row_sum = p.sum(-1)
        if quantize_p:
            p = to_fp8(p * FP8_MAX) / FP8_MAX
        keep_rows = keep[..., None]
        # a branch, not a product with zero: what is skipped may hold inf or NaN
        total = torch.where(keep_rows, total * decay + row_sum, total)
        step_out = out * decay[..., None] + p @ v[:, :, index]
        out = torch.where(keep_rows[..., None], step_out, out)
        peak = torch.where(keep_rows, new_peak, peak)
    out = torch.where(total[..., None] == 0, torch.zeros_like(out), out / total[..., None])
    return out.view(batch, heads, -1, dim)[:, :, :q_length], kept


def _bias(mask, q, k, q_length, k_length):
    """Padding and `mask` as one additive tensor [b, h, q tiles, rows, k tiles, keys]."""
    q_padded, k_padded = q.shape[2] * q.shape[3], k.shape[2] * k.shape[3]
    bias = q.new_zeros(1, 1, 1, k_padded)
    bias[..., k_length:] = -math.inf
    bias = bias.expand(-1, -1, q_padded, -1)
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf)
        mask = mask.to(q.dtype)
        mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
        mask = mask.expand(-1, -1, q_length, k_length)
        bias = bias + F.pad(mask, (0, k_padded - k_length, 0, q_padded - q_length))
    return bias.view(*bias.shape[:2], q.shape[2], q.shape[3], k.shape[2], k.shape[3])
