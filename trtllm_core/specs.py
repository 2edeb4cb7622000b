"""What a user may ask of one attention site: frozen values, checked when they are made.

The keys, ranges and defaults are those of vLLM-Omni's attention configuration, so that one JSON
serves both. Nothing here knows a GPU, a package or a model.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

BACKEND_NAMES = (
    "TRTLLM_ATTN",
    "FMHA_V2",
    "TRITON_ATTN",
    "FLASH_ATTN",
    "CUDNN_ATTN",
    "FLASHINFER_ATTN",
    "TORCH_SDPA",
    "SAGE_ATTN",
    "SAGE_ATTN_3",
    "FLASH_ATTN_HUB",
    "FLASH_ATTN_3_HUB",
    "REFERENCE",
)

SAGE_DTYPES = ("int8", "fp8_e4m3")
FLASHINFER_DTYPES = ("float16", "bfloat16")
BLOCK_SIZES = (1, 4, 16)


def nearest(name: object, known) -> str:
    """`", did you mean 'X'?"` for the closest of `known`, or an empty string."""
    wanted = str(name).upper()
    by_upper = {str(k).upper(): k for k in known}
    # part of a name, like SDPA or fp8, says more than its spelling
    match = [k for k in by_upper if len(wanted) > 2 and wanted in k]
    match = match or difflib.get_close_matches(wanted, by_upper, n=1)
    return f", did you mean {by_upper[match[0]]!r}?" if match else ""


def one_of(key: str, value: object, allowed) -> None:
    """Raise ValueError naming `key` and `value` unless `value` is one of `allowed`."""
    if isinstance(value, bool) or value not in allowed:
        choices = ", ".join(repr(a) for a in allowed)
        raise ValueError(f"{key}={value!r} is not one of {choices}{nearest(value, allowed)}")


def number(key: str, value: object, low: float, high: float = math.inf) -> None:
    """Raise unless `value` is a finite number in [low, high]; nothing is clamped."""
    bounds = f"at least {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{key}={value!r} must be a number {bounds}, not {type(value).__name__}")
    if not math.isfinite(value) or not low <= value <= high:
        hint = ""
        if high == 1 and 1 < value <= 100:
            hint = f"; it is a fraction, did you mean {value / 100:g}?"
        raise ValueError(f"{key}={value!r} must be finite and {bounds}{hint}")


@dataclass(frozen=True)
class AttnQuantSpec:
    """Low-precision attention, the `quant` block.

    dtype_qk: "int8" or "fp8_e4m3" turn SAGE on (TRTLLM_ATTN, TRITON_ATTN, REFERENCE);
        "float16" or "bfloat16" belong to FLASHINFER_ATTN; None leaves Q and K alone.
    dtype_vo: FLASHINFER_ATTN's dtype of V and the output, "float16" or "bfloat16".
    q_block_size, k_block_size: consecutive tokens that share one Q or K scale: 1, 4 or 16.
    flashinfer_backend: FLASHINFER_ATTN's own kernel choice, e.g. "fa2" or "fa3".
    """

    dtype_qk: str | None = None
    dtype_vo: str | None = None
    q_block_size: int = 1
    k_block_size: int = 16
    flashinfer_backend: str | None = None

    def __post_init__(self):
        if self.dtype_qk is not None:
            one_of("quant.dtype_qk", self.dtype_qk, SAGE_DTYPES + FLASHINFER_DTYPES)
        if self.dtype_vo is not None:
            one_of("quant.dtype_vo", self.dtype_vo, FLASHINFER_DTYPES)
        one_of("quant.q_block_size", self.q_block_size, BLOCK_SIZES)
        one_of("quant.k_block_size", self.k_block_size, BLOCK_SIZES)
        if self.flashinfer_backend is not None and not (
            isinstance(self.flashinfer_backend, str) and self.flashinfer_backend
        ):
            raise ValueError(
                f"quant.flashinfer_backend={self.flashinfer_backend!r} must be a non-empty string"
            )

    @property
    def is_sage(self) -> bool:
        """Whether Q and K are quantized, i.e. whether results differ from dense."""
        return self.dtype_qk in SAGE_DTYPES


@dataclass(frozen=True)
class SkipSoftmaxSpec:
    """Skip the softmax and PV of KV tiles whose scores are too low to matter.

    threshold: λ >= 0, the skip threshold itself, independent of sequence length.
    target_sparsity: in [0, 1], a point on a model's calibrated curve.
    disabled_until_timestep: D in [0, 1]; dense while t > D; 0 turns the gate off.
    Exactly one of the first two is set.
    """

    threshold: float | None = None
    target_sparsity: float | None = None
    disabled_until_timestep: float = 0.0

    def __post_init__(self):
        if self.threshold is not None and self.target_sparsity is not None:
            raise ValueError(
                f"skip_softmax.threshold={self.threshold!r} and skip_softmax.target_sparsity="
                f"{self.target_sparsity!r} set the same kernel threshold: remove one"
            )
        if self.threshold is None and self.target_sparsity is None:
            raise ValueError(
                "skip_softmax needs threshold (no calibration needed, try 0.01) or target_sparsity "
                "(a point on a calibrated curve)"
            )
        if self.threshold is not None:
            number("skip_softmax.threshold", self.threshold, 0)
        if self.target_sparsity is not None:
            number("skip_softmax.target_sparsity", self.target_sparsity, 0, 1)
        number("skip_softmax.disabled_until_timestep", self.disabled_until_timestep, 0, 1)


@dataclass(frozen=True)
class AttentionSpec:
    """Everything asked of one attention role. `backend` None means auto."""

    backend: str | None = None
    quant: AttnQuantSpec | None = None
    skip_softmax: SkipSoftmaxSpec | None = None

    def __post_init__(self):
        if self.backend is not None:
            if not isinstance(self.backend, str):
                raise ValueError(f"backend={self.backend!r} must be a string")
            if self.backend not in BACKEND_NAMES:
                raise ValueError(
                    f"backend={self.backend!r} is not one of {', '.join(BACKEND_NAMES)}"
                    f"{nearest(self.backend, BACKEND_NAMES)}"
                )
        if self.quant is not None and not isinstance(self.quant, AttnQuantSpec):
            raise ValueError(f"quant must be an AttnQuantSpec, not {type(self.quant).__name__}")
        if self.skip_softmax is not None and not isinstance(self.skip_softmax, SkipSoftmaxSpec):
            raise ValueError(
                f"skip_softmax must be a SkipSoftmaxSpec, not {type(self.skip_softmax).__name__}"
            )

    @property
    def is_lossy(self) -> bool:
        """Whether the result may differ from dense attention by more than rounding."""
        return self.skip_softmax is not None or (self.quant is not None and self.quant.is_sage)
