"""Launch the portable attention kernel: check, quantize, build arguments, one kernel."""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .attention_kernel import attention_kernel
from .configs import has_fp8, kernel_config, padded_head_dim, unsupported
from .quantize import channel_statistics, quantize_key_value

KV_ORDERS = ("own_first", "sequential")
QK_TYPES = {"int8": tl.int8, "fp8_e4m3": tl.float8e4nv}


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


def _describable(tensor: torch.Tensor) -> bool:
    """Whether TMA can read the tensor: 16-byte aligned, no broadcast dimension."""
    step = 16 // tensor.element_size()
    return tensor.data_ptr() % 16 == 0 and all(
        stride > 0 and stride % step == 0 for stride in tensor.stride()[:3]
    )


def _descriptor(heads_first: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Descriptor of [batch, heads, rows, columns] with blocks of one tile of one head."""
    return TensorDescriptor(heads_first, list(heads_first.shape), list(heads_first.stride()), [1, 1, rows, columns])


def triton_attention(query, key, value, *, scale=None, threshold=None, quant=None, key_lengths=None,
                     kv_order="own_first", skipped=None, config=None, out=None) -> torch.Tensor:
    """softmax(scale * query key^T) value; see `kernels.triton_attention`. out: where to write, for tests."""
    _check(query, key, value, threshold, quant, key_lengths, kv_order)
    query, key, value = _addressable(query), _addressable(key), _addressable(value)
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

    key_scale = value_scale = value_mean = None
    key_groups = 0
    # [batch, heads, tokens, head_dim]
    key_source, value_source = key.transpose(1, 2), value.transpose(1, 2)
    with torch.cuda.device(query.device) if query.is_cuda else torch.no_grad():
        if sage:
            quantized = quantize_key_value(
                key, value, quant.dtype_qk, quant.k_block_size, key_lengths, fp8_value=fp8_value
            )
            key_source, key_scale, value_scale, value_mean = (
                quantized.key, quantized.key_scale, quantized.value_scale, quantized.value_mean
            )
            key_groups = key_scale.shape[2]
            if fp8_value:
                value_source = quantized.value
        elif skip:
            _, value_mean, _ = channel_statistics(key, value, key_lengths, smooth_key=False, fp8_value=False)

        block_m, block_n = config.block_m, config.block_n
        padded_dim = padded_head_dim(head_dim)
        # descriptors cannot end at a length that only the device knows
        tma = config.tma and key_lengths is None and _describable(key_source) and _describable(value_source)
        key_argument, value_argument = key_source, value_source
        if tma:
            key_argument = _descriptor(key_source, block_n, padded_dim)
            rows, columns = (padded_dim, block_n) if fp8_value else (block_n, padded_dim)
            value_argument = _descriptor(value_source, rows, columns)
        if scale is None:
            scale = head_dim**-0.5
        key_strides, value_strides = key_source.stride(), value_source.stride()
        attention_kernel[(triton.cdiv(query_length, block_m), heads, batch)](
            query, key_argument, value_argument, out,
            key_scale, value_scale, value_mean, key_lengths, skipped,
            *query.stride()[:3],
            key_strides[0], key_strides[2], key_strides[1],
            value_strides[0], value_strides[2], value_strides[1],
            query_length, key_length, key_groups, scale * math.log2(math.e),
            math.log2(threshold) if threshold else -math.inf,
            HEAD_DIM=head_dim, PADDED_DIM=padded_dim, GROUP=heads // kv_heads,
            BLOCK_M=block_m, BLOCK_N=block_n,
            QK_TYPE=QK_TYPES[quant.dtype_qk] if sage else None,
            Q_BLOCK=quant.q_block_size if sage else 1, K_BLOCK=quant.k_block_size if sage else 0,
            FP8_VALUE=fp8_value, SKIP=skip, OWN_FIRST=kv_order == "own_first" and query_length == key_length,
            COUNT=skipped is not None, LENGTHS=key_lengths is not None, TMA=tma,
            num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers, enable_fp_fusion=True,
        )
    return out
