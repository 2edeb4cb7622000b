"""ComfyUI's clones of a patched model for further GPUs; here every GPU is the CPU."""

import pytest
import torch
from harness import tiny_models as models

PATH = "blocks.0.cross_attn"
KEY = f"diffusion_model.{PATH}.forward"


@pytest.fixture
def load(comfyui):
    """load() -> a ModelPatcher of a tiny Wan with weights of its own."""
    import comfy.model_patcher as patcher

    if not hasattr(patcher.ModelPatcher, "match_multigpu_clones"):
        pytest.skip("this ComfyUI runs a model on one GPU only")
    cpu = torch.device("cpu")

    def make():
        model = torch.nn.Module()
        model.diffusion_model = models.build("wan_t2v")
        with torch.no_grad():
            model.diffusion_model.get_submodule(PATH).o.weight.mul_(torch.rand(()) + 1)
        made = patcher.ModelPatcher(model, cpu, cpu)
        made.cached_patcher_init = (make, ())
        return made

    return make


@pytest.fixture
def make_run(submodule):
    run, wires = submodule("nodes.hook.run"), submodule("nodes.wires")
    device = submodule("trtllm_core.device").Device.current("cpu")

    def make():
        settings = wires.RoleSettings.of("TORCH_SDPA")
        return run.PatchRun(
            settings, {}, device, token_order="cubes", holder=wires.StatsHolder(), count_tiles=True
        )

    return make


def check(model, run):
    """Call the patched layer of `model`: its own weights, and counted by `run`."""
    module = model.model.diffusion_model.get_submodule(PATH)
    x, context = torch.randn(1, 12, models.DIM), torch.randn(1, 5, models.DIM)
    run.start(torch.tensor([1.0, 0.0]))
    with torch.no_grad():
        out = model.get_model_object(KEY)(x, context, transformer_options={})
        torch.testing.assert_close(out, type(module).forward(module, x, context))
    assert run.stats.calls == 1
    run.finish(completed=True)


def test_every_gpu_computes_with_its_own_weights(load, make_run, submodule):
    install = submodule("nodes.hook.install").install
    run = make_run()
    patched = install(load(), run)
    second = patched.deepclone_multigpu(torch.device("cpu"))  # a clone split node after the patch
    patched.set_additional_models("multigpu", [second])
    for _ in range(3):
        check(patched, run)
        check(second, run)
        sites = len(run.sites)
        patched.match_multigpu_clones()  # at every sampling
        (second,) = patched.get_additional_models_with_key("multigpu")
        assert len(run.sites) == sites


def test_a_patch_after_the_split_reaches_every_gpu(load, make_run, submodule):
    install = submodule("nodes.hook.install").install
    split = load()
    split.set_additional_models("multigpu", [split.deepclone_multigpu(torch.device("cpu"))])
    first, later = make_run(), make_run()
    patched = install(install(split, first), later)
    patched.match_multigpu_clones()
    (second,) = patched.get_additional_models_with_key("multigpu")
    check(patched, later)
    check(second, later)
