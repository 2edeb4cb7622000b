"""Which tiles the portable kernels use on which GPU, and what they cannot do. Needs neither Triton nor a GPU."""

from __future__ import annotations

from dataclasses import dataclass

HEAD_DIMS = (64, 80, 96, 128, 256)


@dataclass(frozen=True)
class KernelConfig:
    """One compilation of the attention kernel.

    block_m, block_n: query rows and keys of a tile. warps, stages: per program. registers: cap per thread, or None.
    tma: load by tensor descriptors (Hopper) instead of pointers. hardware_vote: decide whether a tile is skipped by one
    PTX barrier reduction instead of a Triton reduction.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int | None = None
    tma: bool = False
    hardware_vote: bool = False


def padded_head_dim(head_dim: int) -> int:
    """The power of two that a head is computed in."""
    return 1 << (head_dim - 1).bit_length()


def unsupported(capability, dtype, head_dim, quant=None) -> tuple[str, ...]:
    """Every reason why the kernels cannot run this, as sentences; empty if they can.

    capability: (major, minor), or None without a CUDA device. dtype: a torch.dtype or its name. quant: an
    AttnQuantSpec or None.
    """
    reasons = []
    if capability is None:
        reasons.append("needs an NVIDIA GPU")
    elif tuple(capability) < (8, 0):
        reasons.append(f"needs compute capability 8.0 or later, this GPU has {capability[0]}.{capability[1]}")
    name = str(dtype).removeprefix("torch.")
    if name not in ("float16", "bfloat16"):
        reasons.append(f"needs float16 or bfloat16 tensors, not {name}")
    if head_dim not in HEAD_DIMS:
        reasons.append(f"head size {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}")
    if quant is not None and quant.dtype_qk is not None:
        if not quant.is_sage:
            reasons.append(f"quant.dtype_qk={quant.dtype_qk!r} is not one of 'int8', 'fp8_e4m3'")
        elif quant.dtype_qk == "fp8_e4m3" and capability is not None and not has_fp8(capability):
            reasons.append(
                f"FP8 Q and K need compute capability 8.9 or later, this GPU has {capability[0]}.{capability[1]}; "
                "use quant.dtype_qk='int8'"
            )
    return tuple(reasons)


def has_fp8(capability) -> bool:
    """Whether SAGE keeps V in FP8 on this GPU; otherwise P V stays in V's own 16-bit type."""
    return tuple(capability) >= (8, 9)


def kernel_config(capability, head_dim: int, quant=None, skip: bool = False) -> KernelConfig:
    """The frozen configuration for this GPU and call. quant: an AttnQuantSpec or None; skip: a threshold is given."""
    sage = quant is not None and quant.is_sage
    major, minor = capability
    if major == 9:
        return _hopper(padded_head_dim(head_dim), sage, skip)
    return _pointers(padded_head_dim(head_dim), shared_kib=163 if (major, minor) in ((8, 0), (8, 7)) else 99)


# Times on an H200 with Triton 3.6 against FlashAttention-3 bf16 in the same run, 40 heads; 75,600 tokens of 128, 32,760
# of 64. Two programs of 4 warps per multiprocessor beat one of 8: only another program's products hide a softmax.
def _hopper(head_dim: int, sage: bool, skip: bool) -> KernelConfig:
    if head_dim == 256:  # compiles without spills; not timed
        block_m = 64 if sage else 128
        return KernelConfig(block_m, 64, 8, 2, tma=True, hardware_vote=True)
    if sage:
        # 128: .96 int8, .94 fp8; 64x64 w4 s3 1.06, 1.05. 32,760 tokens: 1.00; 128x128 w8 s3 1.14, 128x64 w8 s3 1.33.
        # 128, λ = .01: .61, .59; 64x64 .64, .62. 64, int8: 1.16; 128x64 w4 s3 1.28, 64x64 w4 s3 1.29; with λ = .01:
        # .84; 64x64 .96, 128x64 1.04.
        return KernelConfig(64, 128, 4, 3, tma=True, hardware_vote=True)
    if head_dim == 64:
        if skip:
            # λ = .01 and 0: .92, 1.15 with both permutations inside; without: 64x64 w4 s3 .91, 1.30, 128x64 1.10, 1.51
            return KernelConfig(64, 128, 4, 3, tma=True, hardware_vote=True)
        # 1.18 to 1.26; 128x64 w4 s3 1.23, 128x128 w4 s2 1.29, 128x64 w4 s2 1.38 in the run that gave 1.18
        return KernelConfig(128, 64, 8, 3, registers=128, tma=True)
    if skip:
        # λ = .01 and 0: .81, 1.34. s2 .85, 1.43; 64x128 w4 s2 .91, 1.49; 256x64 w8 s3 .93, 1.66.
        # Without the hardware vote: s2 .91, 1.53.
        return KernelConfig(128, 64, 4, 3, tma=True, hardware_vote=True)
    # 1.29 to 1.32; 256x64 w8 s3 1.36, 64x64 w4 s3 1.41. 32,760 tokens: 1.31; 128x64 w8 s3 1.41, 128x64 w4 s3 1.45
    return KernelConfig(128, 64, 4, 2, tma=True)


def _pointers(head_dim: int, shared_kib: int) -> KernelConfig:
    """For GPUs that these kernels have not been timed on: no spills, shared memory that fits, plain loads."""
    if head_dim == 256:
        return KernelConfig(64, 32, 8, 2)
    return KernelConfig(128, 64, 8, 3 if shared_kib > 99 else 2)


def tile_shape(capability, head_dim: int, quant=None, skip: bool = True) -> tuple[int, int]:
    """(query rows, keys) of a tile: the grain at which Skip-Softmax decides on this GPU."""
    config = kernel_config(capability, head_dim, quant, skip)
    return config.block_m, config.block_n


def tile_count(tile, *, batch: int, heads: int, query_length: int, key_length) -> int:
    """Pairs of query tile and KV tile in one call, over all heads: what `skipped` is a part of.

    tile: (query rows, keys). heads: query heads. key_length: int, or one int per batch entry.
    """
    lengths = [key_length] * batch if isinstance(key_length, int) else list(key_length)
    if len(lengths) != batch:
        raise ValueError(f"{len(lengths)} key lengths for a batch of {batch}")
    return heads * -(-query_length // tile[0]) * sum(-(-length // tile[1]) for length in lengths)
