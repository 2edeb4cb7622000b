"""A Wan of real shape without its checkpoint, and a clock around the model calls of a run."""

import gc
import importlib
import os
import statistics
import sys
import time

import comfy.sd
import torch
from comfy.ldm.wan.model import WanModel
from comfy.patcher_extension import WrappersMP
from comfy_api.latest import io

SIZES = {
    "tiny": {"dim": 256, "ffn_dim": 512, "num_heads": 2, "num_layers": 2},
    "1.3B": {"dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 30},
    "14B": {"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40},
}
LOADED = {}


class TestRandomWan(io.ComfyNode):
    """Wan 2.1 T2V of real size with random bf16 weights, through ComfyUI's own loader."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TestRandomWan",
            category="testing",
            inputs=[io.Combo.Input("size", options=list(SIZES))],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, size):
        if os.environ.get("TEST_PORTABLE_KERNELS"):
            _without_hopper_kernels()
        if size not in LOADED:
            LOADED.clear()
            gc.collect()
            import comfy.ops

            with torch.device("meta"):
                shapes = WanModel(
                    **SIZES[size], model_type="t2v", dtype=torch.bfloat16, operations=comfy.ops.disable_weight_init
                ).state_dict()
            device = "cuda" if torch.cuda.is_available() else "cpu"
            generator = torch.Generator(device).manual_seed(0)
            state = {name: _weight(name, value.shape, generator, device) for name, value in shapes.items()}
            LOADED[size] = comfy.sd.load_diffusion_model_state_dict(state)
        return io.NodeOutput(LOADED[size])


def _without_hopper_kernels():
    """Make TRITON_ATTN run its portable kernels on a Hopper GPU too."""
    (core,) = (name for name in sys.modules if name.endswith(".trtllm_core"))
    module = importlib.import_module(f"{core}.backends.triton_attn")
    module.kernels = lambda call: module.PORTABLE


def _weight(name, shape, generator, device):
    if len(shape) == 1:
        return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=torch.bfloat16, device=device)
    fan_in = torch.Size(shape[1:]).numel()
    scale = 0.1 if "modulation" in name else fan_in**-0.5
    return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) * scale


class TestStepTimes(io.ComfyNode):
    """Times every model call of the model's runs, with the device finished before and after."""

    times = []
    held = 0

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TestStepTimes",
            category="testing",
            inputs=[io.Model.Input("model")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model):
        model = model.clone()

        def outer_sample(executor, *args, **keywords):
            TestStepTimes.times.clear()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
                TestStepTimes.held = torch.cuda.memory_allocated()
            return executor(*args, **keywords)

        def apply_model(executor, *args, **keywords):
            _wait()
            started = time.perf_counter()
            out = executor(*args, **keywords)
            _wait()
            TestStepTimes.times.append(time.perf_counter() - started)
            return out

        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "test_step_times", outer_sample)
        model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "test_step_times", apply_model)
        return io.NodeOutput(model)


def _wait():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class TestStepTimesReport(io.ComfyNode):
    """Median seconds of a model call after the first; the peak of allocated memory, and what was held before the run."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TestStepTimesReport",
            category="testing",
            is_output_node=True,
            not_idempotent=True,
            inputs=[io.Latent.Input("samples")],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, samples):
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        times = TestStepTimes.times
        median = statistics.median(times[1:] or times)
        memory = {"peak_bytes": [peak], "held_bytes": [TestStepTimes.held]}
        return io.NodeOutput(samples, ui={"seconds": [median], "first": times[:1], **memory})
