"""TRTLLM_ATTN: TensorRT-LLM's generated FMHA kernels through FlashInfer, on datacenter Blackwell.

Not run on such a GPU: tests/core/flashinfer runs FlashInfer's own Python code over an emulated kernel.

The kernels visit KV tiles in order from the first; `kv_order` means nothing to them.
"""

from __future__ import annotations

import inspect
import logging

import torch

from ..device import Device
from ..specs import SAGE_DTYPES, AttnQuantSpec
from . import AttentionCall, Request, Requirements, Unavailable, import_names
from ._flashinfer import FLASHINFER, Sequences, build, mismatches, said, sequences, too_old, workspace

log = logging.getLogger("trtllm_attention")

REQUIREMENTS = Requirements(
    backend="TRTLLM_ATTN",
    summary="FlashInfer trtllm-gen FMHA",
    capabilities=((10, 0), (10, 3)),
    dtypes=(torch.bfloat16,),
    head_dims=(128,),
    mask="padding",
    skip_softmax=True,
    quant_dtypes=SAGE_DTYPES,
    options=("q_block_size", "k_block_size"),
    packages=(FLASHINFER,),
)

SKIP_VERSION = "0.6.4"
SAGE_VERSION = "0.6.16rc1"
WORKSPACE_BYTES = 256 << 20
QUANT_DTYPES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}

BINARIES = (
    "FlashInfer downloads its kernel binaries when they are first used. Without a network here, run "
    "`FLASHINFER_CUBIN_DIR=FOLDER python -m flashinfer download-cubin` with the same flashinfer on a "
    "machine that has one, copy FOLDER, and start ComfyUI with FLASHINFER_CUBIN_DIR=FOLDER"
)
NO_KERNEL = (
    "FlashInfer has no kernel for these SAGE block sizes: try quant.k_block_size 4 or 1, "
    "or dtype_qk='int8' on sm_100"
)

# Filled by `load`: the FlashInfer functions, and the keywords that this version of them knows.
_attention = _quantize = None
_keywords: frozenset[str] = frozenset()
_warned_short: set[int] = set()


def refusals(request: Request, device: Device) -> tuple[str, ...]:
    """What FlashInfer's packages lack for each lossy mode, and which kernels were never built."""
    spec = request.spec
    found = mismatches(device)
    if spec.skip_softmax is not None:
        found += too_old("skip_softmax", SKIP_VERSION, device)
    if spec.quant is not None and spec.quant.is_sage:
        found += too_old("quant.dtype_qk", SAGE_VERSION, device)
    if spec.quant is not None and spec.quant.dtype_qk == "int8" and device.capability == (10, 3):
        found += ("quant.dtype_qk='int8' has kernels on sm_100 only (use 'fp8_e4m3')",)
    return found


def load(device: Device) -> None:
    """Import the kernels' Python side and build their launcher, compiled once per machine."""
    global _attention, _quantize, _keywords
    names = ("trtllm_ragged_attention_deepseek", "get_trtllm_gen_fmha_module", "gen_trtllm_gen_fmha_module")
    attention, module, recipe = import_names(REQUIREMENTS.backend, "flashinfer.prefill", *names)
    build(REQUIREMENTS.backend, "FlashInfer's trtllm-gen launcher", module, BINARIES, recipe)
    if device.has("flashinfer", SAGE_VERSION):
        quantize = "trtllm_sage_attention_quantize"
        (_quantize,) = import_names(REQUIREMENTS.backend, "flashinfer.prefill", quantize)
        _keywords = frozenset(inspect.signature(_quantize).parameters)
    _keywords |= frozenset(inspect.signature(attention).parameters)
    _attention = attention


def run(call: AttentionCall) -> torch.Tensor:
    """bf16 attention; `call` needs what REQUIREMENTS says. Returns bf16 [batch, query tokens, heads, 128]."""
    out = torch.empty(call.query.shape, dtype=call.query.dtype, device=call.query.device)
    is_sage = call.quant is not None and call.quant.is_sage
    # SAGE's scales of K and V span all sequences of one call: one by one, a batch is its parts
    for part in sequences(call, out, together=not is_sage):
        if is_sage and part.key_length < call.quant.k_block_size:
            _warn_short(call.quant.k_block_size, part.key_length)
            _attend(part, call, None)
        else:
            _attend(part, call, call.quant if is_sage else None)
    return out


def _attend(part: Sequences, call: AttentionCall, quant: AttnQuantSpec | None) -> None:
    """Fill part.out. A keyword is passed only when its feature is on, for versions without it."""
    query_starts, key_starts = part.starts(part.query_length), part.starts(part.key_length)
    features = {}
    if call.threshold:
        # the kernel divides by the length of the context
        features["skip_softmax_threshold_scale_factor"] = call.threshold * part.key_length
    if quant is not None:
        scales = _quantize_part(part, quant, query_starts, key_starts)
        features["sage_attn_sfs"] = scales
        features["num_elts_per_sage_attn_blk"] = (quant.q_block_size, quant.k_block_size, 0, 1)
    if "skip_all_rows_active_check" in _keywords:
        features["skip_all_rows_active_check"] = True  # the check would wait for the GPU
    try:
        _attention(
            query=part.query,
            key=part.key,
            value=part.value,
            workspace_buffer=workspace(part.out.device, WORKSPACE_BYTES),
            seq_lens=part.lengths(),
            max_q_len=part.query_length,
            max_kv_len=part.key_length,
            bmm1_scale=call.scale,
            bmm2_scale=1.0,
            o_sf_scale=-1.0,
            batch_size=part.count,
            window_left=-1,
            cum_seq_lens_q=query_starts,
            cum_seq_lens_kv=key_starts,
            enable_pdl=False,
            is_causal=False,
            return_lse=False,
            out=part.out,
            **features,
        )
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        advice = NO_KERNEL if quant is not None and "Missing TRTLLM-GEN kernel" in str(error) else BINARIES
        raise Unavailable(REQUIREMENTS.backend, (said(error),), advice) from error


def _quantize_part(part: Sequences, quant: AttnQuantSpec, query_starts, key_starts) -> tuple:
    """Replace part's q, k, v by their quantized values; returns FlashInfer's (q, k, p, v) scales.

    K is smoothed: its mean over the tokens, which the softmax does not see, is taken off first.
    """
    features = {}
    if "smooth_k" in _keywords:
        # without the starts, FlashInfer copies them from the host and waits
        features = {"smooth_k": True, "cum_seq_lens_q": query_starts, "cum_seq_lens_kv": key_starts}
    else:
        part.key = part.key - part.key.mean(0, keepdim=True, dtype=torch.float32).to(part.key.dtype)
    part.query, part.key, part.value, query_scale, key_scale, value_scale, *_ = _quantize(
        part.query,
        part.key,
        part.value,
        q_block_size=quant.q_block_size,
        k_block_size=quant.k_block_size,
        qk_quant_dtype=QUANT_DTYPES[quant.dtype_qk],
        **features,
    )
    return query_scale, key_scale, None, value_scale


def _warn_short(k_block_size: int, key_length: int) -> None:
    if k_block_size not in _warned_short:
        _warned_short.add(k_block_size)
        log.warning(
            "TRTLLM_ATTN: %d keys are fewer than quant.k_block_size=%d: such calls run dense",
            *(key_length, k_block_size),
        )
