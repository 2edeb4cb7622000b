"""The example workflows: their API-format twins run, with tiny models in place of the real ones."""

import json

import pytest
from harness.graphs import SAMPLING
from harness.locales import node_defs
from harness.location import ROOT
from harness.trained_wan import FILE as TRAINED

FOLDER = ROOT / "workflows"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
# what needs a text encoder, a VAE or an image, and what only they feed
REPLACED = {
    "CLIPLoader", "DualCLIPLoader", "CLIPVisionLoader", "CLIPVisionEncode", "VAELoader", "LoadImage", "VAEDecode",
    "CreateVideo", "SaveVideo",
}  # fmt: skip
SMALL = {"width": 64, "height": 64, "length": 5}


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_stays_what_it_is_where_runs_are_compared(name):
    workflow = json.loads((FOLDER / f"{name}.json").read_text())
    seeds = [node["widgets_values"] for node in workflow["nodes"] if node["type"].startswith("KSampler")]
    assert all(("fixed" in values) != (name == "wan21_calibrate") for values in seeds)
    if "compare" in name:
        assert len(seeds) == 2 and seeds[0] == seeds[1]


def prompt_of(name):
    return json.loads((FOLDER / "api" / f"{name}.json").read_text())


def kind_of(unet_name):
    if "hunyuanvideo1.5" in unet_name:
        return "hunyuan_15"
    return "wan_i2v" if "i2v" in unet_name else "wan_t2v"


def shrunk(prompt, size=SMALL, steps=4, trained=False):
    """The prompt with tiny models and random conditioning, few steps and a small video."""
    (kind,) = {kind_of(n["inputs"]["unet_name"]) for n in prompt.values() if n["class_type"] == "UNETLoader"}
    latent_class, needs = SAMPLING[kind]
    nodes = {"latent": {"class_type": latent_class, "inputs": {**size, "batch_size": 1}}}
    links = {}  # a replaced output -> what gives the same
    for node_id, node in prompt.items():
        inputs = dict(node["inputs"])
        match node["class_type"]:
            case "UNETLoader":
                inputs["unet_name"] = TRAINED if trained else f"{kind}.safetensors"
            case "CLIPTextEncode":
                node = {**node, "class_type": "TestConditioning"}
                inputs = {"tokens": 24, "seed": int(node_id), **needs}
                if trained:
                    node["class_type"] = "TestTrainedConditioning"
                    inputs = {"count": "1", "colour": "red", "shape": "disc"}
            case "WanImageToVideo":
                links[node_id, 0], links[node_id, 1] = inputs["positive"], inputs["negative"]
                links[node_id, 2] = ["latent", 0]
                continue
            case "VAEDecode":
                links[node_id, 0] = inputs["samples"]
                continue
            case "KSampler" | "TRTLLMTimestepGate":
                inputs["steps"] = steps
            case "KSamplerAdvanced":
                inputs.update(steps=steps, start_at_step=min(inputs["start_at_step"], steps // 2))
                inputs["end_at_step"] = inputs["end_at_step"] if inputs["end_at_step"] > 20 else steps // 2
            case "TRTLLMCompare":
                inputs = {key.replace("images", "samples"): value for key, value in inputs.items()}
            case "TRTLLMAttentionPatch":
                inputs["backend"] = "REFERENCE"  # the one that skips tiles on a CPU
            case latent if latent == latent_class:
                inputs.update(size)
            case replaced if replaced in REPLACED:
                continue
        nodes[node_id] = {**node, "inputs": inputs}
    for node in nodes.values():
        for key, value in node["inputs"].items():
            if isinstance(value, list):
                node["inputs"][key] = links.get(tuple(value), value)
    samplers = [node_id for node_id, node in nodes.items() if node["class_type"].startswith("KSampler")]
    nodes["saved"] = {"class_type": "SaveLatent", "inputs": {"samples": [samplers[-1], 0], "filename_prefix": "twin"}}
    return nodes


@pytest.mark.parametrize("name", NAMES)
def test_a_twin_runs(comfy_server, name):
    prompt = prompt_of(name)
    if name == "wan21_calibrate":
        # the smallest that has tiles to count and layers that are not noise
        prompt = shrunk(prompt, {"width": 256, "height": 256, "length": 29}, steps=2, trained=True)
    else:
        prompt = shrunk(prompt)
    folder = comfy_server.workspace / "models" / "skip_softmax"
    folder.mkdir(parents=True, exist_ok=True)
    for node in prompt.values():
        if node["class_type"] == "TRTLLMLoadCalibration":
            curve = {"threshold_scale_factor": {"a": 2.0, "b": 3.0}}
            (folder / node["inputs"]["name"]).write_text(json.dumps(curve))
    finished = comfy_server.run(prompt)
    assert finished.latent("saved").isfinite().all()
    patches = [node_id for node_id, node in prompt.items() if node["class_type"] == "TRTLLMAttentionPatch"]
    assert all("self: REFERENCE" in finished.ui(node_id)["text"][0] for node_id in patches)
    if name == "wan21_calibrate":
        assert (folder / "wan21_t2v_1.3B.json").exists()
    if name == "wan21_t2v_sage_and_skip_softmax_per_role":
        assert "SAGE int8" in finished.ui(patches[0])["text"][0]


@pytest.mark.parametrize("name", NAMES)
def test_a_workflow_has_notes_groups_a_picture_and_its_twins_values(name):
    workflow, twin = json.loads((FOLDER / f"{name}.json").read_text()), prompt_of(name)
    types = {str(node["id"]): node["type"] for node in workflow["nodes"]}
    assert workflow["groups"] and "MarkdownNote" in types.values()
    assert (FOLDER / f"{name}.jpg").stat().st_size < 300_000
    assert twin == {
        node_id: {**node, "class_type": types[node_id]} for node_id, node in twin.items() if node_id in types
    }
    assert set(types) - set(twin) == {node_id for node_id, kind in types.items() if kind == "MarkdownNote"}


def test_every_node_is_in_a_workflow_or_named_here():
    used = {node["class_type"] for name in NAMES for node in prompt_of(name).values()}
    nodes = {path.stem for path in (ROOT / "web" / "docs").glob("*.md")}
    assert nodes - used == {"TRTLLMAttentionConfig"}


def test_every_node_has_a_help_page_and_every_input_is_in_it(comfy_server):
    for name, info in comfy_server.object_info.items():
        if name.startswith("TRTLLM"):
            page = (ROOT / "web" / "docs" / f"{name}.md").read_text()
            inputs = {**(info["input"].get("required") or {}), **(info["input"].get("optional") or {})}
            assert not [key for key in inputs if key not in page], name


def test_the_english_texts_are_those_of_the_schemas(comfy_server):
    """After a change: python scripts/make_locales.py"""
    texts = json.loads((ROOT / "locales" / "en" / "nodeDefs.json").read_text(encoding="utf-8"))
    assert texts == node_defs(comfy_server.object_info)
