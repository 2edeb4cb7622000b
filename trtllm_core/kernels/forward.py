"""Launch the portable attention kernel: check, quantize, build arguments, one kernel."""

from __future__ import annotations

import functools
import math

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device import on_device_of
from .attention_kernel import attention_kernel
from .configs import has_fp8, kernel_config, padded_head_dim, unsupported
from .quantize import channel_statistics, quantize

KV_ORDERS = ("own_first", "sequential")


@functools.cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device)
    # Triton's interpreter runs the kernels on CPU tensors; it knows every data type
    return (8, 9) if triton.knobs.runtime.interpret else None


def _check(query, key, value, threshold, quant, key_lengths, kv_order) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 4:
            raise ValueError(f"{name} must be [batch, tokens, heads, head_dim], not {tuple(tensor.shape)}")
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, query is {query.dtype} on {query.device}"
            )
    if key.shape != value.shape:
        raise ValueError(f"key {tuple(key.shape)} and value {tuple(value.shape)} differ in shape")
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3] or query.shape[2] % key.shape[2]:
        raise ValueError(
            f"query {tuple(query.shape)} does not go with key {tuple(key.shape)}: batch and head_dim must be equal, "
            "the heads a multiple of the key's"
        )
    if key.shape[1] == 0:
        raise ValueError("key and value have no tokens: attention over nothing is undefined")
    if threshold is not None and not 0 <= threshold < math.inf:
        raise ValueError(f"threshold={threshold!r} must be finite and at least 0")
    if kv_order not in KV_ORDERS:
        raise ValueError(f"kv_order={kv_order!r} is not one of {', '.join(map(repr, KV_ORDERS))}")
    if key_lengths is not None and (key_lengths.shape != query.shape[:1] or key_lengths.dtype != torch.int32):
        raise ValueError(f"key_lengths must be int32 [{query.shape[0]}], not {key_lengths.dtype} {key_lengths.shape}")
    reasons = unsupported(_capability(query.device), query.dtype, query.shape[3], quant)
    if not query.is_cuda and query.dtype == torch.bfloat16:
        reasons += ("Triton's interpreter cannot multiply bfloat16",)
    if reasons:
        raise ValueError("TRITON_ATTN cannot run this call: " + "; ".join(reasons))


def _addressable(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself, or a contiguous copy where a tile's offsets would not fit: a stride of 2^23 and more, or a last
    dimension that is not contiguous. No layout of ComfyUI's is copied."""
    return tensor if tensor.stride(3) == 1 and tensor.stride(1) < 2**23 else tensor.contiguous()


def _is_stride(stride: int, tensor: torch.Tensor) -> bool:
    """Whether TMA takes this stride: positive (no broadcasting) and a multiple of 16 bytes."""
    return stride > 0 and stride * tensor.element_size() % 16 == 0


def _describable(tensor: torch.Tensor) -> bool:
    """Whether TMA can read the tensor as it lies; the stride of a dimension of 1 does not matter."""
    return tensor.data_ptr() % 16 == 0 and all(
        size == 1 or _is_stride(stride, tensor) for size, stride in zip(tensor.shape[:3], tensor.stride())
    )


def _descriptor(heads_first: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Descriptor of [batch, heads, rows, columns] with blocks of one tile of one head."""
    spare = heads_first.shape[3]
    strides = [stride if _is_stride(stride, heads_first) else spare for stride in heads_first.stride()[:3]]
    return TensorDescriptor(heads_first, list(heads_first.shape), [*strides, 1], [1, 1, rows, columns])


def triton_attention(query, key, value, *, scale=None, threshold=None, quant=None, key_lengths=None,
                     kv_order="own_first", skipped=None, config=None, out=None) -> torch.Tensor:
    """softmax(scale * query key^T) value; see `kernels.triton_attention`. out: where to write, for tests."""
    _check(query, key, value, threshold, quant, key_lengths, kv_order)
    query, key, value = _addressable(query), _addressable(key), _addressable(value)
    if scale is None:
        scale = query.shape[3] ** -0.5
    elif scale < 0:
        query, scale = -query, -scale
    # masked scores are -inf, which times zero is NaN
    scale = scale or 1e-30
    batch, query_length, heads, head_dim = query.shape
    _, key_length, kv_heads, _ = key.shape
    capability = _capability(query.device)
    skip = threshold is not None
    sage = quant is not None and quant.is_sage
    if config is None:
        config = kernel_config(capability, head_dim, quant, skip)
    if out is None:
        out = torch.empty((batch, query_length, heads, head_dim), dtype=query.dtype, device=query.device)
    if out.numel() == 0:
        return out
    fp8_value = sage and has_fp8(capability)

    query_scale = key_scale = value_scale = value_mean = None
    query_groups = key_groups = 0
    # all [batch, heads, tokens, head_dim] from here on
    query_source, key_source, value_source = (tensor.transpose(1, 2) for tensor in (query, key, value))
    with on_device_of(query):
        if sage:
            quantized = quantize(query, key, value, quant, key_lengths, fp8_value=fp8_value)
            query_source, key_source = quantized.query, quantized.key
            query_scale, key_scale = quantized.query_scale, quantized.key_scale
            value_scale, value_mean = quantized.value_scale, quantized.value_mean
            query_groups, key_groups = query_scale.shape[2], key_scale.shape[2]
            if fp8_value:
                value_source = quantized.value
        elif skip:
            _, value_mean, _ = channel_statistics(key, value, key_lengths, smooth_key=False, fp8_value=False)

        block_m, block_n = config.block_m, config.block_n
        padded_dim = padded_head_dim(head_dim)
        sources = (query_source, key_source, value_source)
        blocks = (
            (block_m, padded_dim),
            (block_n, padded_dim),
            (padded_dim, block_n) if fp8_value else (block_n, padded_dim),
        )
        tma = config.tma and all(map(_describable, sources))
        if tma:
            arguments = [_descriptor(source, *block) for source, block in zip(sources, blocks)]
        else:
            arguments = sources
        attention_kernel[(triton.cdiv(query_length, block_m), heads, batch)](
            *arguments, out,
            query_scale, key_scale, value_scale, value_mean, key_lengths, skipped,
            *(stride for source in sources for stride in source.stride()[:3]),
            query_length, key_length, query_groups, key_groups, scale * math.log2(math.e),
            math.log2(threshold) if threshold else -math.inf,
            HEAD_DIM=head_dim, PADDED_DIM=padded_dim, GROUP=heads // kv_heads,
            BLOCK_M=block_m, BLOCK_N=block_n,
            Q_BLOCK=quant.q_block_size if sage else 1, K_BLOCK=quant.k_block_size if sage else 0,
            FP8_VALUE=fp8_value, SKIP=skip, OWN_FIRST=kv_order == "own_first" and query_length == key_length,
            COUNT=skip and skipped is not None, LENGTHS=key_lengths is not None, TMA=tma,
            HARDWARE_VOTE=skip and config.hardware_vote,
            num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers, enable_fp_fusion=True,
        )
    return out
