"""Calibration: reading a model's curve, and making one by counting in an ordinary run."""

from __future__ import annotations

import logging
import os
import weakref
from dataclasses import dataclass
from pathlib import Path

import folder_paths
from comfy_api.latest import io, ui

from ..trtllm_core.backends import Unavailable
from ..trtllm_core.calibration import Calibration
from ..trtllm_core.device import Device
from ..trtllm_core.gate import TimestepGate
from ..trtllm_core.layer_names import COMPONENTS
from ..trtllm_core.selector import select
from ..trtllm_core.skip_rule import TOKEN_ORDERS, SkipRule, skip_rule
from ..trtllm_core.specs import AttentionSpec, SkipSoftmaxSpec, one_of
from .calibration_picture import draw
from .calibration_use import model_name
from .hook.counting import CountingRun
from .hook.install import install
from .hook.layers import find_layers
from .schema import CalibrationRunType, CalibrationType, GateType, IgnoreType, schema
from .status import show

log = logging.getLogger("trtllm_attention")

FOLDER = "skip_softmax"
MODELOPT = "modelopt"
NO_FILE = "(none)"

folder_paths.add_model_folder_path(FOLDER, os.path.join(folder_paths.models_dir, FOLDER))


@dataclass
class CalibrationRun:
    """TRTLLM_CALIBRATION_RUN: the counting run of one patched model, and what it counts in."""

    run: CountingRun
    model: str
    layers: tuple[str, ...]
    ignore: tuple[str, ...]

    def __deepcopy__(self, memo):
        return self


class TRTLLMLoadCalibration(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            "TRTLLMLoadCalibration",
            "Load Calibration",
            "Reads a model's Skip-Softmax curve: one of your own, or that of a checkpoint that "
            "NVIDIA ModelOpt calibrated.",
            search_aliases=("skip softmax calibration", "modelopt", "target sparsity"),
            inputs=[
                io.Combo.Input(
                    "name",
                    options=_files(),
                    tooltip=f"A file in models/{FOLDER}. Not read when path is set.",
                ),
                io.Combo.Input(
                    "component",
                    options=list(COMPONENTS),
                    tooltip="Which of a checkpoint's models the curve is for. Wan 2.2: transformer "
                    "is the high noise model, transformer_2 the low noise model.",
                ),
                io.String.Input(
                    "path",
                    default="",
                    tooltip="Or: a config.json, a .safetensors file, or a checkpoint's folder with "
                    "transformer/ (and transformer_2/) in it.",
                ),
            ],
            outputs=[CalibrationType.Output(display_name="calibration")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, name, component):
        return True  # a saved name that this machine lacks loads; running it says what is missing

    @classmethod
    def fingerprint_inputs(cls, name, component, path=""):
        files = [file for file in _sources(_source(name, path)) if file.is_file()]
        return [(str(file), file.stat().st_mtime_ns) for file in files]

    @classmethod
    def execute(cls, name, component, path="") -> io.NodeOutput:
        source = _source(name, path)
        if source is None:
            raise ValueError(
                f"choose a file in models/{FOLDER}, or set path. "
                f"{name!r} is not there; there is: {', '.join(_files())}"
            )
        calibration = Calibration.load(source, component)
        text = describe(calibration)
        if calibration.is_absent:
            log.warning(text)
        show(cls.hidden.unique_id, text)
        return io.NodeOutput(calibration, ui={"text": [text], "curve": curve(calibration)})


class TRTLLMCalibrate(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            "TRTLLMCalibrate",
            "Calibrate",
            "Lets the model sample dense and counts how many tiles Skip-Softmax would skip at 22 "
            "thresholds. Sample with it as usual: prompts, seeds and sizes like those that the curve "
            "is for; every run adds to the counts. Save Calibration makes the curve.",
            search_aliases=("skip softmax calibration", "modelopt", "target sparsity"),
            inputs=[
                io.Model.Input("model", tooltip="The model to calibrate; no Attention Patch after it."),
                io.Combo.Input(
                    "count_as",
                    options=[*TOKEN_ORDERS, MODELOPT],
                    default=TOKEN_ORDERS[0],
                    tooltip="cubes, sequential: as this GPU's kernel skips with the Attention "
                    "Patch's token_order of that name. modelopt: 128x128 tiles in the model's "
                    "order, as ModelOpt counts for vLLM-Omni and TensorRT-LLM.",
                ),
                IgnoreType.Input(
                    "ignore", optional=True, tooltip="Layers that will stay dense: not counted."
                ),
                GateType.Input(
                    "gate",
                    optional=True,
                    tooltip="The gate that Skip-Softmax will run with: steps that it keeps dense are "
                    "not counted.",
                ),
            ],
            outputs=[
                io.Model.Output(display_name="MODEL"),
                CalibrationRunType.Output(display_name="calibration_run"),
            ],
            hidden=[io.Hidden.unique_id],
            not_idempotent=True,  # the model writes to this very node, so another may not take it from the cache
        )

    @classmethod
    def execute(cls, model, count_as=TOKEN_ORDERS[0], ignore=None, gate=None) -> io.NodeOutput:
        one_of("count_as", count_as, (*TOKEN_ORDERS, MODELOPT))
        device = Device.current(model.load_device)
        layers = find_layers(model.get_model_object("diffusion_model"))
        sizes = [layer.head_dim for layer in layers if "self" in layer.roles]
        rule = SkipRule()
        if count_as != MODELOPT:
            rule = _rule_here(device, sizes[0] if sizes else None, count_as)
        patterns = ignore.patterns if ignore else ()
        until = gate.gate if gate else TimestepGate()
        run = CountingRun(device, rule, patterns, until, cls.hidden.unique_id)
        names = tuple(layer.name for layer in layers)
        handle = CalibrationRun(run, model_name(model), names, patterns)
        show(cls.hidden.unique_id, f"counts {rule}")
        return io.NodeOutput(install(model, run), handle)


class TRTLLMSaveCalibration(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            "TRTLLMSaveCalibration",
            "Save Calibration",
            "Fits ModelOpt's curve to what Calibrate counted and saves it as ModelOpt's JSON.",
            search_aliases=("skip softmax calibration", "modelopt", "target sparsity"),
            inputs=[
                CalibrationRunType.Input("run", tooltip="From Calibrate."),
                io.Latent.Input("samples", tooltip="From the sampler, so that this runs after it."),
                io.String.Input(
                    "filename",
                    default="calibration",
                    tooltip=f"Name of the file in models/{FOLDER}; a calibration of the same model "
                    "there is replaced.",
                ),
            ],
            outputs=[
                CalibrationType.Output(display_name="calibration"),
                io.Image.Output(display_name="preview"),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, filename):
        try:
            _target(filename)
        except ValueError as error:
            return str(error)  # before an hour of sampling, not after it
        return True

    @classmethod
    def execute(cls, run, samples, filename) -> io.NodeOutput:
        target = _target(filename)
        points = run.run.counts.points()
        if not points:
            raise ValueError(
                "nothing was counted: sample with Calibrate's MODEL, with no Attention Patch or "
                "second Calibrate after it (the last one on a wire is the one that counts), and with an "
                "ignore list and a gate that leave something to count"
            )
        _refuse_to_replace(target, run)
        calibration = fit(run)
        calibration.save(target)
        _saved_by[target] = weakref.ref(run)
        place = os.path.join(FOLDER, os.path.relpath(target, folder_paths.get_folder_paths(FOLDER)[0]))
        text = f"{run.run.summary()}\n{describe(calibration)}\nsaved as {place}"
        log.info(text)
        show(cls.hidden.unique_id, text)
        title = f"{run.model}: threshold = {calibration.a:.4g} exp({calibration.b:.4g} s) / keys"
        title += f", R squared {calibration.notes['r_squared']:.2f}"
        picture = draw(points, calibration, title)
        preview = ui.PreviewImage(picture, cls=cls).as_dict()
        return io.NodeOutput(calibration, picture, ui={**preview, "text": [text], "curve": curve(calibration)})


def fit(run: CalibrationRun) -> Calibration:
    """The curve of all runs so far, noted with where it comes from.

    Layers that were not counted, such as cross-attention, are saved as layers to leave dense.
    """
    counts, rule = run.run.counts, run.run.counts.rule
    counted = set(counts.layers)
    uncounted = tuple(name for name in run.layers if name not in counted)
    notes = {
        "model": run.model,
        "tile": list(rule.tile),
        "kv_order": rule.kv_order,
        "token_order": rule.token_order,
        "counted_until_timestep": run.run.gate.disabled_until_timestep,
        "runs": counts.runs,
        "steps": run.run.steps,
        "grids": sorted(list(grid) for grid in run.run.grids),
        "key_lengths": list(counts.key_lengths),
    }
    return Calibration.fit(counts.points(), ignore=(*run.ignore, *uncounted), notes=notes)


def curve(calibration: Calibration) -> list[float]:
    """a and b of the curve, for the frontend; empty where there is none."""
    return [] if calibration.is_absent else [calibration.a, calibration.b]


def describe(calibration: Calibration) -> str:
    """A calibration in a few lines: what it gives, and what it says but is not applied."""
    notes = calibration.notes
    if calibration.is_absent:
        return notes["absent"]
    lines = [
        f"λ = {calibration.a:.6g} * exp({calibration.b:.4g} * target_sparsity) / keys",
        f"{len(calibration.ignore)} layer patterns stay dense; {calibration.component}",
        f"counted with {calibration.rule}",
    ]
    if "r_squared" in notes:
        low, high = notes["observed_sparsity"]
        lines.append(
            f"R squared {notes['r_squared']:.3f}, {notes['points_kept']} points from {low:.0%} to {high:.0%}"
        )
    for key in ("target_sparsity", "disabled_until_timestep"):
        if key in notes:
            lines.append(f"the checkpoint suggests {key} {notes[key]} (not applied)")
    for key in ("model", "producer", "grids", "steps"):
        if key in notes:
            lines.append(f"{key}: {notes[key]}")
    return "\n".join(lines)


def _rule_here(device: Device, head_dim: int | None, token_order: str) -> SkipRule:
    """The rule of the backend that Skip-Softmax would use on this machine; ModelOpt's without one."""
    spec = AttentionSpec(skip_softmax=SkipSoftmaxSpec(threshold=0.01))
    try:
        backend = select(spec, device, head_dim=head_dim, role="self").backend
    except Unavailable:
        return SkipRule()
    return skip_rule(backend, device, head_dim, token_order) or SkipRule()


def _files() -> list[str]:
    names = folder_paths.get_filename_list(FOLDER)
    return [NO_FILE, *(n for n in names if n.endswith((".json", ".safetensors")))]


def _source(name: str, path: str) -> Path | None:
    if path.strip():
        return Path(path.strip()).expanduser()
    found = folder_paths.get_full_path(FOLDER, name)
    return None if found is None else Path(found)


def _sources(source: Path | None) -> list[Path]:
    """The files whose change changes what `source` holds."""
    if source is None:
        return []
    return [source, *(source / c / "config.json" for c in COMPONENTS), source / "config.json"]


def _target(filename: str) -> Path:
    folder = Path(folder_paths.get_folder_paths(FOLDER)[0]).resolve()
    name = filename.strip().removesuffix(".json")
    target = (folder / f"{name}.json").resolve()
    if not name or not target.is_relative_to(folder) or target == folder:
        raise ValueError(f"filename={filename!r} must name a file inside models/{FOLDER}")
    return target


# which run's curve this process wrote last into a file
_saved_by: dict[Path, weakref.ref[CalibrationRun]] = {}


def _refuse_to_replace(target: Path, run: CalibrationRun) -> None:
    """Raise where saving would lose another model's curve, or the other expert's of one graph."""
    other = _saved_by[target]() if target in _saved_by else None
    if other is not None and other is not run:
        raise ValueError(
            f"{target} holds the curve of another Calibrate node: choose another filename "
            f"(Wan 2.2's two models need a file each)"
        )
    there = Calibration.load(target).notes.get("model") if target.exists() else run.model
    if there != run.model:
        raise ValueError(
            f"{target} holds a calibration of {there or 'unknown origin'}, not of {run.model}: "
            f"choose another filename"
        )
