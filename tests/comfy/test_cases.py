"""What has hurt users of packs like this one, in the real ComfyUI; numbers as in the list of cases."""

import json

import pytest
import torch
from harness.graphs import Graph
from harness.server import PromptError
from patched import patch, plain, run

SAMPLING = {"steps": 2, "cfg": 1.0}


def relative(a, b):
    return float((a - b).norm() / b.norm())


def test_case_01_a_bypassed_patch_leaves_nothing_behind(comfy_server):
    never = plain(comfy_server, "wan_t2v", sampling=SAMPLING)
    patched = run(comfy_server, "wan_t2v", threshold=1.0, quant="int8", sampling=SAMPLING)
    assert not patched.latent.equal(never)
    graph = Graph()
    model = graph.load("wan_t2v")
    sampled = graph.sample(graph.add("TestProbe", model=model, tag="bypassed"), "wan_t2v", **SAMPLING, seed=7)
    report, saved = graph.add("TestProbeReport", samples=sampled, tag="bypassed"), graph.save(sampled)
    forwards = graph.add("TestForwards", model=model, samples=sampled)
    finished = comfy_server.run(graph)
    assert finished.latent(saved).equal(never)
    assert {call["function"] for call in finished.ui(report)["calls"]} == {"attention_pytorch"}
    assert finished.ui(forwards)["patched"] == []


def test_case_03_an_unknown_keyword_reaches_the_stock_function(comfy_server):
    foreign = [("TestForeignOverride", {"tag": "keyword", "keyword": "from_the_future"})]
    outcome = run(comfy_server, "wan_t2v", backend="TORCH_SDPA", before=foreign, sampling=SAMPLING)
    assert outcome.declined == {"keyword from_the_future": 8}
    assert outcome.latent.equal(plain(comfy_server, "wan_t2v", sampling=SAMPLING))
    assert outcome.log.count("from_the_future") == 4  # once a layer


def test_another_packs_override_gets_what_we_decline_and_nothing_else(comfy_server):
    graph = Graph()
    model = graph.add("TestForeignOverride", model=graph.load("wan_t2v"), tag="chained", keyword="")
    sampled = graph.sample(patch(graph, model, backend="TORCH_SDPA"), "wan_t2v", **SAMPLING)
    report = graph.add("TestForeignReport", samples=sampled, tag="chained")
    assert comfy_server.run(graph).ui(report)["count"] == [0]


def test_the_last_of_two_patches_counts(comfy_server):
    graph = Graph()
    first = patch(graph, graph.load("wan_t2v"), backend="REFERENCE", threshold=1.0)
    second = patch(graph, first, backend="TORCH_SDPA")
    sampled = graph.sample(second, "wan_t2v", **SAMPLING)
    report = graph.add("TestStatsReport", samples=sampled, stats=second[1])
    saved = graph.save(sampled)
    finished = comfy_server.run(graph)
    sites = finished.ui(report)["sites"]
    assert sum(site["calls"] for site in sites) == 8
    assert {name for site in sites for name in site["backends"]} == {"TORCH_SDPA"}
    assert finished.latent(saved).equal(plain(comfy_server, "wan_t2v", sampling=SAMPLING))


def test_case_09_half_precision_models_keep_their_dtype(comfy_server):
    for dtype in ("bf16", "fp16"):
        half = [("ModelComputeDtype", {"dtype": dtype})]
        outcome = run(comfy_server, "wan_t2v", backend="TORCH_SDPA", before=half, sampling=SAMPLING)
        assert outcome.calls == 8
        assert outcome.latent.equal(plain(comfy_server, "wan_t2v", before=half, sampling=SAMPLING))


@pytest.mark.slow
def test_case_12_the_gate_opens_under_torch_compile(comfy_server):
    compiled = [("TorchCompileModel", {"backend": "inductor"})]
    sampling = {"steps": 3, "cfg": 1.0}
    first = run(comfy_server, "wan_t2v", threshold=0.5, gate=0.9, shift=8.0, after=compiled, sampling=sampling)
    assert first.sparse_steps("blocks.0.self_attn") == {0: False, 1: False, 2: True}
    second = run(comfy_server, "wan_t2v", threshold=0.5, gate=0.97, shift=8.0, after=compiled, sampling=sampling)
    assert second.sparse_steps("blocks.0.self_attn") == {0: False, 1: True, 2: True}
    assert second.calls == 12


def test_case_14_guidance_runs_as_one_batch_or_as_two_calls(comfy_server):
    # prompts of equal length run as one batch, of different lengths apart; that both give the same
    # numbers is tested on single calls
    both = run(comfy_server, "wan_t2v", threshold=0.5, quant="int8", sampling={"steps": 1, "cfg": 5.0})
    assert both.calls == 4
    apart = {"steps": 1, "cfg": 5.0, "negative": {"tokens": 20}}
    separate = run(comfy_server, "wan_t2v", threshold=0.5, quant="int8", sampling=apart)
    assert separate.calls == 8


def test_case_15_two_clones_keep_their_own_settings(comfy_server):
    graph = Graph()
    model = graph.load("wan_t2v")
    a = patch(graph, model, backend="REFERENCE", threshold=1.0)
    b = patch(graph, model, backend="TORCH_SDPA")
    reports, saved = [], []
    previous = None
    for node in (a, b, a):
        sampled = graph.sample(node, "wan_t2v", **SAMPLING, seed=7 if previous is None else 8)
        reports.append(graph.add("TestStatsReport", samples=sampled, stats=node[1]))
        saved.append(graph.save(sampled))
        previous = sampled
    finished = comfy_server.run(graph)
    used = [{n for s in finished.ui(r)["sites"] for n in s["backends"]} for r in reports]
    assert used[0] == {"REFERENCE"} and used[1] == {"TORCH_SDPA"} and used[2] == {"REFERENCE"}
    assert finished.latent(saved[1]).equal(plain(comfy_server, "wan_t2v", sampling={**SAMPLING, "seed": 8}))


def test_case_16_patches_go_with_the_model(comfy_server):
    run(comfy_server, "wan_t2v", threshold=1.0, sampling=SAMPLING)
    comfy_server.post("/free", {"unload_models": True, "free_memory": True})
    graph = Graph()
    model = graph.load("wan_t2v")
    sampled = graph.sample(model, "wan_t2v", **SAMPLING)
    saved = graph.save(sampled)
    forwards = graph.add("TestForwards", model=model, samples=sampled)
    finished = comfy_server.run(graph)
    assert finished.ui(forwards)["patched"] == []
    assert finished.latent(saved).equal(plain(comfy_server, "wan_t2v", sampling=SAMPLING))


def test_case_23_a_patch_that_is_never_called_says_so(comfy_server):
    bypass = [("TestForeignForward", {})]
    outcome = run(comfy_server, "wan_t2v", backend="TORCH_SDPA", after=bypass, sampling=SAMPLING)
    assert outcome.calls == 0
    assert outcome.log.count("the patch was never called in this run") == 1


@pytest.mark.parametrize(
    "node, inputs, parts",
    [
        ("TRTLLMSkipSoftmax", {"mode": "threshold", "threshold": -1.0, "target_sparsity": 0.5}, ["threshold", "-1.0"]),
        ("TRTLLMSkipSoftmax", {"mode": "calibrated", "threshold": 0.1, "target_sparsity": 0.5}, ["calibration", "threshold"]),
        ("TRTLLMSkipSoftmax", {"mode": "guess", "threshold": 0.1, "target_sparsity": 0.5}, ["mode", "'guess'"]),
    ],
)
def test_case_24_malformed_wires_are_shown_on_their_node(comfy_server, node, inputs, parts):
    graph = Graph()
    skip = graph.add(node, **inputs)
    patched = graph.add("TRTLLMAttentionPatch", model=graph.load("wan_t2v"), backend="auto", token_order="cubes", skip_softmax=skip)
    graph.save(graph.sample(patched, "wan_t2v"))
    with pytest.raises(PromptError) as error:
        comfy_server.run(graph)
    assert error.value.node_id == skip.id
    assert all(part in error.value.message for part in parts)


def test_case_18_a_backend_that_cannot_run_says_why_on_the_node(comfy_server):
    for backend, parts in [
        ("TRITON_ATTN", ["TRITON_ATTN cannot run", "CPU"]),
        ("TRTLLM_ATTN", ["TRTLLM_ATTN cannot run", "flashinfer", "CPU"]),
        ("SAGE_ATTN", ["SAGE_ATTN cannot run", "sageattention"]),
        ("NO_SUCH_ATTN", ["'NO_SUCH_ATTN'", "TRITON_ATTN"]),
    ]:
        graph = Graph()
        patched = patch(graph, graph.load("wan_t2v"), backend=backend)
        graph.save(graph.sample(patched, "wan_t2v"))
        with pytest.raises(PromptError) as error:
            comfy_server.run(graph)
        assert error.value.node_id == patched.id
        assert all(part in error.value.message for part in parts), error.value.message


def test_nothing_of_a_patched_run_stays_alive(comfy_server):
    graph = Graph()
    model = graph.add("TestWatchStorages", model=graph.load("wan_t2v"))
    patched = patch(graph, model, threshold=0.5, quant="fp8_e4m3")
    graph.save(graph.sample(patched, "wan_t2v", seed=21))
    comfy_server.run(graph)
    after = Graph()
    report = after.add("TestMemoryReport")
    ui = comfy_server.run(after).ui(report)
    assert ui["watched"][0] > 50 and ui["alive"] == [0]


def test_a_patch_that_moved_to_another_id_is_made_anew(comfy_server):
    """What the model says in a run goes to the node that patched it; ComfyUI's cache must not hand it to another."""
    graph = Graph()
    made = patch(graph, graph.load("wan_t2v"), backend="TORCH_SDPA")
    graph.save(graph.sample(made, "wan_t2v", steps=1, cfg=1.0))
    comfy_server.run(graph)
    assert made.id in comfy_server.run(graph).cached
    moved = json.loads(json.dumps(graph.prompt()).replace(f'"{made.id}"', '"12:6"'))
    assert "12:6" not in comfy_server.run(moved).cached
