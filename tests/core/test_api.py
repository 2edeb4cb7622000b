"""The public call: what runs, what is refused, and that lossy settings do what they say."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from trtllm_core import api, reference
from trtllm_core.backends import AttentionCall, Unavailable
from trtllm_core.device import Device
from trtllm_core.specs import AttentionSpec, AttnQuantSpec, SkipSoftmaxSpec
from trtllm_core.token_order import TokenOrder

CPU = Device.current("cpu")


def tensors(length=90, heads=2, dim=32, keys=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = lambda n: (1, n, heads, dim)
    return [torch.randn(shape(n), generator=generator) for n in (length, keys or length, keys or length)]


def exact(q, k, v, **options):
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2).double() for x in (q, k, v)), **options)
    return out.transpose(1, 2)


def error(out, expected):
    return float((out.double() - expected).norm() / expected.norm())


def test_no_spec_is_the_platforms_dense_attention():
    q, k, v = tensors()
    assert api.plan(AttentionSpec(), CPU, head_dim=32).active.backend == "TORCH_SDPA"
    assert error(api.attention(q, k, v), exact(q, k, v)) < 1e-6


def test_lossy_on_a_cpu_is_the_reference():
    q, k, v = tensors()
    spec = AttentionSpec(skip_softmax=SkipSoftmaxSpec(threshold=0.7), quant=AttnQuantSpec("int8"))
    plan = api.plan(spec, CPU, head_dim=32)
    assert plan.active.backend == "REFERENCE"
    expected, _ = reference.attention(q, k, v, threshold=0.7, quant=spec.quant)
    assert api.attention(q, k, v, spec=spec).equal(expected)


def test_an_explicit_backend_that_cannot_run_raises_with_every_reason():
    with pytest.raises(Unavailable) as caught:
        api.plan(AttentionSpec("TRTLLM_ATTN"), CPU, head_dim=80, dtype=torch.float32)
    text = str(caught.value)
    assert all(part in text for part in ("TRTLLM_ATTN", "CPU", "flashinfer", "80"))


def test_the_gate_decides_by_time():
    q, k, v = tensors()
    spec = AttentionSpec("REFERENCE", skip_softmax=SkipSoftmaxSpec(threshold=1e6, disabled_until_timestep=0.5))
    dense = exact(q, k, v)
    assert error(api.attention(q, k, v, spec=spec, timestep=0.6), dense) < 1e-6
    assert error(api.attention(q, k, v, spec=spec), dense) < 1e-6  # unknown time: dense
    assert error(api.attention(q, k, v, spec=spec, timestep=0.5), dense) > 1e-3


def test_quant_stays_on_while_the_gate_is_closed():
    q, k, v = tensors()
    skip = SkipSoftmaxSpec(threshold=2.0, disabled_until_timestep=0.5)
    spec = AttentionSpec(skip_softmax=skip, quant=AttnQuantSpec("fp8_e4m3"))
    expected, _ = reference.attention(q, k, v, quant=spec.quant)
    assert api.attention(q, k, v, spec=spec, timestep=0.9).equal(expected)


def test_cubes_are_exact_and_skip_more():
    grid = (3, 6, 9)
    order = api.TokenOrder(grid, lead=7, device="cpu")
    q, k, v = tensors(length=7 + 3 * 6 * 9)
    spec = AttentionSpec("REFERENCE", skip_softmax=SkipSoftmaxSpec(threshold=0.0))
    assert error(api.attention(q, k, v, spec=spec, grid=grid), exact(q, k, v)) < 1e-6
    assert order.undo(order.apply(q)).equal(q)
    with pytest.raises(ValueError, match="more tokens"):
        api.attention(q, k, v, spec=spec, grid=(30, 6, 9))


def test_target_sparsity_without_a_curve_names_threshold():
    q, k, v = tensors()
    spec = AttentionSpec("REFERENCE", skip_softmax=SkipSoftmaxSpec(target_sparsity=0.5))
    with pytest.raises(ValueError, match="threshold"):
        api.attention(q, k, v, spec=spec)


def test_masks_reach_a_backend_that_honours_them():
    q, k, v = tensors(keys=50)
    mask = torch.rand(1, 1, 90, 50, generator=torch.Generator().manual_seed(5)) < 0.6
    mask[..., 0] = True
    for backend in (None, "TORCH_SDPA", "REFERENCE"):
        out = api.attention(q, k, v, spec=AttentionSpec(backend), mask=mask)
        assert error(out, exact(q, k, v, attn_mask=mask)) < 1e-5


GRID, EXTRA = (4, 8, 8), 20


@pytest.mark.parametrize("honours", ["padding", "any"])
@pytest.mark.parametrize("length", [200, 256, 270])
def test_padding_stays_padding_in_cube_order(honours, length):
    """Tokens of the video (200) or of a tail behind it are hidden."""
    q, k, v = tensors(256 + EXTRA)
    mask = (torch.arange(256 + EXTRA) < length).view(1, 1, 1, -1)
    plan = api.plan(AttentionSpec("REFERENCE", skip_softmax=SkipSoftmaxSpec(threshold=0.0)), CPU)
    active = replace(plan.active, requirements=replace(plan.active.requirements, mask=honours))
    call = AttentionCall(q, k, v, scale=32**-0.5, mask=mask, threshold=0.0)
    out = replace(plan, active=active).run(call, order=TokenOrder(GRID, tail=EXTRA))
    assert error(out, exact(q, k, v, attn_mask=mask)) < 1e-6


def test_a_mask_goes_where_its_tokens_go():
    q, k, v = tensors(256 + EXTRA)
    mask = torch.rand(1, 1, 256 + EXTRA, 256 + EXTRA, generator=torch.Generator().manual_seed(5)) < 0.6
    spec = AttentionSpec("REFERENCE", skip_softmax=SkipSoftmaxSpec(threshold=0.0))
    for given in (mask, mask[..., :1, :], mask[0, 0]):
        out = api.attention(q, k, v, spec=spec, mask=given, grid=GRID)
        assert error(out, exact(q, k, v, attn_mask=given)) < 1e-6


def test_gradients_are_not_lost_in_silence():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="no_grad"):
        api.attention(q, k.requires_grad_(), v)
    with torch.no_grad():
        api.attention(q, k, v)


def test_no_keys_is_an_error():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="no tokens"):
        api.attention(q, k[:, :0], v[:, :0])


def test_a_plan_whose_backend_fails_to_load_falls_to_the_next_for_auto_only(monkeypatch):
    from trtllm_core.backends import load_module

    module = load_module("REFERENCE")

    def broken(device):
        raise Unavailable("REFERENCE", ("imagined",))

    monkeypatch.setattr(module, "load", broken)
    with pytest.raises(Unavailable, match="imagined"):
        api.plan(AttentionSpec("REFERENCE"), CPU, head_dim=32)
    with pytest.raises(Unavailable, match="imagined"):
        api.plan(AttentionSpec(quant=AttnQuantSpec("int8")), CPU, head_dim=32)
    assert api.plan(AttentionSpec(), CPU, head_dim=32).active.backend == "TORCH_SDPA"


def test_a_cast_call_keeps_the_dtype_of_query():
    q, k, v = tensors()
    plan = api.plan(AttentionSpec("TORCH_SDPA"), CPU, head_dim=32)
    out = plan.run(AttentionCall(q.bfloat16(), k, v.half(), scale=32**-0.5))
    assert out.dtype == torch.bfloat16


def test_auto_that_drops_a_backend_says_so_once(monkeypatch, caplog):
    from trtllm_core.backends import load_module

    module = load_module("FLASH_ATTN")
    monkeypatch.setattr(module, "load", lambda device: None)
    hopper = Device("cuda", (9, 0), "imagined H200", packages={"fa3-fwd": "0.0.3", "triton": "3.6.0"})

    def check(module, *args):
        if module.REQUIREMENTS.backend == "FLASH_ATTN":
            raise Unavailable("FLASH_ATTN", ("this build does not support FP16",))

    monkeypatch.setattr(api, "self_check", check)
    monkeypatch.setattr(load_module("TRITON_ATTN"), "load", lambda device: None)
    with caplog.at_level("WARNING", "trtllm_attention"):
        for _ in range(3):
            plan = api.plan(AttentionSpec(), hopper, head_dim=128, dtype=torch.float16)
    assert plan.active.backend == "TRITON_ATTN"
    assert caplog.text.count("does not support FP16") == 1


def test_a_dropped_backend_keeps_no_tensor_of_the_caller(monkeypatch):
    """An exception that is kept has a traceback, whose frames hold what the model was computing."""
    from trtllm_core.backends import load_module

    monkeypatch.setattr(load_module("FLASH_ATTN"), "load", lambda device: None)
    monkeypatch.setattr(load_module("TRITON_ATTN"), "load", lambda device: None)
    hopper = Device("cuda", (9, 0), "imagined H200", packages={"fa3-fwd": "0.0.3", "triton": "3.6.0"})

    def check(module, *args):
        if module.REQUIREMENTS.backend == "FLASH_ATTN":
            raise Unavailable("FLASH_ATTN", ("this build does not support FP16",))

    monkeypatch.setattr(api, "self_check", check)

    def forward_of_a_model():
        activations = torch.zeros(10)
        assert api.plan(AttentionSpec(), hopper, head_dim=128, dtype=torch.float16).active.backend == "TRITON_ATTN"
        return weakref.ref(activations)

    gc.disable()
    try:
        assert forward_of_a_model()() is None
    finally:
        gc.enable()
