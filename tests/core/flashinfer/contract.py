"""FlashInfer's own Python layer under our adapters, over the emulated compiled modules.

Not collected by name: test_contract_emulated.py runs it once per FlashInfer version, with that
version first on the path. Expected values are float64 mathematics written here, or the reference.
"""

import logging
import math
import sys
from pathlib import Path

import flashinfer
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from emulator import emulated  # noqa: E402

from trtllm_core import backends, reference  # noqa: E402
from trtllm_core.backends import AttentionCall, Unavailable, _flashinfer, flashinfer_attn, fmha_v2, trtllm_attn  # noqa: E402
from trtllm_core.device import Device, at_least  # noqa: E402
from trtllm_core.specs import AttnQuantSpec  # noqa: E402

BF16, FP16 = torch.bfloat16, torch.float16
VERSION = flashinfer.__version__
GPUS = {trtllm_attn: (10, 0), fmha_v2: (9, 0), flashinfer_attn: (9, 0)}
SHAPES = [(1, 1, 1, 1, 1), (2, 63, 63, 4, 2), (1, 200, 77, 2, 1), (3, 129, 300, 2, 2), (2, 128, 256, 3, 3)]


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """Each test starts as a new process: nothing built, warned or allocated."""
    for state in (_flashinfer._built, _flashinfer._workspaces, flashinfer_attn._prepared):
        state.clear()
    trtllm_attn._warned_short.clear()


def device(capability):
    return Device("cuda", capability, packages={"flashinfer": VERSION})


def make(batch=2, queries=129, keys=200, heads=4, key_heads=2, dim=128, dtype=BF16, local=False):
    """q, k, v as [B, H, L, D] memory seen as [B, L, H, D], as HunyuanVideo passes them.

    local: each 128 queries score about 2 higher on every third 128 keys, their own among them.
    """
    g = torch.Generator().manual_seed(0)
    q = torch.randn(batch, heads, queries, dim, generator=g)
    k = torch.randn(batch, key_heads, keys, dim, generator=g) + 0.5
    v = torch.randn(batch, key_heads, keys, dim, generator=g) + 0.1
    if local:
        q, k = (0.3 * x + 4.8 * torch.eye(3, dim)[torch.arange(x.shape[2]) // 128 % 3] for x in (q, k))
    return tuple(x.to(dtype).transpose(1, 2) for x in (q, k, v))


def run(module, q, k, v, capability=None, missing=(), change=None, **fields):
    """`module`'s output on an emulated GPU; `change(keywords)` tampers with what FlashInfer gets."""
    capability = capability or GPUS[module]
    lengths = fields.pop("lengths", None)
    if lengths is not None:
        fields.update(key_lengths=torch.tensor(lengths, dtype=torch.int32), host_key_lengths=tuple(lengths))
    fields.setdefault("scale", q.shape[-1] ** -0.5)
    with emulated(capability, missing) as gpu:
        module.load(device(capability))
        name = "_prefill" if module is flashinfer_attn else "_attention"
        if change is not None:
            real = getattr(module, name)
            setattr(module, name, lambda *args, **keywords: real(*args, **change(keywords)))
        out = module.run(AttentionCall(q, k, v, **fields))
        run.waits = gpu.waits
    return out


def exact(q, k, v, scale, keep=None):
    """Softmax attention in float64, row by row of the definition; keep: bool [B, Lq, Lk]."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if keep is not None:
        scores = scores.masked_fill(~keep[:, None], -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def error(out, expected):
    """Relative L2; NaN stays NaN, which no bound admits."""
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def bound(q, k, v):
    """Twice what PyTorch's own attention in q's dtype gets wrong."""
    groups = q.shape[2] // k.shape[2]
    heads = (q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(groups, 1) for x in (k, v)))
    plain = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)
    return max(2 * error(plain, exact(q, k, v, q.shape[-1] ** -0.5)), 2e-3)


def expect_close(out, expected, limit):
    assert error(out, expected) <= limit, f"relative error {error(out, expected):.3g} over {limit:.3g}"


def padded(shape, lengths):
    return torch.arange(shape[1]) < torch.tensor(lengths)[:, None]


def whole_tiles(module, q):
    """How many queries skip by the rule alone: in FMHA_V2's last, partly filled tile others vote too."""
    return q.shape[1] // 64 * 64 if module is fmha_v2 else q.shape[1]


# Dense


@pytest.mark.parametrize("module", GPUS, ids=lambda m: m.__name__.split(".")[-1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense_equals_mathematics(module, shape):
    q, k, v = make(*shape)
    out = run(module, q, k, v, scale=0.07)
    assert out.shape == q.shape and out.dtype == BF16
    expect_close(out, exact(q, k, v, 0.07), bound(q, k, v))


@pytest.mark.parametrize("module", GPUS, ids=lambda m: m.__name__.split(".")[-1])
def test_padded_keys_do_not_count(module):
    q, k, v = make(batch=3)
    lengths = [200, 1, 77]
    k[1, 1:], v[2, 77:] = math.nan, math.nan
    out = run(module, q, k, v, lengths=lengths)
    k, v = k.nan_to_num(), v.nan_to_num()
    keep = padded(k.shape, lengths)[:, None].expand(-1, q.shape[1], -1)
    expect_close(out, exact(q, k, v, 128**-0.5, keep), bound(q, k, v))


@pytest.mark.parametrize("module", GPUS, ids=lambda m: m.__name__.split(".")[-1])
def test_a_sequence_without_keys_gives_zeros(module):
    q, k, v = make()
    out = run(module, q, k, v, lengths=[0, 200])
    assert not out[0].any()
    expect_close(out[1:], exact(q[1:], k[1:], v[1:], 128**-0.5), bound(q, k, v))


@pytest.mark.parametrize("module", GPUS, ids=lambda m: m.__name__.split(".")[-1])
def test_a_batch_equals_its_parts(module):
    q, k, v = make()
    out = run(module, q, k, v)
    for row in range(2):
        part = slice(row, row + 1)
        assert torch.equal(out[part], run(module, q[part], k[part], v[part]))


def test_small_heads_of_fmha_v2():
    q, k, v = make(dim=64)
    expect_close(run(fmha_v2, q, k, v), exact(q, k, v, 64**-0.5), bound(q, k, v))


# Skip-Softmax


@pytest.mark.parametrize("module", [trtllm_attn, fmha_v2], ids=["trtllm_attn", "fmha_v2"])
def test_thresholds_at_the_ends(module):
    q, k, v = make(queries=300, keys=700, heads=2, key_heads=1, local=True)
    dense = run(module, q, k, v)
    assert torch.equal(run(module, q, k, v, threshold=0.0), dense)
    expect_close(run(module, q, k, v, threshold=1e-9), dense, 2e-2)
    assert error(run(module, q, k, v, threshold=2.0), dense) > 2e-2


@pytest.mark.parametrize("module, tile", [(trtllm_attn, (128, 128)), (fmha_v2, (64, 128))], ids=["trtllm_attn", "fmha_v2"])
@pytest.mark.parametrize("keys", [257, 700])
def test_skips_what_the_reference_skips(module, tile, keys):
    q, k, v = make(queries=300, keys=keys, heads=2, key_heads=1, local=True)
    expected, stats = reference.attention(
        *(x.double() for x in (q, k, v)), threshold=0.5, tile=tile, kv_order="sequential"
    )
    assert 0 < stats.skipped < stats.total
    rows = whole_tiles(module, q)
    out = run(module, q, k, v, threshold=0.5)
    expect_close(out[:, :rows], expected[:, :rows], bound(q, k, v))
    assert error(run(module, q, k, v), expected) > 10 * bound(q, k, v)


@pytest.mark.parametrize("module, tile", [(trtllm_attn, (128, 128)), (fmha_v2, (64, 128))], ids=["trtllm_attn", "fmha_v2"])
def test_threshold_is_the_same_for_padded_sequences(module, tile):
    q, k, v = make(queries=300, keys=700, heads=2, key_heads=1, local=True)
    lengths = [700, 300]
    out = run(module, q, k, v, threshold=0.5, lengths=lengths)
    for row, length in enumerate(lengths):
        part = (q[row : row + 1], k[row : row + 1, :length], v[row : row + 1, :length])
        expected, stats = reference.attention(
            *(x.double() for x in part), threshold=0.5, tile=tile, kv_order="sequential"
        )
        assert stats.skipped
        rows = whole_tiles(module, q)
        expect_close(out[row : row + 1, :rows], expected[:, :rows], bound(*part))


# SAGE


def sage(dtype, q_block=1, k_block=16):
    return AttnQuantSpec(dtype, q_block_size=q_block, k_block_size=k_block)


def mean_relative_error(out, expected):
    return float((out.double() - expected.double()).abs().mean() / expected.double().abs().mean())


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("q_block", [1, 4, 16])
@pytest.mark.parametrize("k_block", [1, 4, 16])
def test_sage_is_near_dense(dtype, q_block, k_block):
    q, k, v = make(queries=130, keys=256, heads=2)
    out = run(trtllm_attn, q, k, v, quant=sage(dtype, q_block, k_block))
    assert out.dtype == BF16
    assert 0 < mean_relative_error(out, exact(q, k, v, 128**-0.5)) < 0.1


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_sage_at_a_length_of_no_whole_blocks(dtype):
    q, k, v = make(queries=194, keys=194)
    out = run(trtllm_attn, q, k, v, quant=sage(dtype))
    assert mean_relative_error(out, exact(q, k, v, 128**-0.5)) < 0.2


def test_sage_smooths_k():
    q, k, v = make()
    shifted = k + 8.0 * torch.randn(1, 1, 2, 128, generator=torch.Generator().manual_seed(1)).to(BF16)
    assert mean_relative_error(run(trtllm_attn, q, shifted, v, quant=sage("int8")), exact(q, shifted, v, 128**-0.5)) < 0.1


def test_sage_batch_equals_its_parts_and_padding_is_cut():
    q, k, v = make()
    v[1] *= 20  # would spoil the other sequence's scales
    quant = sage("fp8_e4m3", 4, 4)
    out = run(trtllm_attn, q, k, v, quant=quant, lengths=[200, 77])
    assert torch.equal(out[:1], run(trtllm_attn, q[:1], k[:1], v[:1], quant=quant))
    assert torch.equal(out[1:], run(trtllm_attn, q[1:], k[1:, :77], v[1:, :77], quant=quant))


def test_sage_and_skipping_compose():
    q, k, v = make(queries=300, keys=700, heads=2, key_heads=1, local=True)
    quant = sage("int8")
    expected, stats = reference.attention(
        *(x.float() for x in (q, k, v)), threshold=0.5, quant=quant, tile=(128, 128), kv_order="sequential"
    )
    assert stats.skipped
    out = run(trtllm_attn, q, k, v, threshold=0.5, quant=quant)
    expect_close(out, expected, 3e-2)
    assert error(run(trtllm_attn, q, k, v, quant=quant), expected) > 6e-2


def test_few_keys_run_dense_and_say_so_once(caplog):
    q, k, v = make(keys=15)
    with caplog.at_level(logging.WARNING, "trtllm_attention"):
        for _ in range(3):
            out = run(trtllm_attn, q, k, v, quant=sage("int8"))
    assert torch.equal(out, run(trtllm_attn, q, k, v))
    assert len(caplog.records) == 1 and "k_block_size=16" in caplog.text


def test_no_sage_kernel_is_said_with_what_to_try():
    q, k, v = make()
    with pytest.raises(Unavailable, match="k_block_size 4 or 1"):
        run(trtllm_attn, q, k, v, quant=sage("fp8_e4m3"), missing=[(torch.float8_e4m3fn, 1, 16)])


# FLASHINFER_ATTN


def test_custom_masks():
    q, k, v = make()
    keep = torch.rand(2, 1, q.shape[1], k.shape[1], generator=torch.Generator().manual_seed(3)) > 0.5
    keep[..., 0] = True
    expected = exact(q, k, v, 128**-0.5, keep[:, 0])
    hidden = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    for mask in (keep, hidden):
        expect_close(run(flashinfer_attn, q, k, v, mask=mask), expected, bound(q, k, v))
    one = keep[:1, :, :1]
    out = run(flashinfer_attn, q, k, v, mask=one)
    expect_close(out, exact(q, k, v, 128**-0.5, one[:, 0].expand(2, q.shape[1], -1)), bound(q, k, v))


def test_masks_that_it_cannot_honour_are_refused():
    q, k, v = make()
    with pytest.raises(ValueError, match="all heads"):
        run(flashinfer_attn, q, k, v, mask=torch.ones(1, 4, 1, k.shape[1], dtype=torch.bool))
    with pytest.raises(ValueError, match="bias"):
        run(flashinfer_attn, q, k, v, mask=torch.full((1, 1, 1, k.shape[1]), 0.5))
    with pytest.raises(ValueError, match="fa3"):
        keep = torch.ones(1, 1, 1, k.shape[1], dtype=torch.bool)
        run(flashinfer_attn, q, k, v, mask=keep, quant=AttnQuantSpec(flashinfer_backend="fa3"))


@pytest.mark.parametrize("quant", [AttnQuantSpec("float16"), AttnQuantSpec(dtype_vo="float16"), AttnQuantSpec("float16", "float16", flashinfer_backend="fa2")], ids=["qk", "vo", "both"])
def test_flashinfer_computes_in_the_dtype_asked_for(quant):
    q, k, v = make()
    out = run(flashinfer_attn, q, k, v, quant=quant)
    assert out.dtype == FP16
    expect_close(out, exact(q, k, v, 128**-0.5), bound(q, k, v))


# What a call costs


@pytest.mark.parametrize("module", GPUS, ids=lambda m: m.__name__.split(".")[-1])
@pytest.mark.parametrize("fields", [{}, {"lengths": [200, 77]}, {"threshold": 0.1}, {"quant": "int8"}], ids=str)
def test_no_call_waits_for_the_gpu(module, fields):
    if "quant" in fields:
        if module is not trtllm_attn:
            return
        fields = {"quant": sage("int8")}
    run(module, *make(), **fields)
    assert run.waits == 0


@pytest.mark.parametrize("module", [trtllm_attn, fmha_v2], ids=["trtllm_attn", "fmha_v2"])
def test_one_zeroed_workspace_per_device(module):
    seen = []

    def change(keywords):
        seen.append(keywords["workspace_buffer"])
        return keywords

    for _ in range(2):
        run(module, *make(), change=change)
    assert seen[0] is seen[1] and seen[0].dtype == torch.uint8 and not seen[0].any()
    assert len(_flashinfer._workspaces) == 1


def test_a_keyword_is_passed_only_when_its_feature_is_on():
    seen = []

    def change(keywords):
        seen.append(set(keywords))
        return keywords

    later = {"skip_all_rows_active_check"} & set(trtllm_attn._keywords)
    assert bool(later) == at_least(VERSION, "0.6.18")
    run(trtllm_attn, *make(), change=change)
    run(trtllm_attn, *make(), change=change, threshold=0.1)
    run(trtllm_attn, *make(), change=change, quant=sage("int8"))
    skip, scales = "skip_softmax_threshold_scale_factor", {"sage_attn_sfs", "num_elts_per_sage_attn_blk"}
    assert seen[1] - seen[0] == {skip} and seen[2] - seen[0] == scales
    assert later <= seen[0]
    run(fmha_v2, *make(), change=change)
    assert skip not in seen[-1]


# Each of these breakages must be seen: an adapter that is wrong in this way fails the comparison


def _times(name, factor):
    return lambda keywords: {**keywords, name: keywords[name] * factor}


def _plus(name):
    return lambda keywords: {**keywords, name: keywords[name] + 1}


def _put(name, value):
    return lambda keywords: {**keywords, name: value}


def _over_length(keywords):
    name = "skip_softmax_threshold_scale_factor"
    return {**keywords, name: keywords[name] / keywords["max_kv_len"]}


def _drop(name, index, value):
    def change(keywords):
        items = list(keywords[name])
        items[index] = value(items)
        return {**keywords, name: tuple(items)}

    return change


def _equal_starts(keywords):
    return {**keywords, "cum_seq_lens_kv": keywords["cum_seq_lens_q"]}


def _head_major(keywords):
    """q that is laid out head by head, as it came: the copy into token order was forgotten."""
    name = "qkv" if "qkv" in keywords else "query"
    q = keywords[name][0] if name == "qkv" else keywords[name]
    q = q.transpose(0, 1).contiguous().transpose(0, 1)
    return {**keywords, name: (q, *keywords[name][1:]) if name == "qkv" else q}


BOTH = {
    "scale forgotten": _put("bmm1_scale", 1.0),
    "output scale": _times("bmm2_scale", 2.0),
    "wrong stride": _head_major,
    "query starts shifted": _plus("cum_seq_lens_q"),
    "key starts are the query's": _equal_starts,
    "too few query rows": _put("max_q_len", 100),
    "factor not multiplied by the length": _over_length,
    "skipping left off": _put("skip_softmax_threshold_scale_factor", 0.0),
}
TRTLLM = {
    "key lengths": _plus("seq_lens"),
    "length of the query given for the keys": lambda k: {**k, "max_kv_len": k["max_q_len"]},
    "causal": _put("is_causal", True),
    "q scales lost": _drop("sage_attn_sfs", 0, lambda s: torch.ones_like(s[0])),
    "q and k scales swapped": lambda k: {**k, "sage_attn_sfs": (k["sage_attn_sfs"][1], k["sage_attn_sfs"][0], None, k["sage_attn_sfs"][3])},
    "v scales lost": _drop("sage_attn_sfs", 3, lambda s: torch.ones_like(s[3])),
    "k block size": _drop("num_elts_per_sage_attn_blk", 1, lambda s: 4),
}
FMHA = {
    "causal": _put("mask_mode", "causal"),
    "fewer rows of k than of q": lambda k: {**k, "qkv": (k["qkv"][0], k["qkv"][1][:-1], k["qkv"][2])},
    "fewer rows of q than of k": lambda k: {**k, "qkv": (k["qkv"][0][:300], *k["qkv"][1:]), "out": k["out"][:300]},
}


@pytest.mark.parametrize("name", [*BOTH, *TRTLLM])
def test_breakages_of_trtllm_attn_are_seen(name):
    q, k, v = make(queries=300, keys=700, heads=2, key_heads=1, local=True)
    fields, limit = {"scale": 0.1, "threshold": 0.5}, 4e-3
    if name in TRTLLM:
        fields["quant"], limit = sage("int8", 4, 16), 3e-2
    _broken(trtllm_attn, q, k, v, fields, (128, 128), limit, {**BOTH, **TRTLLM}[name])


@pytest.mark.parametrize("name", [*BOTH, *FMHA])
def test_breakages_of_fmha_v2_are_seen(name):
    q, k, v = make(queries=300, keys=700, heads=2, key_heads=1, local=True)
    _broken(fmha_v2, q, k, v, {"scale": 0.1, "threshold": 0.5}, (64, 128), 4e-3, {**BOTH, **FMHA}[name])


def _broken(module, q, k, v, fields, tile, limit, change):
    expected, _ = reference.attention(*(x.float() for x in (q, k, v)), tile=tile, kv_order="sequential", **fields)
    rows = whole_tiles(module, q)
    expect_close(run(module, q, k, v, **fields)[:, :rows], expected[:, :rows], limit)
    with pytest.raises((AssertionError, Unavailable, IndexError)):
        out = run(module, q, k, v, change=change, **fields)
        expect_close(out[:, :rows], expected[:, :rows], limit)


def test_breakages_of_flashinfer_attn_are_seen():
    q, k, v = make()
    keep = torch.rand(2, 1, q.shape[1], k.shape[1], generator=torch.Generator().manual_seed(3)) > 0.5
    expected = exact(q, k, v, 0.1, keep[:, 0])
    lost = _put("custom_mask", None)
    for change in (_put("sm_scale", None), lost, lambda w: {**w, "custom_mask": ~w["custom_mask"]}):
        with pytest.raises(AssertionError):
            expect_close(run(flashinfer_attn, q, k, v, scale=0.1, mask=keep, change=change), expected, bound(q, k, v))


# Bad input


def test_fmha_v2_checks_every_limit_before_the_kernel():
    q, k, v = make(heads=3, key_heads=2, dim=96, dtype=torch.float32)
    with pytest.raises(Unavailable) as caught:
        run(fmha_v2, q, k, v, scale=0.0, mask=torch.ones(1, 1, 1, 200, dtype=torch.bool))
    for words in ("must be bfloat16, not float32", "head size 96", "3 query heads", "not a mask", "scale=0.0"):
        assert words in str(caught.value)


def test_a_function_that_is_not_there(monkeypatch):
    monkeypatch.delattr("flashinfer.prefill.trtllm_fmha_v2_prefill")
    with pytest.raises(Unavailable, match="flashinfer.prefill cannot be imported: AttributeError"):
        fmha_v2.load(device((9, 0)))


def test_a_failed_build_is_said_and_remembered(monkeypatch):
    tries = []

    def fail(*_):
        tries.append(1)
        raise RuntimeError("Ninja build failed.\nnvcc fatal: no such thing\nerror: unsupported compiler")

    with emulated((9, 0)):
        fmha_v2.load(device((9, 0)))
        fmha_v2._recipe = fmha_v2._module = fail
        for _ in range(2):
            with pytest.raises(Unavailable, match="unsupported compiler.*CUDA_HOME") as caught:
                fmha_v2.prepare()
    assert tries == [1] and "its kernels could not be built" in str(caught.value)


def test_missing_binaries_offline(monkeypatch):
    import flashinfer.prefill

    def offline():
        raise AssertionError("Failed to get checksums.txt from somewhere")

    monkeypatch.setattr(flashinfer.prefill, "gen_trtllm_gen_fmha_module", offline)
    with pytest.raises(Unavailable, match="download-cubin") as caught:
        trtllm_attn.load(device((10, 0)))
    assert "FLASHINFER_CUBIN_DIR" in str(caught.value)


def test_versions_as_the_modules_say_them():
    for name in ("TRTLLM_ATTN", "FMHA_V2", "FLASHINFER_ATTN"):
        capability = (10, 0) if name == "TRTLLM_ATTN" else (9, 0)
        assert backends.reasons(name, backends.Request(), device(capability)) == ()
