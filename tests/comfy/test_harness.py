"""The harness against the stock ComfyUI, without the pack: later tests rest on it."""

import pytest
import torch
from harness.graphs import SAMPLING, Graph
from harness.server import PromptError

# Attention calls of one model call that carry an override, with 2 blocks (Animate: 5). Not counted:
# calls that ComfyUI 0.3.75 makes without transformer_options, which is all of S2V there.
CALLS = {
    "wan_t2v": 4,
    "wan_i2v": 6,  # and an image cross-attention per block
    "wan_vace": 8,  # 2 more blocks
    "wan_camera": 6,
    "wan_humo": 6,  # and an audio cross-attention per block
    "wan_animate": 15,
    "hunyuan_10": 6,  # 2 double, 2 single, 2 token refiner
    "hunyuan_15": 6,
}


@pytest.mark.parametrize("kind", SAMPLING)
def test_every_tiny_model_samples_through_the_stock_loader(comfy_server, kind):
    graph = Graph()
    sampled = graph.sample(graph.add("TestProbe", model=graph.load(kind), tag=kind), kind, steps=1, cfg=1.0)
    report, saved = graph.add("TestProbeReport", samples=sampled, tag=kind), graph.save(sampled)
    run = comfy_server.run(graph)
    latent = run.latent(saved)
    assert torch.isfinite(latent).all() and latent.std() > 0.1
    if kind in CALLS:
        assert len(run.ui(report)["calls"]) == CALLS[kind]


def test_padding_reaches_hunyuan_as_a_mask(comfy_server):
    graph = Graph()
    model = graph.add("TestProbe", model=graph.load("hunyuan_15"), tag="mask")
    sampled = graph.sample(model, "hunyuan_15", steps=1, cfg=1.0, conditioning={"pad": 8, "byt5_tokens": 0})
    report = graph.add("TestProbeReport", samples=sampled, tag="mask")
    calls = comfy_server.run(graph).ui(report)["calls"]
    assert all(call["mask"] for call in calls)


def test_an_error_names_its_node(comfy_server):
    graph = Graph()
    sampled = graph.sample(graph.load("wan_t2v"), "wan_t2v", conditioning={"width": 100})
    graph.save(sampled)
    with pytest.raises(PromptError, match="KSampler") as caught:
        comfy_server.run(graph)
    assert caught.value.node_id == sampled.id and not caught.value.refused


def test_a_refused_prompt_names_its_node(comfy_server):
    graph = Graph()
    loader = graph.load("no_such_file.safetensors")
    graph.save(graph.sample(loader, "wan_t2v"))
    with pytest.raises(PromptError, match="no_such_file") as caught:
        comfy_server.run(graph)
    assert caught.value.node_id == loader.id and caught.value.refused


def test_nothing_of_a_stock_run_stays_alive(comfy_server):
    graph = Graph()
    graph.save(graph.sample(graph.add("TestWatchStorages", model=graph.load("wan_t2v")), "wan_t2v", seed=11))
    comfy_server.run(graph)
    after = Graph()
    report = after.add("TestMemoryReport")
    ui = comfy_server.run(after).ui(report)
    assert ui["watched"][0] > 50 and ui["alive"] == [0]
