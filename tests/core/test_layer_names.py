"""Layer names: ComfyUI's and Diffusers' names of one layer, and the patterns that select them."""

import pytest

from trtllm_core import layer_names
from trtllm_core.layer_names import LayerPatterns, aliases, matches, names_elsewhere

# (family, ComfyUI's module path, Diffusers' name), read from both sources
SAME_LAYER = [
    ("Wan self", "blocks.7.self_attn", "blocks.7.attn1"),
    ("Wan cross", "blocks.12.cross_attn", "blocks.12.attn2"),
    ("Wan VACE", "vace_blocks.3.self_attn", "vace_blocks.3.attn1"),
    ("Wan Animate", "face_adapter.fuser_blocks.2", "face_adapter.2"),
    ("HunyuanVideo double", "double_blocks.0", "transformer_blocks.0.attn"),
    ("HunyuanVideo single", "single_blocks.39", "single_transformer_blocks.39.attn"),
    (
        "HunyuanVideo refiner",
        "txt_in.individual_token_refiner.blocks.1.self_attn",
        "context_embedder.token_refiner.refiner_blocks.1.attn",
    ),
    (
        "HunyuanVideo refiner block",
        "txt_in.individual_token_refiner.blocks.1",
        "context_embedder.token_refiner.refiner_blocks.1.attn",
    ),
    ("Flux double", "double_blocks.18", "transformer_blocks.18"),
    ("Flux single", "single_blocks.5", "single_transformer_blocks.5"),
    ("Qwen-Image", "transformer_blocks.59.attn", "transformer_blocks.59.attn"),
    ("LTX", "transformer_blocks.4.attn1", "transformer_blocks.4.attn1"),
    ("LTX-2", "transformer_blocks.4.audio_to_video_attn", "transformer_blocks.4.audio_to_video_attn"),
    ("Cosmos Predict1 self", "blocks.block6.blocks.0.block.attn", "transformer_blocks.6.attn1"),
    ("Cosmos Predict1 cross", "blocks.block6.blocks.1.block.attn", "transformer_blocks.6.attn2"),
    ("Cosmos Predict2", "blocks.6.self_attn", "transformer_blocks.6.attn1"),
]
IDS = [row[0] for row in SAME_LAYER]


@pytest.mark.parametrize("family, comfy, diffusers", SAME_LAYER, ids=IDS)
def test_both_names_select_the_layer_either_way(family, comfy, diffusers):
    for layer in (comfy, f"diffusion_model.{comfy}"):
        for pattern in (comfy, diffusers):
            for prefix in ("", "diffusion_model.", "transformer.", "transformer_2."):
                assert matches(prefix + pattern, layer), (prefix + pattern, layer)


@pytest.mark.parametrize("family, comfy, diffusers", SAME_LAYER, ids=IDS)
def test_no_alias_belongs_to_another_layer_number(family, comfy, diffusers):
    numbers = {part for part in comfy.replace("block6", "block.6").split(".") if part.isdigit()}
    for name in aliases(comfy):
        last = [p for p in name.replace("block6", "block.6").split(".") if p.isdigit()]
        assert set(last) <= numbers, name


@pytest.mark.parametrize(
    "pattern, selected",
    [
        ("blocks.0.self_attn", ["blocks.0.self_attn"]),
        ("blocks.0.attn1", ["blocks.0.self_attn"]),
        ("transformer.blocks.*.attn1", ["blocks.0.self_attn", "blocks.10.self_attn"]),
        ("blocks.0*", ["blocks.0.self_attn", "blocks.0.cross_attn"]),
        ("blocks.0", ["blocks.0.self_attn", "blocks.0.cross_attn"]),
        ("blocks.1", []),
        ("*.attn2", ["blocks.0.cross_attn", "blocks.10.cross_attn"]),
        ("blocks.[!0].*", []),
        ("BLOCKS.0.attn1", []),
        ("attn1", []),
    ],
)
def test_patterns_over_wan_layers(pattern, selected):
    layers = [f"blocks.{n}.{kind}_attn" for n in (0, 10) for kind in ("self", "cross")]
    assert [layer for layer in layers if matches(pattern, layer)] == selected


@pytest.mark.parametrize(
    "pattern, selected",
    [
        ("double_blocks.?", ["double_blocks.0", "double_blocks.3"]),
        ("transformer_blocks.0*", ["double_blocks.0"]),
        ("transformer_blocks.1*", ["double_blocks.10"]),
        ("single_transformer_blocks.*", ["single_blocks.0"]),
        ("*transformer_blocks.0*", ["double_blocks.0", "single_blocks.0"]),
    ],
)
def test_patterns_over_hunyuan_layers(pattern, selected):
    layers = ["double_blocks.0", "double_blocks.3", "double_blocks.10", "single_blocks.0"]
    assert [layer for layer in layers if matches(pattern, layer)] == selected


def test_a_diffusers_layer_answers_to_comfy_names():
    assert matches("blocks.2.self_attn", "blocks.2.attn1")
    assert matches("double_blocks.2", "transformer.transformer_blocks.2")


def test_ltx_layers_are_not_taken_for_wan():
    assert not matches("blocks.*", "transformer_blocks.4.attn1")


def test_a_known_component_ignores_the_other_ones_names():
    assert matches("transformer_2.blocks.0.attn1", "blocks.0.self_attn")
    assert not matches("transformer_2.blocks.0.attn1", "blocks.0.self_attn", "transformer")
    assert LayerPatterns(["transformer_2.*"], "transformer_2").selects("blocks.0.self_attn")


def test_names_elsewhere_are_what_a_saved_calibration_adds():
    assert "blocks.3.attn1" in names_elsewhere("blocks.3.self_attn")
    assert "transformer_blocks.3.attn" in names_elsewhere("diffusion_model.double_blocks.3")
    assert names_elsewhere("transformer_blocks.3.attn1") == ()  # named alike
    assert names_elsewhere("blocks.*.self_attn") == names_elsewhere("their.own") == ()


def test_unknown_layers_keep_their_name():
    assert aliases("some.new.block")[0] == "some.new.block"
    assert matches("some.*", "diffusion_model.some.new.block")


def test_layer_patterns():
    layers = ["blocks.0.self_attn", "blocks.1.self_attn"]
    patterns = LayerPatterns(["  blocks.0.attn1 ", "", "blocks.9.attn1"])
    assert [patterns.selects(layer) for layer in layers] == [True, False]
    assert patterns.unmatched(layers) == ("blocks.9.attn1",)
    assert LayerPatterns([]).unmatched(layers) == () and not LayerPatterns([]).selects(layers[0])


def test_the_table_can_be_extended(monkeypatch):
    assert not matches("their.3.attn", "stages.3.mixer")
    table = [*layer_names.LAYER_NAMES, ("stages.{n}.mixer", "their.{n}.attn")]
    monkeypatch.setattr(layer_names, "LAYER_NAMES", table)
    assert matches("their.3.attn", "stages.3.mixer")
