"""Calibrated curves: every shape they come in, what they give, the fit, and what is refused."""

import json
import math
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from trtllm_core.calibration import Calibration
from trtllm_core.device import Device
from trtllm_core.skip_rule import SkipRule, skip_rule

numpy = pytest.importorskip("numpy")

# NVIDIA's published Wan 2.2 curve (nvidia/Wan2.2-T2V-A14B-Diffusers-FP8)
A, B = 2822.6209952221557, 4.388250623520793
FORMULA = "a * exp(b * target_sparsity)"
CURVE = {"a": A, "b": B}
GROUP = {"algorithm": "skip_softmax", "threshold_scale_factor": {"formula": FORMULA, "coefficients": CURVE}}


def config(**group):
    return {"sparse_attention_config": {"config_groups": {"group_0": {**GROUP, **group}}}}


def with_factor(**factor):
    return config(threshold_scale_factor={"formula": FORMULA, **factor})


SHAPES = {
    "coefficients": config(),
    "prefill": with_factor(prefill=CURVE, decode={"a": 1, "b": 2}),
    "inline, alias": {
        "sparse_attention_config": {
            "config_groups": {
                "group_0": {
                    "algorithm": "softmax_skip",
                    "threshold_scale_factor": {"formula": FORMULA, **CURVE},
                }
            }
        }
    },
    "no groups": {
        "sparse_attention_config": {"threshold_scale_factor": GROUP["threshold_scale_factor"]}
    },
    "beside another algorithm": {
        "sparse_attention_config": {
            "config_groups": {"group_0": {"algorithm": "sparse_softmax"}, "group_1": GROUP}
        }
    },
    "the block alone": {"config_groups": {"group_0": GROUP}},
    "no formula, no blanks": with_factor(coefficients=CURVE, formula="a*exp(b*target_sparsity)"),
    "inside a whole config.json": {"_class_name": "WanTransformer3DModel", **config()},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape_of_the_block(shape, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(shape))
    for source in (shape, tmp_path / "config.json", str(tmp_path)):
        calibration = Calibration.load(source)
        assert (calibration.a, calibration.b) == (A, B)


@pytest.mark.parametrize("sparsity", [0, 0.25, 0.5, 0.75, 1])
def test_nvidias_wan_curve(sparsity):
    calibration = Calibration.load(config(ignore=["blocks.0.attn1"]))
    factor = A * math.exp(B * sparsity)
    assert calibration.factor("blocks.5.self_attn", sparsity) == pytest.approx(factor, rel=1e-12)
    assert calibration.threshold(sparsity, 75_600) == pytest.approx(factor / 75_600, rel=1e-12)


def test_ignored_layers_stay_dense_under_either_name():
    calibration = Calibration.load(config(ignore=["blocks.0.attn1", "transformer.blocks.39.*"]))
    for layer in ("blocks.0.self_attn", "blocks.0.attn1", "diffusion_model.blocks.39.cross_attn"):
        assert calibration.ignores(layer) and calibration.factor(layer, 0.5) is None
    assert not calibration.ignores("blocks.1.self_attn")
    assert calibration.unmatched(["double_blocks.0"]) == calibration.ignore


def test_notes_are_shown_and_not_applied():
    source = config(targets=["WanAttention"], target_sparsity=0.5, disabled_until_timestep=0.6)
    source["sparse_attention_config"]["producer"] = {"name": "modelopt", "version": "0.45.0"}
    notes = Calibration.load(source).notes
    assert notes["target_sparsity"] == 0.5 and notes["disabled_until_timestep"] == 0.6
    assert notes["producer"] == "modelopt 0.45.0" and notes["targets"] == ["WanAttention"]


def write_safetensors(path, metadata):
    header = json.dumps({"__metadata__": metadata}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    return path


@pytest.mark.parametrize(
    "metadata",
    [
        {"sparse_attention_config": json.dumps(config()["sparse_attention_config"])},
        {"sparse_attention_config": json.dumps(config())},
        {"format": "pt", "config": json.dumps({"transformer": {}, **config()})},
    ],
    ids=["block", "block in its key", "whole config"],
)
def test_safetensors_metadata(metadata, tmp_path):
    calibration = Calibration.load(write_safetensors(tmp_path / "model.safetensors", metadata))
    assert calibration.a == A


@pytest.fixture
def two_experts(tmp_path):
    for component, a in (("transformer", 100.0), ("transformer_2", 200.0)):
        (tmp_path / component).mkdir()
        text = json.dumps(with_factor(coefficients={"a": a, "b": 3.0}))
        (tmp_path / component / "config.json").write_text(text)
    return tmp_path


def test_each_expert_gets_its_own_curve(two_experts):
    high = Calibration.load(two_experts)
    low = Calibration.load(two_experts, component="transformer_2")
    assert (high.a, high.component) == (100, "transformer")
    assert (low.a, low.component) == (200, "transformer_2")
    assert high.components == low.components == ("transformer", "transformer_2")


@pytest.mark.parametrize("missing", ["file", "block"])
def test_a_missing_second_expert_stays_dense(two_experts, missing):
    file = two_experts / "transformer_2" / "config.json"
    file.unlink() if missing == "file" else file.write_text("{}")
    absent = Calibration.load(two_experts, component="transformer_2")
    assert absent.is_absent and absent.components == ("transformer",)
    assert absent.factor("blocks.3.self_attn", 0.5) is absent.threshold(0.5, 1000) is None
    assert "transformer_2" in absent.notes["absent"] and "dense" in absent.notes["absent"]
    with pytest.raises(ValueError, match="no curve to save"):
        absent.save(two_experts / "x.json")


BAD_CONTENT = {
    "truncated": ('{"sparse_attention_config": {"config_', r"line 1 column 30"),
    "not an object": ("[1]", "holds a list"),
    "empty": ("", "line 1 column 1"),
    "binary": ("\udcff\udcfe", "not a JSON file"),
    "foreign": ('{"model_type": "llama"}', "no Skip-Softmax calibration.*skip_softmax.threshold"),
    "another algorithm": (
        json.dumps({"sparse_attention_config": {"config_groups": {"g": {"algorithm": "vsa"}}}}),
        "no Skip-Softmax calibration.*skip_softmax.threshold",
    ),
    "groups of the wrong kind": ('{"config_groups": [1]}', "config_groups must be a JSON object"),
}


@pytest.mark.parametrize("content, message", BAD_CONTENT.values(), ids=BAD_CONTENT)
def test_files_that_hold_no_curve(content, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message):
        Calibration.load(path)


BAD_CURVES = {
    "another formula": (with_factor(coefficients=CURVE, formula="a * target_sparsity ** b"), "formula='a"),
    "formula no string": (with_factor(coefficients=CURVE, formula=3), "formula=3"),
    "no b": (with_factor(coefficients={"a": 1.0}), "has no b"),
    "decode only": (with_factor(decode=CURVE), "has no a and no b"),
    "NaN a": (with_factor(coefficients={"a": math.nan, "b": 1.0}), "coefficients.a=nan"),
    "infinite b": (with_factor(coefficients={"a": 1.0, "b": math.inf}), "coefficients.b=inf"),
    "a zero": (with_factor(prefill={"a": 0, "b": 1.0}), "prefill.a=0 must be"),
    "b negative": (with_factor(a=1.0, b=-2.0), r"threshold_scale_factor.b=-2.0"),
    "a text": (with_factor(coefficients={"a": "1", "b": 1}), "coefficients.a='1'"),
    "a boolean": (with_factor(coefficients={"a": True, "b": 1}), "coefficients.a=True"),
    "one fixed factor": (config(threshold_scale_factor=5000.0), "one fixed factor"),
    "ignore no list": (config(ignore="blocks.0.attn1"), "ignore='blocks.0.attn1'"),
    "two groups": (
        {"config_groups": {"group_0": GROUP, "group_1": GROUP}},
        "group_0 and .*group_1 both",
    ),
    "a bad tile": (
        {"config_groups": {"g": GROUP}, "trtllm_attention": {"tile": [128]}},
        "skip rule tile",
    ),
    "an unknown KV order": (
        {"config_groups": {"g": GROUP}, "trtllm_attention": {"kv_order": "random"}},
        "skip rule kv_order='random'",
    ),
}


@pytest.mark.parametrize("content, message", BAD_CURVES.values(), ids=BAD_CURVES)
def test_curves_that_cannot_be_right(content, message):
    with pytest.raises(ValueError, match=message):
        Calibration.load(content)


def test_sources_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="skip_softmax.threshold"):
        Calibration.load(tmp_path / "none.json")
    with pytest.raises(ValueError, match="no Skip-Softmax calibration.*skip_softmax.threshold"):
        Calibration.load(tmp_path)
    with pytest.raises(ValueError, match="calibration component='vae'"):
        Calibration.load(config(), component="vae")


def test_only_the_second_expert_has_a_curve(two_experts):
    (two_experts / "transformer" / "config.json").unlink()
    with pytest.raises(ValueError, match="has one for transformer_2"):
        Calibration.load(two_experts)


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 2**62) + b"{}"])
def test_broken_safetensors(content, tmp_path):
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="not a safetensors file"):
        Calibration.load(tmp_path / "m.safetensors")


def test_safetensors_without_a_curve(tmp_path):
    with pytest.raises(ValueError, match="no Skip-Softmax calibration"):
        Calibration.load(write_safetensors(tmp_path / "m.safetensors", {"format": "pt"}))


@pytest.mark.parametrize("sparsity", [-0.1, 1.01, 75, math.nan, math.inf, "0.5", True])
def test_requests_outside_the_unit_interval(sparsity):
    with pytest.raises(ValueError, match="target_sparsity="):
        Calibration(A, B).factor(None, sparsity)


def test_a_curve_that_overflows():
    with pytest.raises(ValueError, match="overflows"):
        Calibration(1.0, 5000.0).factor(None, 0.9)


def synthetic(a, b, noise=0.0, low=0.0, high=1.0, count=200):
    g = numpy.random.default_rng(1)
    x = g.uniform(low, high, count)
    return list(zip(x, a * numpy.exp(b * x + noise * g.standard_normal(count)), strict=True))


@pytest.mark.parametrize("noise", [0.0, 0.8])
def test_the_fit_is_numpys_least_squares_on_the_kept_points(noise):
    points = synthetic(50.0, 4.5, noise)
    x, y = numpy.array([p for p in points if 0.1 <= p[0] <= 0.9]).T
    matrix = numpy.stack([numpy.ones_like(x), x], 1)
    (log_a, b), *_ = numpy.linalg.lstsq(matrix, numpy.log(y), rcond=None)
    r_squared = numpy.corrcoef(x, numpy.log(y))[0, 1] ** 2
    calibration = Calibration.fit(points, ignore=["blocks.0.attn1"], notes={"model": "m"})
    assert calibration.a == pytest.approx(numpy.exp(log_a), rel=1e-9)
    assert calibration.b == pytest.approx(b, rel=1e-9)
    notes = calibration.notes
    assert notes["r_squared"] == pytest.approx(r_squared, abs=1e-9)
    assert (notes["points"], notes["points_kept"], notes["model"]) == (200, len(x), "m")
    assert notes["observed_sparsity"] == [pytest.approx(x.min()), pytest.approx(x.max())]


def test_refused_fits():
    for points, message in (
        ([], "0 points are too few"),
        (synthetic(1, 4)[:9], "9 points are too few.*10 are needed"),
        (synthetic(1, 4, low=0.92), "only 0 of 200 points.*92% to 100%"),
        (synthetic(1, -4), "b = -4"),
        ([(0.5, 1.0)] * 20, "b = 0"),
        (synthetic(1, 1, noise=3), "explains too little.*R squared 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            Calibration.fit(points)


def test_a_fit_round_trips_through_its_file_in_a_new_process(tmp_path):
    counted = {"tile": [128, 64], "kv_order": "own_first", "token_order": "cubes"}
    notes = {"model": "WAN21", "steps": 25, **counted}
    fitted = Calibration.fit(synthetic(50, 4.5, 0.1), ignore=["blocks.0.self_attn"], notes=notes)
    path = tmp_path / "deep" / "curve.json"
    fitted.save(path)
    again = Calibration.load(path)
    assert (again.a, again.b) == (fitted.a, fitted.b)
    assert again.rule == SkipRule((128, 64), "own_first", "cubes")
    assert dict(again.notes) == {**fitted.notes, "targets": ["Attention"], "producer": "trtllm-attention"}
    assert again.ignores("blocks.0.attn1") and "blocks.0.attn1" in again.ignore
    code = (
        "import sys; from trtllm_core.calibration import Calibration; "
        "c = Calibration.load(sys.argv[1]); print(c.a, c.b)"
    )
    root = Path(__file__).parents[2]
    output = subprocess.run(
        [sys.executable, "-c", code, path], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    assert [float(x) for x in output.split()] == [fitted.a, fitted.b]


def validate_documented_schema(text):
    """TensorRT-LLM VisualGen's and vLLM-Omni's documented checkpoint shape, as a strict reader."""

    def forbid(value):
        raise AssertionError(f"{value} is not JSON")

    content = json.loads(text, parse_constant=forbid)
    block = content["sparse_attention_config"]
    groups = [g for g in block["config_groups"].values() if g["algorithm"] == "skip_softmax"]
    assert all(name.startswith("group_") for name in block["config_groups"])
    (group,) = groups  # at most one may configure Skip-Softmax
    factor = group["threshold_scale_factor"]
    assert factor["formula"].replace(" ", "") == "a*exp(b*target_sparsity)"
    assert factor.keys() == {"formula", "coefficients"}
    assert factor["coefficients"].keys() == {"a", "b"}
    assert all(type(v) is float and 0 < v < math.inf for v in factor["coefficients"].values())
    known = {"algorithm", "targets", "threshold_scale_factor", "ignore"}
    known |= {"target_sparsity", "disabled_until_timestep"}
    assert group.keys() <= known
    assert all(type(p) is str for p in group.get("ignore", []) + group["targets"])
    assert type(block["producer"]["name"]) is str
    return group


def test_a_saved_file_is_valid_for_the_other_readers(tmp_path):
    path = tmp_path / "curve.json"
    ignore = ["blocks.0.self_attn", "diffusion_model.double_blocks.1", "blocks.3*"]
    Calibration.fit(synthetic(50, 4.5, 0.1), ignore=ignore).save(path, targets=("WanAttention",))
    group = validate_documented_schema(path.read_text())
    assert {*ignore, "blocks.0.attn1", "transformer_blocks.1.attn"} <= set(group["ignore"])
    assert group["targets"] == ["WanAttention"]


def test_saving_keeps_what_the_file_holds_and_never_leaves_half_a_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"num_layers": 40, **config()}))
    Calibration(3.0, 4.0).save(path)
    assert json.loads(path.read_text())["num_layers"] == 40
    assert Calibration.load(path).a == 3
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    path.write_text("{not JSON")
    with pytest.raises(ValueError, match="not valid JSON"):
        Calibration(3.0, 4.0).save(path)
    assert path.read_text() == "{not JSON"
    with pytest.raises(ValueError):  # NaN in a note is not JSON
        Calibration(3.0, 4.0, notes={"x": math.nan}).save(tmp_path / "other.json")
    assert not (tmp_path / "other.json").exists()


CUBES = SkipRule((128, 64), "own_first", "cubes")


def test_the_rule_is_modelopts_unless_the_file_says_otherwise():
    assert Calibration(3.0, 4.0).rule == SkipRule((128, 128), "sequential", "sequential")
    notes = {"tile": [128, 64], "kv_order": "own_first", "token_order": "cubes"}
    assert Calibration(3.0, 4.0, notes=notes).rule == CUBES


@pytest.mark.parametrize(
    "change, message",
    [
        ({}, None),
        ({"used": CUBES}, "counted with 128x128 tiles.*skips by 128x64 tiles.*expect more.*34%.*8%"),
        ({"target_sparsity": 0.2}, "target_sparsity=0.2 lies outside the 30% to 80%"),
        ({"model": "HunyuanVideo"}, "made on WAN21_T2V, this model is HunyuanVideo"),
        ({"layers": ["double_blocks.0"]}, "2 of the 2 layers.*another model's calibration"),
        ({"layers": ["blocks.0.self_attn"]}, "1 of the 2 layers.*blocks.9.attn1"),
    ],
    ids=["none", "rule", "extrapolation", "model", "no layer", "one layer"],
)
def test_warnings_before_a_run(change, message):
    notes = {"model": "WAN21_T2V", "observed_sparsity": [0.3, 0.8]}
    calibration = Calibration(3.0, 4.0, ignore=("blocks.0.attn1", "blocks.9.attn1"), notes=notes)
    usual = {
        "target_sparsity": 0.5,
        "used": SkipRule(),
        "layers": ["blocks.0.self_attn", "blocks.9.self_attn"],
        "model": "WAN21_T2V",
    }
    found = calibration.warnings(**{**usual, **change})
    assert len(found) == (message is not None)
    if message:
        assert re.search(message, found[0]), found


def test_an_absent_expert_warns_that_it_stays_dense(two_experts):
    (two_experts / "transformer_2" / "config.json").unlink()
    absent = Calibration.load(two_experts, component="transformer_2")
    assert absent.warnings(0.5, used=CUBES) == (absent.notes["absent"],)


HOPPER = Device(capability=(9, 0), packages={"triton": "3.6.0"})


@pytest.mark.parametrize(
    "backend, device, head_dim, expected",
    [
        ("REFERENCE", Device(type="cpu"), 128, CUBES),
        ("TRITON_ATTN", Device(capability=(8, 6)), 128, CUBES),
        ("TRITON_ATTN", HOPPER, 128, SkipRule((64, 128), "own_first", "cubes")),
        ("TRITON_ATTN", Device(capability=(9, 0), packages={"triton": "3.5.0"}), 128, CUBES),
        ("FMHA_V2", HOPPER, 128, SkipRule((64, 128), "sequential", "cubes")),
        ("FMHA_V2", HOPPER, 64, SkipRule((64, 256), "sequential", "cubes")),
        ("TRTLLM_ATTN", Device(capability=(10, 0)), 128, SkipRule((128, 128), "sequential", "cubes")),
        ("TORCH_SDPA", HOPPER, 128, None),
    ],
)
def test_the_rule_of_each_backend(backend, device, head_dim, expected):
    assert skip_rule(backend, device, head_dim, "cubes") == expected
    if expected is not None:
        raster = skip_rule(backend, device, head_dim, "sequential")
        assert raster == SkipRule(expected.tile, "sequential", "sequential")
