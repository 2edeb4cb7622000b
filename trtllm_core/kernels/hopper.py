"""Launch the Hopper kernels. Importing this needs neither Triton nor a GPU; the first call does."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

from ..device import on_device_of

HEAD_DIMS = (64, 128)
OLDEST_TRITON = (3, 6)
ROWS = 64  # query rows of one consumer warpgroup: the grain at which Skip-Softmax decides


@dataclass(frozen=True)
class HopperConfig:
    """One compilation of the attention kernel.

    consumers: warpgroups of 64 query rows in a program; they share the visit order, which starts at the KV tile of
    the first of their rows. keys: of a KV tile. k_stages, v_stages: ring slots. on_demand: load a V tile only if a
    consumer voted for it. turns: consumers issue Q K in turn.
    """

    consumers: int = 3
    keys: int = 128
    k_stages: int = 2
    v_stages: int = 2
    on_demand: bool = False
    turns: bool = False


def hopper_config(head_dim: int, quant=None, skip: bool = False) -> HopperConfig:
    """The frozen configuration of a call. quant: an AttnQuantSpec or None; skip: a threshold is given."""
    # ms at 75,600 tokens x 40 heads x 128 on an H200 beside each alternative: benchmarks/results/hopper_2026-11-29.md
    if _is_sage(quant) and quant.k_block_size == 1:
        return HopperConfig(consumers=2, k_stages=4, v_stages=4)  # 32 key scales a thread: three consumers would spill
    if _is_sage(quant):
        return HopperConfig(k_stages=4, v_stages=4)
    if skip:
        return HopperConfig(k_stages=2, v_stages=3, on_demand=True)
    return HopperConfig(turns=True)


def unsupported(capability, dtype, head_dim, quant=None, triton_version=None) -> tuple[str, ...]:
    """Every reason why these kernels cannot run a call, as sentences; empty if they can.

    capability: (major, minor), or None without a CUDA device. dtype: a torch.dtype or its name. quant: an AttnQuantSpec
    or None. triton_version: as in triton.__version__, or None where Triton is not installed.
    """
    reasons = []
    if capability is None or tuple(capability) != (9, 0):
        found = "there is none" if capability is None else f"this GPU has {capability[0]}.{capability[1]}"
        reasons.append(f"needs a GPU of compute capability 9.0 (H100, H200), {found}")
    if triton_version is None:
        reasons.append("needs Triton, which is not installed")
    elif _version(triton_version) < OLDEST_TRITON:
        reasons.append(f"needs Triton {'.'.join(map(str, OLDEST_TRITON))} or later, found {triton_version}")
    name = str(dtype).removeprefix("torch.")
    if name not in ("float16", "bfloat16"):
        reasons.append(f"needs float16 or bfloat16 tensors, not {name}")
    if head_dim not in HEAD_DIMS:
        reasons.append(f"head size {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}")
    if quant is not None and quant.dtype_qk is not None and not quant.is_sage:
        reasons.append(f"quant.dtype_qk={quant.dtype_qk!r} is not one of 'int8', 'fp8_e4m3'")
    return tuple(reasons)


def tile_shape(head_dim: int, quant=None, skip: bool = True) -> tuple[int, int]:
    """(query rows, keys) of a tile: the grain at which Skip-Softmax decides."""
    return ROWS, hopper_config(head_dim, quant, skip).keys


def order_rows(head_dim: int, quant=None, skip: bool = True) -> int:
    """Query rows that share one visit order: with own_first it starts at the KV tile of the first of them."""
    return ROWS * hopper_config(head_dim, quant, skip).consumers


def hopper_attention(
    query, key, value, *, scale=None, threshold=None, quant=None, key_lengths=None,
    kv_order="own_first", skipped=None, out=None, config=None,
):  # fmt: skip
    """softmax(scale * query key^T) value on a GPU of compute capability 9.0.

    query: [batch, query tokens, heads, head_dim]; key, value: [batch, key tokens, kv heads, head_dim], where heads is a
    multiple of kv heads; head_dim 64 or 128, float16 or bfloat16. The last dimension must be contiguous; a tensor whose
    base or other strides are no multiple of 16 bytes is copied first, as is query if scale <= 0.
    scale: of the scores, None is head_dim ** -0.5. threshold: λ of Skip-Softmax, None is the dense kernel.
    quant: an AttnQuantSpec with dtype_qk "int8" or "fp8_e4m3", or None. key_lengths: int32 [batch] on the device, None is
    all keys; 0 gives NaN. kv_order: "own_first" (where there are as many queries as keys; else as "sequential") or
    "sequential". skipped: int64 [1] on the device, to which the number of skipped tiles (tile_shape) is added, or None.
    out: a contiguous tensor like the result, or None. config: a HopperConfig instead of the frozen one.

    Returns a contiguous tensor of query's shape and dtype. Raises ValueError with every reason. No device sync.
    """
    _check(query, key, value, quant, key_lengths, kv_order, threshold, skipped, out)
    head_dim = query.shape[3]
    scale = head_dim**-0.5 if scale is None else float(scale)
    if scale <= 0:
        # the kernel takes the maximum before it scales
        query, scale = query * math.copysign(1.0, scale) if scale else torch.zeros_like(query), abs(scale) or 1.0
    config = config or hopper_config(head_dim, quant, threshold is not None)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    with on_device_of(query):
        _launch(query, key, value, out, scale * math.log2(math.e), threshold, quant, key_lengths, kv_order, skipped, config)
    return out


def _launch(query, key, value, out, scale, threshold, quant, key_lengths, kv_order, skipped, config):
    from .hopper_attention import attention_kernel

    batch, query_tokens, heads, head_dim = query.shape
    key_tokens, kv_heads = key.shape[1], key.shape[2]
    query_scale = key_scale = value_scale = value_mean = None
    values = config.keys
    if _is_sage(quant):
        from .hopper_quantize import quantize_for_hopper

        quantized = quantize_for_hopper(
            query, key, value, dtype_qk=quant.dtype_qk, q_block_size=quant.q_block_size,
            k_block_size=quant.k_block_size, multiplier=scale, key_lengths=key_lengths,
        )  # fmt: skip
        _, _, _, query_scale, key_scale, value_scale, value_mean = quantized
        query, key = quantized.query.transpose(1, 2), quantized.key.transpose(1, 2)
        value_descriptor = _descriptor(quantized.value, [1, 1, head_dim, values])
    else:
        if threshold is not None:
            from .hopper_quantize import nan_channels

            value_mean = nan_channels(value, key_lengths)
        query, key, value = map(_loadable, (query, key, value))
        value_descriptor = _descriptor(value, [1, values, 1, head_dim])
    threshold = None if threshold is None else math.log2(threshold) if threshold > 0 else -math.inf
    attention_kernel[(-(-query_tokens // (ROWS * config.consumers)), heads, batch)](
        _descriptor(query, [1, ROWS, 1, head_dim]), _descriptor(key, [1, config.keys, 1, head_dim]), value_descriptor,
        _descriptor(out, [1, ROWS, 1, head_dim]), query_scale, key_scale, value_scale, value_mean, key_lengths,
        None if threshold is None else skipped, query_tokens, key_tokens,
        heads // kv_heads, int(kv_order == "own_first" and query_tokens == key_tokens), scale, threshold or 0.0,
        **constants(config, head_dim, quant, threshold is not None), **launch_options(config),
    )  # fmt: skip


def constants(config: HopperConfig, head_dim: int, quant, skip: bool) -> dict:
    """The kernel's compile-time arguments."""
    three = config.consumers == 3
    return dict(
        CONSUMERS=config.consumers, KEYS=config.keys, HEAD_DIM=head_dim, K_STAGES=config.k_stages,
        V_STAGES=config.v_stages, KEY_GROUP=quant.k_block_size if _is_sage(quant) else 16, SKIP=skip,
        ON_DEMAND=config.on_demand, TURNS=config.turns,
        CONSUMER_REGISTERS=160 if three else 240, PRODUCER_REGISTERS=32 if three else 24,
    )  # fmt: skip


def launch_options(config: HopperConfig) -> dict:
    """The compiler's options: registers for all warpgroups at the start, and FP fusion, whose default will change."""
    return dict(num_warps=4, maxnreg=128 if config.consumers == 3 else 168, enable_fp_fusion=True)


def _descriptor(tensor, block):
    """A tensor memory accelerator's view of a 4-D tensor in blocks."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    types = {
        torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.int8: gl.int8, torch.float8_e4m3fn: gl.float8e4nv,
    }  # fmt: skip
    layout = gl.NVMMASharedLayout.get_default_for(block, types[tensor.dtype])
    # the stride of a dimension of one entry means nothing, but is checked
    strides = [stride if size > 1 else tensor.shape[-1] for size, stride in zip(tensor.shape, tensor.stride())]
    strides[-1] = 1
    return TensorDescriptor(tensor, list(tensor.shape), strides, block, layout)


def _loadable(tensor):
    """The tensor, or a contiguous copy where the tensor memory accelerator cannot read it in place."""
    size = tensor.element_size()
    aligned = tensor.data_ptr() % 16 == 0 and all(
        count == 1 or (stride > 0 and stride * size % 16 == 0) for count, stride in zip(tensor.shape[:3], tensor.stride())
    )
    return tensor if aligned else tensor.contiguous() if not tensor.is_contiguous() else tensor.clone()


def _is_sage(quant) -> bool:
    return quant is not None and quant.is_sage


def _version(text: str) -> tuple[int, int]:
    """(major, minor); (0, 0) for a version that says neither, such as one nobody knows."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _check(query, key, value, quant, key_lengths, kv_order, threshold, skipped, out) -> None:
    """Raise ValueError with every reason why the arguments are wrong."""
    reasons = []
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be [batch, tokens, heads, head_dim], its shape is {tuple(tensor.shape)}")
        if not tensor.is_cuda or tensor.device != query.device:
            reasons.append(f"{name} is on {tensor.device}, needs query's CUDA device")
        if tensor.dtype != query.dtype or tensor.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(f"{name} is {tensor.dtype}, needs query's dtype, float16 or bfloat16")
        if tensor.stride(3) != 1:
            reasons.append(f"{name}'s last dimension is not contiguous: strides {tuple(tensor.stride())}")
        if 0 in tensor.shape:
            reasons.append(f"{name} is empty: shape {tuple(tensor.shape)}")
    batch, _, heads, head_dim = query.shape
    if key.shape != value.shape:
        reasons.append(f"key {tuple(key.shape)} and value {tuple(value.shape)} differ in shape")
    if (key.shape[0], key.shape[3]) != (batch, head_dim):
        reasons.append(f"query {tuple(query.shape)} and key {tuple(key.shape)} differ in batch or head_dim")
    if head_dim not in HEAD_DIMS:
        reasons.append(f"head size {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}")
    if key.shape[2] == 0 or heads % key.shape[2]:
        reasons.append(f"{heads} query heads are not a multiple of {key.shape[2]} key heads")
    if quant is not None and quant.dtype_qk is not None and not quant.is_sage:
        reasons.append(f"quant.dtype_qk={quant.dtype_qk!r} is not one of 'int8', 'fp8_e4m3'")
    if kv_order not in ("own_first", "sequential"):
        reasons.append(f"kv_order={kv_order!r} is not one of 'own_first', 'sequential'")
    if threshold is not None and not (math.isfinite(threshold) and threshold >= 0):
        reasons.append(f"threshold={threshold!r} must be finite and at least 0")
    if key_lengths is not None and (key_lengths.dtype != torch.int32 or key_lengths.shape != (batch,)):
        reasons.append(f"key_lengths must be int32 [{batch}], is {key_lengths.dtype} {tuple(key_lengths.shape)}")
    if skipped is not None and (skipped.dtype != torch.int64 or skipped.numel() != 1):
        reasons.append(f"skipped must be int64 [1], is {skipped.dtype} {tuple(skipped.shape)}")
    if out is not None and (out.shape != query.shape or out.dtype != query.dtype or not out.is_contiguous()):
        reasons.append("out must be contiguous with query's shape and dtype")
    if reasons:
        raise ValueError("hopper_attention: " + "; ".join(reasons))
