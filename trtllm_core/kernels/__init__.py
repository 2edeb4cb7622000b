"""Our attention kernels in Triton. Importing this needs no Triton; the first call does."""

from __future__ import annotations

from .configs import HEAD_DIMS, KernelConfig, has_fp8, kernel_config, tile_count, tile_shape, unsupported

__all__ = [
    "HEAD_DIMS",
    "KernelConfig",
    "has_fp8",
    "kernel_config",
    "tile_count",
    "tile_shape",
    "triton_attention",
    "unsupported",
]


def triton_attention(query, key, value, *, scale=None, threshold=None, quant=None, key_lengths=None,
                     kv_order="own_first", skipped=None, config=None):
    """softmax(scale * query key^T) value on one GPU: dense, Skip-Softmax, SAGE, or the last two together.

    query: [batch, query tokens, heads, head_dim]; key, value: [batch, key tokens, kv heads, head_dim], where heads is a
    multiple of kv heads. float16 or bfloat16, any strides with a contiguous last dimension; nothing is copied.
    scale: of the scores; None is head_dim ** -0.5. threshold: λ of Skip-Softmax; None is the dense kernel, 0.0 the
    skipping kernel that skips nothing. quant: an AttnQuantSpec with dtype_qk "int8" or "fp8_e4m3", or None.
    key_lengths: int32 [batch] on the device; keys beyond are padding, which must be finite. An entry of 0 gives NaN.
    kv_order: "own_first" (each query tile begins at its own keys; where there are as many queries as keys) or
    "sequential". skipped: int64 [1] on the device, to which the number of skipped tiles is added; None counts nothing.
    config: a KernelConfig instead of the frozen one.

    Returns a new contiguous tensor of query's shape and dtype. Raises ValueError with every reason for a call that the
    kernels cannot run. No device synchronisation.
    """
    from . import forward

    return forward.triton_attention(
        query, key, value, scale=scale, threshold=threshold, quant=quant, key_lengths=key_lengths,
        kv_order=kv_order, skipped=skipped, config=config,
    )
