"""The override called directly, in this process, with everything ComfyUI may hand it."""

import gc
import logging
import subprocess
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from harness import location

HEADS, DIM = 2, 64


@pytest.fixture
def make_site(pack, submodule):
    """make_site(backend="REFERENCE", threshold=None, quant=None) -> LayerAttention on the CPU."""
    run_module = submodule("nodes.hook.run")
    override = submodule("nodes.hook.override")
    wires = submodule("nodes.wires")
    specs = submodule("trtllm_core.specs")
    device = submodule("trtllm_core.device")

    def make(backend="REFERENCE", threshold=None, quant=None, role="self"):
        skip = None if threshold is None else wires.SkipSoftmax(specs.SkipSoftmaxSpec(threshold=threshold))
        quant = None if quant is None else specs.AttnQuantSpec(dtype_qk=quant)
        settings = wires.RoleSettings.of(backend, quant, skip)
        run = run_module.PatchRun(
            settings, {}, device.Device.current("cpu"), token_order="cubes", holder=wires.StatsHolder(), count_tiles=True
        )
        run.start(torch.tensor([1.0, 0.5, 0.0]))
        return override.LayerAttention(run, "blocks.0.self_attn", role, settings, ignored=False)

    return make


def tensors(length=40, heads=HEADS, dim=DIM, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, length, heads * dim, generator=generator).to(dtype) for _ in range(3)]


def exact(q, k, v, heads=HEADS, mask=None, scale=None, key_heads=None):
    split = lambda x, n: x.double().view(x.shape[0], x.shape[1], n, -1).transpose(1, 2)
    key_heads = key_heads or heads
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    out = F.scaled_dot_product_attention(
        split(q, heads), split(k, key_heads), split(v, key_heads), attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).flatten(2)


def error(out, expected):
    return float((out.double() - expected).norm() / expected.norm())


def unused():
    raise AssertionError("declined")


def test_case_03_an_unknown_keyword_is_declined_untouched(make_site):
    site = make_site()
    q, k, v = tensors()
    marker = object()
    assert site(lambda: marker, (q, k, v), {"heads": HEADS, "from_the_future": 1}) is marker
    assert site.run.stats.declined == {"keyword from_the_future": 1}


def test_case_04_an_odd_head_size_is_right_and_said_once(make_site, caplog):
    site = make_site(backend="auto", threshold=0.5)
    # a CPU takes any head size; a backend that does not is imagined by one that cannot serve it
    site.run.plan_role = _refusing(site.run.plan_role)
    q, k, v = tensors(dim=160)
    expected = exact(q, k, v)
    with caplog.at_level(logging.WARNING, "trtllm_attention"):
        for _ in range(100):
            out = site(lambda: expected, (q, k, v), {"heads": HEADS})
            assert out is expected
    assert len(caplog.records) == 1 and "160" in caplog.text


def _refusing(plan_role):
    def refuse(role, head_dim, *args):
        import importlib

        module = importlib.import_module(plan_role.__module__)
        raise module.Unavailable("TRITON_ATTN", (f"head size {head_dim} is not one of 64, 128",))

    return refuse


def test_case_05_a_call_that_must_be_exact_is_never_lossy(make_site):
    q, k, v = tensors()
    keywords = {"heads": HEADS, "low_precision_attention": False}
    marker = object()
    assert make_site(threshold=2.0)(lambda: marker, (q, k, v), keywords) is marker
    assert make_site(quant="int8")(lambda: marker, (q, k, v), keywords) is marker
    out = make_site(backend="TORCH_SDPA")(unused, (q, k, v), keywords)
    assert error(out, exact(q, k, v)) < 1e-6


@pytest.mark.parametrize("backend", ["REFERENCE", "TORCH_SDPA"])
def test_case_09_mixed_dtypes_give_the_dtype_of_q(make_site, backend):
    q, k, v = tensors()
    out = make_site(backend)(unused, (q, k.bfloat16(), v.bfloat16()), {"heads": HEADS})
    assert out.dtype == torch.float32
    out = make_site(backend)(unused, (q.half(), k, v.half()), {"heads": HEADS})
    assert out.dtype == torch.float16 and error(out, exact(q, k, v)) < 2e-2


MASKS = {
    "2-D boolean": lambda n: torch.rand(n, n, generator=torch.Generator().manual_seed(1)) < 0.7,
    "2-D additive": lambda n: torch.randn(n, n, generator=torch.Generator().manual_seed(2)),
    "3-D boolean": lambda n: (torch.rand(1, n, n, generator=torch.Generator().manual_seed(3)) < 0.7),
    "4-D additive": lambda n: torch.randn(1, 1, 1, n, generator=torch.Generator().manual_seed(4)),
    "padding": lambda n: (torch.arange(n) < n - 7).view(1, 1, 1, n),
    "padding, additive": lambda n: torch.where(torch.arange(n) < n - 7, 0.0, -torch.inf).view(1, 1, 1, n),
}


@pytest.mark.parametrize("backend", ["REFERENCE", "TORCH_SDPA"])
@pytest.mark.parametrize("name", MASKS)
def test_case_10_masks_are_honoured(make_site, backend, name):
    q, k, v = tensors()
    mask = MASKS[name](q.shape[1])
    if mask.dtype == torch.bool:
        mask[..., 0] = True
    out = make_site(backend)(unused, (q, k, v), {"heads": HEADS, "mask": mask})
    as_four = mask if mask.ndim == 4 else mask.view(1, 1, *mask.shape[-2:])
    assert error(out, exact(q, k, v, mask=as_four)) < 1e-5


@pytest.mark.parametrize("backend", ["REFERENCE", "TORCH_SDPA"])
def test_case_11_scale_and_grouped_heads(make_site, backend):
    q, k, v = tensors(heads=4)
    k, v = (x[..., : 2 * DIM] for x in (k, v))
    out = make_site(backend)(unused, (q, k, v), {"heads": 4, "scale": 0.5, "enable_gqa": True})
    assert error(out, exact(q, k, v, heads=4, key_heads=2, scale=0.5)) < 1e-5


@pytest.mark.parametrize("options", [{}, {"threshold": 1.5}, {"quant": "int8"}, {"threshold": 1.5, "quant": "fp8_e4m3"}])
def test_case_14_a_batch_of_two_equals_two_calls(make_site, options):
    site = make_site(**options)
    first, second = tensors(length=300, seed=1), tensors(length=300, seed=2)
    both = site(unused, tuple(torch.cat(pair) for pair in zip(first, second)), {"heads": HEADS})
    for row, one in zip(both, (first, second)):
        assert error(row[None], site(unused, tuple(one), {"heads": HEADS}).double()) < 1e-6


@pytest.mark.parametrize("skip_output_reshape", [False, True])
def test_heads_first_layout_in_and_out(make_site, skip_output_reshape):
    q, k, v = tensors()
    heads_first = [x.view(1, -1, HEADS, DIM).transpose(1, 2) for x in (q, k, v)]
    keywords = {"heads": HEADS, "skip_reshape": True, "skip_output_reshape": skip_output_reshape}
    out = make_site()(unused, tuple(heads_first), keywords)
    if skip_output_reshape:
        assert out.shape == (1, HEADS, 40, DIM)
        out = out.transpose(1, 2).flatten(2)
    assert error(out, exact(q, k, v)) < 1e-5


def test_positional_arguments_of_every_kind(make_site):
    q, k, v = tensors()
    mask = MASKS["4-D additive"](40)
    out = make_site()(unused, (q, k, v, HEADS, mask), {})
    assert error(out, exact(q, k, v, mask=mask)) < 1e-5


def test_case_08_a_kernel_that_raises_leaves_the_run_to_comfyui(make_site, caplog):
    site = make_site()
    q, k, v = tensors()
    site(unused, (q, k, v), {"heads": HEADS})
    ((plan, _),) = site._plans.values()

    def broken(call):
        raise RuntimeError("illegal instruction")

    object.__setattr__(plan.dense, "compute", broken)
    expected = exact(q, k, v)
    with caplog.at_level(logging.WARNING, "trtllm_attention"):
        for _ in range(5):
            assert site(lambda: expected, (q, k, v), {"heads": HEADS}) is expected
    assert caplog.text.count("illegal instruction") == 1


class Container:
    """As in later ComfyUI versions."""

    def __init__(self, tensor):
        self.tensor = tensor

    def peek(self):
        return self.tensor

    def take(self):
        tensor, self.tensor = self.tensor, None
        return tensor


@pytest.mark.parametrize("held_in", [Container, lambda tensor: tensor])
def test_a_kernel_that_raised_keeps_no_tensor(make_site, held_in):
    """Neither the exception nor a cycle of its frames holds them: a GPU's memory waits for no collection."""

    def forward_of_a_model(site):
        containers = tuple(held_in(x) for x in tensors())
        q = containers[0]
        seen.append(weakref.ref(q.peek() if isinstance(q, Container) else q))
        del q
        return site(lambda: "stock", containers, {"heads": HEADS})

    seen, site = [], make_site()
    plan, _ = site._plan(torch.device("cpu"), DIM, torch.float32, False, "none", None)
    object.__setattr__(plan.dense, "compute", lambda call: 1 / 0)
    gc.disable()
    try:
        try:
            assert forward_of_a_model(site) == "stock"
        except ZeroDivisionError:
            assert held_in is Container  # nothing is left to compute with
        assert seen[0]() is None
    finally:
        gc.enable()


def test_a_container_is_emptied_as_it_is_read(make_site):
    q, k, v = tensors()
    containers = tuple(Container(x) for x in (q, k, v))
    out = make_site()(unused, containers, {"heads": HEADS})
    assert error(out, exact(q, k, v)) < 1e-5
    assert all(c.tensor is None for c in containers)


def test_an_unnamed_model_gets_the_safe_role(submodule):
    install = submodule("nodes.hook.install")

    class Run:
        class clock:
            context_length = 77

    q, context = torch.zeros(1, 40, 8), torch.zeros(1, 77, 8)
    assert install._safe_role((q, q, q, 2), {}, Run) == "self"
    assert install._safe_role((q, context, context, 2), {}, Run) == "unknown"
    assert install._safe_role((context, context, context, 2), {}, Run) == "unknown"
    assert install._published_layer({"block_type": "double", "block_index": 3}) == "double_blocks.3"
    assert install._published_layer({}) == "unknown"


def test_normalized_time_of_every_kind_of_schedule(comfyui, submodule):
    import comfy.model_sampling as ms

    clock = submodule("nodes.hook.clock")

    def sampling(schedule, prediction):
        return type("Sampling", (schedule, prediction), {})(None)

    flow = sampling(ms.ModelSamplingDiscreteFlow, ms.CONST)
    assert clock.normalized_timestep(flow, torch.tensor([0.25])) == pytest.approx(0.25)
    eps = sampling(ms.ModelSamplingDiscrete, ms.EPS)
    assert clock.normalized_timestep(eps, eps.sigma_max) == pytest.approx(1.0)
    assert clock.normalized_timestep(eps, eps.sigma_min) == pytest.approx(0.0)
    cosmos = sampling(ms.ModelSamplingCosmosRFlow, ms.COSMOS_RFLOW)
    assert clock.normalized_timestep(cosmos, torch.tensor(3.0)) == pytest.approx(0.75)
    assert clock.normalized_timestep(object(), torch.tensor(3.0)) is None


def test_steps_are_found_by_sigma(submodule):
    step_of = submodule("nodes.hook.clock").step_of
    schedule = (1.0, 0.8, 0.5, 0.0)
    assert [step_of(s, schedule) for s in (1.0, 0.9, 0.8, 0.65, 0.5, 0.1)] == [0, 0, 1, 1, 2, 2]
    assert step_of(0.7, ()) == 0


def test_case_20_a_backend_that_failed_in_one_layer_is_not_tried_in_another(make_site, submodule):
    site = make_site()
    other = submodule("nodes.hook.override").LayerAttention(site.run, "blocks.1.self_attn", "self", site.settings, False)
    q, k, v = tensors()
    other(unused, (q, k, v), {"heads": HEADS})
    site(unused, (q, k, v), {"heads": HEADS})
    ((plan, _),) = site._plans.values()
    attempts = []

    def broken(call):
        attempts.append(call)
        raise RuntimeError("no kernel image")

    object.__setattr__(plan.dense, "compute", broken)
    for layer in (site, other, site, other):
        assert layer(lambda: "stock", (q, k, v), {"heads": HEADS}) == "stock"
    assert len(attempts) == 1
    assert site.run.stats.declined["REFERENCE failed"] == 4


def test_a_gate_without_a_known_time_is_dense_and_said_once(make_site, caplog, submodule):
    site = make_site(threshold=0.5)
    wires, specs = submodule("nodes.wires"), submodule("trtllm_core.specs")
    skip = wires.SkipSoftmax(specs.SkipSoftmaxSpec(threshold=0.5, disabled_until_timestep=0.9))
    site.run.default = wires.RoleSettings.of("REFERENCE", None, skip)
    with caplog.at_level(logging.WARNING, "trtllm_attention"):
        for _ in range(3):
            site.run.tick(object(), torch.tensor([3.0]))
    assert caplog.text.count("cannot tell the time") == 1


def test_skip_softmax_that_was_never_in_effect_is_said(make_site, caplog):
    site = make_site(threshold=0.5)
    site.ignored = True
    q, k, v = tensors()
    site(unused, (q, k, v), {"heads": HEADS})
    with caplog.at_level(logging.WARNING, "trtllm_attention"):
        site.run.finish(completed=True)
    assert caplog.text.count("Skip-Softmax was not in effect") == 1


def test_each_kind_of_call_keeps_its_own_refusal(make_site):
    site = make_site(backend="auto")
    real = site.run.plan_role

    def refuse_masks(role, head_dim, dtype, gqa, mask, *device):
        if mask == "any":
            return _refusing(real)(role, head_dim)
        return real(role, head_dim, dtype, gqa, mask, *device)

    site.run.plan_role = refuse_masks
    q, k, v = tensors()
    mask = MASKS["4-D additive"](40)
    for _ in range(2):  # a masked cond and an uncond without, in turn
        assert site(lambda: "stock", (q, k, v), {"heads": HEADS, "mask": mask}) == "stock"
        site(unused, (q, k, v), {"heads": HEADS})
    ((reason, calls),) = site.run.stats.declined.items()
    assert "head size 64 is not one of" in reason and calls == 2


def test_a_call_with_gradients_is_left_to_comfyui(make_site):
    site = make_site(threshold=0.5)
    q, k, v = tensors()
    v.requires_grad_(True)
    assert site(lambda: "stock", (q, k, v), {"heads": HEADS}) == "stock"
    with torch.no_grad():
        site(unused, (q, k, v), {"heads": HEADS})
    with torch.inference_mode():
        site(unused, (q, k, v), {"heads": HEADS})
    assert sum(site.run.stats.declined.values()) == 1


def test_a_kernel_that_raises_on_tensors_given_by_name(make_site):
    site = make_site()
    q, k, v = tensors()
    named = {"q": q, "k": k, "v": v, "heads": HEADS}
    assert error(site(unused, (), named), exact(q, k, v)) < 1e-5
    ((plan, _),) = site._plans.values()
    object.__setattr__(plan.dense, "compute", lambda call: 1 / 0)
    assert site(lambda: "stock", (), named) == "stock"


def test_another_gpu_than_the_runs_gets_a_plan_of_its_own(make_site, submodule, monkeypatch):
    devices = submodule("trtllm_core.device")
    site = make_site()
    site.run.device = devices.Device("cuda", (8, 9), "first", index=0)
    second = devices.Device("cuda", (8, 6), "second", index=1)
    monkeypatch.setattr(devices, "_describe", lambda kind, index: second)
    planned = []
    site.run.plan_role = lambda role, head_dim, dtype, gqa, mask, device: planned.append(device)
    monkeypatch.setattr(submodule("nodes.hook.run"), "_identity", lambda decided: ())
    for index in (0, 1, 1, 0):
        site._plan(torch.device("cuda", index), 64, torch.float16, False, "none", None)
    assert planned == [site.run.device, second]


def test_case_20_a_library_that_cannot_be_imported_is_tried_once_for_all_layers(make_site, submodule, monkeypatch):
    site = make_site(backend="auto")
    backends = submodule("trtllm_core.backends")
    attempts = []

    def cannot_load(device):
        attempts.append(device)
        raise backends.Unavailable("FLASH_ATTN", ("undefined symbol",))

    monkeypatch.setattr(submodule("trtllm_core.backends.flash_attn"), "load", cannot_load)
    monkeypatch.setattr(submodule("trtllm_core.api"), "self_check", lambda *args: None)
    packages = {"flash-attn": "2.8.3"}
    site.run.device = submodule("trtllm_core.device").Device("cuda", (8, 9), "imagined", packages=packages)
    layer = submodule("nodes.hook.override").LayerAttention
    q, k, v = (x.half() for x in tensors())
    for number in range(5):
        other = layer(site.run, f"blocks.{number}.self_attn", "self", site.settings, False)
        assert error(other(unused, (q, k, v), {"heads": HEADS}), exact(q, k, v)) < 1e-2
    assert site.run.stats.calls == 5 and len(attempts) == 1


def test_the_benchmark_of_the_patch_itself_runs():
    script = location.ROOT / "benchmarks" / "hook_overhead.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0 and "added by the patch" in done.stdout, done.stderr[-2000:]
