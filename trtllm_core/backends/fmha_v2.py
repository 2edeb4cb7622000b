"""FMHA_V2: TensorRT-LLM's FMHA v2 kernels, compiled by FlashInfer on first use. Hopper.

The kernels skip per 64 query rows and 128 keys (256 at head size 64), and visit KV tiles in order
from the first; `kv_order` means nothing to them. In the last, partly filled query tile the rows behind
the end vote too, so it skips less than its own rows would allow.

A combination that was never compiled is an assert that release builds drop: the output would be
uninitialised memory. So every limit is checked here. One of them is in no message of FlashInfer's (0.6.16 to 0.7.4): the kernels address K and V with the row
count of Q. Fewer keys than queries are read past their end, more are taken for zeros. So all three
are given the same number of rows, and the keys end where the cumulative lengths say.

bfloat16 only: the fp16 kernels accumulate q k^T in fp16, which overflows silently at 65504 before the
scale, and float16 inputs cast to bfloat16 come out more exact than from them (measured on an H200:
3.3e-3 against 7.0e-3, benchmarks/results/fmha_v2_h200.md).
"""

from __future__ import annotations

import torch

from ..device import Device
from . import AttentionCall, Package, Request, Requirements, Unavailable, import_names
from ._flashinfer import COMPILER, INSTALL, Sequences, build, key_lengths, mismatches, sequences, workspace

REQUIREMENTS = Requirements(
    backend="FMHA_V2",
    summary="TensorRT-LLM FMHA v2 through FlashInfer",
    capabilities=((9, 0),),
    dtypes=(torch.bfloat16,),
    head_dims=(64, 128),
    mask="padding",
    skip_softmax=True,
    packages=(Package("flashinfer", INSTALL, "0.6.16"),),  # the oldest that was tried
)

LAYOUT = "SEPARATE_Q_K_V"
WORKSPACE_BYTES = 16 << 20
# Filled by `load`: FlashInfer's functions.
_attention = _module = _recipe = None


def refusals(request: Request, device: Device) -> tuple[str, ...]:
    """Kernel packages of another version than FlashInfer."""
    return mismatches(device)


def load(device: Device) -> None:
    """Import the Python side; the kernels are compiled by `prepare`."""
    global _attention, _module, _recipe
    names = ("trtllm_fmha_v2_prefill", "get_trtllm_fmha_v2_module", "gen_fmha_v2_module")
    _attention, _module, _recipe = import_names(REQUIREMENTS.backend, "flashinfer.prefill", *names)


def prepare() -> None:
    """Compile the kernels, unless this machine or process has them: minutes, announced.

    `run` calls it, and the self-check before sampling calls `run`. Raises `Unavailable`.
    """
    key = (LAYOUT, torch.bfloat16, None)  # FlashInfer keeps modules by these very arguments
    build(REQUIREMENTS.backend, "its kernels", lambda: _module(*key), COMPILER, lambda: _recipe(*key))


def limits(call: AttentionCall) -> tuple[str, ...]:
    """Every reason why the kernels would not compute `call`, from its shapes alone."""
    found = []
    query, key = call.query, call.key
    if {query.dtype, key.dtype, call.value.dtype} != {torch.bfloat16}:
        dtypes = ", ".join(str(x.dtype).removeprefix("torch.") for x in (query, key, call.value))
        found.append(f"q, k and v must be bfloat16, not {dtypes}")
    if query.shape[-1] not in REQUIREMENTS.head_dims:
        found.append(f"head size {query.shape[-1]} has no kernel here")
    if query.shape[-1] != key.shape[-1] or key.shape != call.value.shape:
        found.append(f"k {tuple(key.shape)} and v {tuple(call.value.shape)} do not fit q")
    if query.shape[2] % key.shape[2]:
        found.append(f"{query.shape[2]} query heads are not a multiple of {key.shape[2]} key heads")
    if call.mask is not None:
        found.append("it takes key lengths, not a mask")
    if not call.scale > 0:
        found.append(f"scale={call.scale} must be above 0 (the kernels read 0 as their own default)")
    return tuple(found)


def run(call: AttentionCall) -> torch.Tensor:
    """[batch, query tokens, heads, head_dim] in q's dtype."""
    reasons = limits(call)
    if reasons:
        raise Unavailable(REQUIREMENTS.backend, reasons)
    prepare()
    tokens = call.query.shape[1]
    out = torch.empty(call.query.shape, dtype=call.query.dtype, device=call.query.device)
    lengths = set(key_lengths(call))
    is_even = lengths == {tokens} and call.key.shape[1] == tokens
    for part in sequences(call, out, together=is_even):
        if is_even:
            _attend(part, call)
            continue
        rows = max(part.query_length, part.key_length)
        result = part.out
        part.query, part.key, part.value = (_lengthened(x, rows) for x in (part.query, part.key, part.value))
        part.out = torch.empty_like(part.query)
        _attend(part, call)
        result.copy_(part.out[: part.query_length])
    return out


def _attend(part: Sequences, call: AttentionCall) -> None:
    """Fill part.out. The skip keyword is passed only when skipping is on."""
    features = {}
    if call.threshold:
        # the kernel divides by the number of keys
        features["skip_softmax_threshold_scale_factor"] = call.threshold * part.key_length
    _attention(
        qkv=(part.query, part.key, part.value),
        input_layout=LAYOUT,
        workspace_buffer=workspace(part.out.device, WORKSPACE_BYTES),
        seq_lens=part.lengths(),
        max_q_len=part.query_length,
        max_kv_len=part.key_length,
        bmm1_scale=call.scale,
        bmm2_scale=1.0,
        batch_size=part.count,
        cum_seq_lens_q=part.starts(part.query_length),
        cum_seq_lens_kv=part.starts(part.key_length),
        out=part.out,
        mask_mode="padding",
        **features,
    )


def _lengthened(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x [tokens, heads, head_dim] with zeros behind it up to `rows`; masked, but still multiplied."""
    if x.shape[0] == rows:
        return x
    longer = x.new_zeros(rows, *x.shape[1:])
    longer[: x.shape[0]] = x
    return longer
