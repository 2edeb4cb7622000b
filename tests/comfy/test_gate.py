"""Skip-Softmax by sigma and by layer, in real sampling."""

import pytest
from patched import plain, run

LAYER = "blocks.0.self_attn"
SHIFTED = {"shift": 8.0, "sampling": {"steps": 3, "cfg": 1.0}}  # sigmas 1, .941, .8


@pytest.mark.parametrize(
    "cutoff, sparse",
    [(0.9, [False, False, True]), (1.0, [True, True, True]), (0.0, [True, True, True])],
)
def test_the_gate_follows_the_schedule(comfy_server, cutoff, sparse):
    outcome = run(comfy_server, "wan_t2v", threshold=0.5, gate=cutoff, **SHIFTED)
    assert outcome.sparse_steps(LAYER) == dict(enumerate(sparse))
    times = {site["step"]: site["timestep"] for site in outcome.sites}
    assert times == pytest.approx({0: 1.0, 1: 0.941, 2: 0.8}, abs=1e-3)


def test_heun_counts_by_sigma_and_not_by_calls(comfy_server):
    sampling = {"steps": 3, "cfg": 1.0, "sampler": "heun"}
    outcome = run(comfy_server, "wan_t2v", threshold=0.5, gate=0.9, shift=8.0, sampling=sampling)
    sites = [site for site in outcome.sites if site["layer"] == LAYER]
    # two model calls a step: at the step's sigma and at the next one, which belongs to the next step
    assert {site["step"]: site["calls"] for site in sites} == {0: 1, 1: 2, 2: 2}
    assert outcome.sparse_steps(LAYER) == {0: False, 1: False, 2: True}


def test_context_windows_are_gated_by_sigma(comfy_server):
    windows = ("WanContextWindowsManual", dict(
        context_length=17, context_overlap=5, context_schedule="standard_static", context_stride=1, closed_loop=False,
        fuse_method="pyramid", freenoise=False, retain_first_frame=False, cond_retain_index_list="",
        split_conds_to_windows=False, latent_retain_index_list=""))  # fmt: skip
    sampling = {"steps": 3, "cfg": 1.0, "length": 33}
    outcome = run(comfy_server, "wan_t2v", threshold=0.5, gate=0.9, shift=8.0, after=[windows], sampling=sampling)
    sites = [site for site in outcome.sites if site["layer"] == LAYER]
    assert all(site["calls"] > 1 for site in sites)
    assert outcome.sparse_steps(LAYER) == {0: False, 1: False, 2: True}


@pytest.mark.parametrize(
    "kind, patterns, ignored",
    [
        ("wan_t2v", "blocks.0.self_attn", {"blocks.0.self_attn"}),
        ("wan_t2v", "blocks.0.attn1", {"blocks.0.self_attn"}),
        ("wan_t2v", "transformer.blocks.*.attn1", {"blocks.0.self_attn", "blocks.1.self_attn"}),
        ("hunyuan_10", "double_blocks.?", {"double_blocks.0", "double_blocks.1"}),
        ("hunyuan_10", "transformer_blocks.0*", {"double_blocks.0"}),
    ],
)
def test_ignored_layers_stay_dense(comfy_server, kind, patterns, ignored):
    outcome = run(comfy_server, kind, threshold=0.5, ignore=patterns, sampling={"steps": 1, "cfg": 1.0})
    dense = {site["layer"] for site in outcome.sites if not site["sparse_calls"]}
    assert dense == ignored


def test_a_pattern_that_matches_nothing_warns_once_with_known_names(comfy_server):
    outcome = run(comfy_server, "wan_t2v", threshold=0.5, ignore="blocks.99.*", sampling={"steps": 2, "cfg": 1.0})
    assert outcome.log.count("'blocks.99.*' matches no layer") == 1
    assert "blocks.0.self_attn" in outcome.log


def test_a_tiny_threshold_is_dense_and_a_large_one_is_not(comfy_server):
    # the trained model: random weights attend everywhere alike, and nothing can be skipped
    trained = {
        "file": "tiny_wan21_t2v.safetensors",
        "sampling": {"steps": 2, "cfg": 1.0, "width": 128, "height": 128, "length": 13},
    }
    dense = plain(comfy_server, "wan_t2v", **trained)
    tiny = run(comfy_server, "wan_t2v", threshold=1e-9, **trained)
    assert (tiny.latent - dense).norm() / dense.norm() < 1e-4
    large = run(comfy_server, "wan_t2v", threshold=2.0, **trained)
    assert (large.latent - dense).norm() / dense.norm() > 1e-2
    self_sites = [site for site in large.sites if site["role"] == "self"]
    assert sum(site["skipped"] for site in self_sites) > 0
    assert all(0 <= site["skipped"] <= site["total"] for site in self_sites)


def test_a_gated_run_shows_its_dense_steps_on_the_node(comfy_server):
    from harness.graphs import Graph

    graph = Graph()
    model = graph.add("ModelSamplingSD3", model=graph.load("wan_t2v"), shift=8.0)
    gate = graph.add("TRTLLMTimestepGate", disabled_until_timestep=0.9, steps=3, scheduler="simple", denoise=1.0, model=model)
    graph.add("PreviewAny", source=gate[1])
    ui = comfy_server.run(graph).ui(gate)
    assert ui["dense_steps"] == [2] and ui["timesteps"] == pytest.approx([1.0, 0.941, 0.8], abs=1e-3)
