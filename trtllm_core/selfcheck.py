"""A kernel is not trusted before it was right once on this GPU.

Compilers and drivers have produced kernels that are wrong on one architecture only, and on the
path that skips tiles only. So each backend and mode is compared with PyTorch's own attention on a
small input when it is first planned, with tiles that are really skipped where the mode skips.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as F

from . import reference
from .backends import AttentionCall, Unavailable
from .device import Device, on_device_of
from .specs import AttentionSpec

TOKENS = 1032  # more than the fewest keys with which TRITON_ATTN quantizes; no whole tile
HEADS = 2
DENSE_TOLERANCE = 2e-2
LOSSY_TOLERANCE = 1.5e-1
SAGE_FACTOR = 2.0  # of what the reference with the same quantization gets wrong on the same input
SKIP_THRESHOLD = 1e-3

_checked: dict[tuple, str | None] = {}


def self_check(
    module: ModuleType,
    device: Device,
    spec: AttentionSpec,
    head_dim: int | None,
    dtype: torch.dtype | None,
) -> None:
    """Raise `Unavailable` unless backend `module` computes attention under `spec` on `device`.

    Runs once per backend, GPU, mode, head size and dtype in a process; does nothing on a CPU, where
    the backends are PyTorch itself.
    """
    if device.type != "cuda":
        return
    name = module.REQUIREMENTS.backend
    dtype = dtype if dtype in module.REQUIREMENTS.dtypes else module.REQUIREMENTS.dtypes[0]
    skips = spec.skip_softmax is not None
    key = (name, device.label, spec.quant, skips, head_dim, dtype)
    if key not in _checked:
        place = "cuda" if device.index is None else f"cuda:{device.index}"
        _checked[key] = _failure(module, spec, skips, head_dim or 128, dtype, place)
    if _checked[key] is not None:
        raise Unavailable(name, (_checked[key],))


def _failure(module, spec, skips, head_dim, dtype, place) -> str | None:
    query, key, value = _inputs(head_dim, dtype, place)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2).float() for x in (query, key, value))
    ).transpose(1, 2)
    call = AttentionCall(
        query,
        key,
        value,
        scale=head_dim**-0.5,
        threshold=SKIP_THRESHOLD if skips else None,
        quant=spec.quant,
    )
    try:
        with on_device_of(query):
            error = float((module.run(call).float() - expected).norm() / expected.norm())
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # whatever a compiler or a library raises, it is not usable here
        return f"it failed on a small input: {type(problem).__name__}: {problem}"
    limit = LOSSY_TOLERANCE if module.REQUIREMENTS.lossy else DENSE_TOLERANCE
    if spec.quant is not None and spec.quant.is_sage:
        same, _ = reference.attention(query, key, value, quant=spec.quant)
        limit = SAGE_FACTOR * float((same.float() - expected).norm() / expected.norm())
    if not error <= limit:
        return f"it is wrong on this GPU: relative error {error:.2g} on a small input, {limit:.2g} is expected"
    return None


def _inputs(head_dim, dtype, place):
    """q, k, v [1, tokens, heads, head_dim] whose tokens attend to their own third of the sequence.

    Scores outside it are lower by far more than ln(SKIP_THRESHOLD), so that those tiles can be
    skipped and the result still equals dense attention.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (1, TOKENS, HEADS, head_dim)
    query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
    third = torch.arange(TOKENS) * 3 // TOKENS
    # spread over all channels: a mark in one channel would be an outlier, which FP8 rounds coarsely
    signs = torch.randint(0, 2, (3, head_dim), generator=generator) * 2.0 - 1.0
    marks = (18.0 / head_dim**0.5) ** 0.5 * signs[third]
    query = query + marks[None, :, None]
    key = key + marks[None, :, None]
    return tuple(x.to(place, dtype) for x in (query, key, value))
