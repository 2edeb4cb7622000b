"""Timestep Gate: which steps of a schedule stay dense."""

from __future__ import annotations

import comfy.samplers
from comfy_api.latest import io

from ..trtllm_core.gate import TimestepGate
from .hook.clock import normalized_timestep
from .schema import GateType, schema
from .wires import Gate


class TRTLLMTimestepGate(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            "TRTLLMTimestepGate",
            "Timestep Gate",
            "Keeps Skip-Softmax off, attention dense, while the normalized timestep is above the cutoff. "
            "SAGE quantization, if wired, stays on. Wire the model or the sigmas to see how many steps "
            "that are.",
            search_aliases=("sigma", "schedule", "dense steps"),
            inputs=[
                io.Float.Input(
                    "disabled_until_timestep",
                    default=0.9,
                    min=0.0,
                    max=1.0,
                    step=0.001,
                    round=False,
                    tooltip="Dense while t is above this; for flow models t is the sigma. 0: no gate.",
                ),
                io.Int.Input(
                    "steps",
                    default=20,
                    min=1,
                    max=10000,
                    tooltip="The sampler's steps, to count with; changes nothing else.",
                ),
                io.Combo.Input(
                    "scheduler",
                    options=list(comfy.samplers.SCHEDULER_NAMES),
                    default="simple",
                    tooltip="The sampler's scheduler, to count with; changes nothing else.",
                ),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="The sampler's denoise, to count with; changes nothing else.",
                ),
                io.Model.Input(
                    "model", optional=True, tooltip="The model, for its sigmas (shift included)."
                ),
                io.Sigmas.Input(
                    "sigmas", optional=True, tooltip="A schedule, instead of the settings above."
                ),
            ],
            outputs=[
                GateType.Output(display_name="gate"),
                io.Int.Output(display_name="dense_steps"),
            ],
        )

    @classmethod
    def validate_inputs(cls, disabled_until_timestep, scheduler):
        return True

    @classmethod
    def execute(
        cls, disabled_until_timestep, steps, scheduler, denoise, model=None, sigmas=None
    ) -> io.NodeOutput:
        gate = TimestepGate(disabled_until_timestep)
        times = schedule(model, steps, scheduler, denoise, sigmas)
        if times is None:
            text = "wire model or sigmas to see the dense steps"
            return io.NodeOutput(Gate(gate), 0, ui={"text": [text], "timesteps": []})
        dense = gate.dense_steps(times)
        text = f"{dense} of {len(times)} steps dense, {len(times) - dense} with Skip-Softmax"
        return io.NodeOutput(
            Gate(gate),
            dense,
            ui={"text": [text], "timesteps": times, "dense_steps": [dense]},
        )


def schedule(model, steps, scheduler, denoise, sigmas) -> list[float] | None:
    """The normalized timesteps a sampler with these settings calls the model at, or None.

    Without a model, sigmas above 1 have no known meaning and give None.
    """
    sampling = model.get_model_object("model_sampling") if model is not None else None
    if sigmas is None:
        return None if sampling is None else schedule_of(sampling, steps, scheduler, denoise)
    values = [float(s) for s in sigmas[:-1]]
    if sampling is None:
        return values if all(v <= 1 for v in values) else None
    return [normalized_timestep(sampling, v) for v in values]


def schedule_of(sampling, steps, scheduler, denoise) -> list[float] | None:
    """The same for a model's sampling; steps and denoise are combined as KSampler does."""
    if denoise <= 0:
        return None
    total = steps if denoise > 0.9999 else int(steps / denoise)
    sigmas = comfy.samplers.calculate_sigmas(sampling, scheduler, total)[-(steps + 1) :]
    return [normalized_timestep(sampling, float(s)) for s in sigmas[:-1]]
