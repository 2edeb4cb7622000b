"""By which tiles and in which order a kernel decides what to skip.

λ means something else under another rule: a curve counted with one holds for kernels that skip by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .device import Device
from .kernels import hopper, tile_shape
from .specs import AttnQuantSpec, one_of

KV_ORDERS = ("own_first", "sequential")
TOKEN_ORDERS = ("cubes", "sequential")


@dataclass(frozen=True)
class SkipRule:
    """tile: (query rows, keys) that are skipped together. The defaults are ModelOpt's rule.

    kv_order: "own_first" starts each query tile at its own keys. token_order: "cubes" regroups
    video tokens.
    """

    tile: tuple[int, int] = (128, 128)
    kv_order: str = "sequential"
    token_order: str = "sequential"

    def __post_init__(self):
        sizes = self.tile
        is_pair = isinstance(sizes, (tuple, list)) and len(sizes) == 2
        if not is_pair or not all(type(n) is int and n > 0 for n in sizes):
            raise ValueError(f"skip rule tile={sizes!r} must be (query rows, keys)")
        object.__setattr__(self, "tile", tuple(sizes))
        one_of("skip rule kv_order", self.kv_order, KV_ORDERS)
        one_of("skip rule token_order", self.token_order, TOKEN_ORDERS)

    def __str__(self):
        rows, keys = self.tile
        start = "own tile first" if self.kv_order == "own_first" else "in order"
        tokens = "cubes" if self.token_order == "cubes" else "the model's order"
        return f"{rows}x{keys} tiles, keys {start}, tokens in {tokens}"


def skip_rule(
    backend: str,
    device: Device,
    head_dim: int | None,
    token_order: str,
    quant: AttnQuantSpec | None = None,
) -> SkipRule | None:
    """The rule of a backend that skips, or None for one whose rule is not known.

    token_order: as a user chooses it; "cubes" also starts at the own tile where the kernel can.
    """
    own_first = "own_first" if token_order == "cubes" else "sequential"
    head_dim = head_dim or 128
    if backend == "TRITON_ATTN":
        return SkipRule(_triton_tile(device, head_dim, quant), own_first, token_order)
    if backend == "REFERENCE":
        return SkipRule((128, 64), own_first, token_order)
    if backend == "FMHA_V2":  # read in TensorRT-LLM's Hopper kernels
        return SkipRule((64, 256 if head_dim == 64 else 128), "sequential", token_order)
    if backend == "TRTLLM_ATTN":  # what ModelOpt calibrates for
        return SkipRule((128, 128), "sequential", token_order)
    return None


def _triton_tile(device: Device, head_dim: int, quant: AttnQuantSpec | None) -> tuple[int, int]:
    """The Hopper kernels' where they run: these start up to two query tiles early with own_first."""
    triton_version = device.packages.get("triton")
    if hopper.unsupported(device.capability, torch.bfloat16, head_dim, quant, triton_version):
        return tile_shape(device.capability or (8, 0), head_dim, quant)
    return hopper.tile_shape(head_dim, quant)
