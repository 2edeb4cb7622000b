"""Skip-Softmax: how much of the attention may be left out, and when."""

from __future__ import annotations

from comfy_api.latest import io

from ..trtllm_core.specs import SkipSoftmaxSpec
from .schema import CalibrationType, GateType, IgnoreType, SkipSoftmaxType, schema
from .wires import SkipSoftmax

THRESHOLD, CALIBRATED = "threshold", "calibrated"


class TRTLLMSkipSoftmax(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            "TRTLLMSkipSoftmax",
            "Skip-Softmax (threshold | calibrated)",
            "Skips the softmax and PV of key tiles whose scores are too low to matter.",
            search_aliases=("sparse attention", "blasst", "sparsity"),
            inputs=[
                io.Combo.Input(
                    "mode",
                    options=[THRESHOLD, CALIBRATED],
                    default=THRESHOLD,
                    tooltip="threshold needs nothing else. calibrated aims at a share of skipped "
                    "tiles on a curve measured for this model.",
                ),
                io.Float.Input(
                    "threshold",
                    default=0.01,
                    min=0.0,
                    max=1.0,
                    step=0.0001,  # frontends round to it
                    round=False,
                    tooltip="λ: a tile is skipped when its scores stay below λ of the row maximum. "
                    "0 skips nothing; 0.01 is careful, 0.05 fast.",
                ),
                io.Float.Input(
                    "target_sparsity",
                    default=0.5,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="calibrated: the share of tiles to skip, by the curve, which holds for what was seen (10% to "
                    "90%): 0 is not dense.",
                ),
                CalibrationType.Input(
                    "calibration",
                    optional=True,
                    tooltip="calibrated: the model's curve, from Load Calibration.",
                ),
                GateType.Input(
                    "gate", optional=True, tooltip="Keeps the early, noisy steps dense."
                ),
                IgnoreType.Input("ignore", optional=True, tooltip="Layers that stay dense."),
            ],
            outputs=[SkipSoftmaxType.Output(display_name="skip_softmax")],
        )

    @classmethod
    def validate_inputs(cls, mode, threshold, target_sparsity):
        return True  # out-of-range values are refused by the spec, which names key, value and range

    @classmethod
    def execute(
        cls, mode, threshold, target_sparsity, calibration=None, gate=None, ignore=None
    ) -> io.NodeOutput:
        cutoff = gate.gate.disabled_until_timestep if gate else 0.0
        patterns = ignore.patterns if ignore else ()
        if mode == THRESHOLD:
            spec = SkipSoftmaxSpec(threshold=threshold, disabled_until_timestep=cutoff)
            return io.NodeOutput(SkipSoftmax(spec, ignore=patterns))
        if mode != CALIBRATED:
            raise ValueError(f"mode={mode!r} is not one of {THRESHOLD!r}, {CALIBRATED!r}")
        if calibration is None:
            raise ValueError(
                "mode 'calibrated' needs a calibration of this model on the calibration input: "
                "Load Calibration reads one, Calibrate makes one. Without it use mode 'threshold'."
            )
        spec = SkipSoftmaxSpec(target_sparsity=target_sparsity, disabled_until_timestep=cutoff)
        return io.NodeOutput(SkipSoftmax(spec, calibration, patterns))
