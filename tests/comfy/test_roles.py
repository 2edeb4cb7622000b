"""Roles, and vLLM-Omni's JSON to the graph and back."""

import json

import pytest
from harness.graphs import Graph
from harness.server import PromptError
from patched import patch, run

ONE_STEP = {"steps": 1, "cfg": 1.0}


def backends_by_role(sites):
    found = {}
    for site in sites:
        found.setdefault(site["role"], set()).update(site["backends"])
    return found


def sample(server, graph, node, kind):
    sampled = graph.sample(node, kind, **ONE_STEP)
    report = graph.add("TestStatsReport", samples=sampled, stats=node[1])
    text = graph.add("PreviewAny", source=node[2])
    finished = server.run(graph)
    return finished.ui(report)["sites"], json.loads(finished.ui(text)["text"][0])


def test_a_role_replaces_the_whole_spec(comfy_server):
    graph = Graph()
    cross = graph.add("TRTLLMAttentionRole", role="cross", backend="TORCH_SDPA")
    node = patch(graph, graph.load("wan_t2v"), threshold=0.5, quant="int8", roles=cross)
    sites, config = sample(comfy_server, graph, node, "wan_t2v")
    assert backends_by_role(sites) == {"self": {"REFERENCE"}, "cross": {"TORCH_SDPA"}}
    assert all(site["sparse_calls"] == 0 for site in sites if site["role"] == "cross")
    assert config["per_role"] == {"cross": {"backend": "TORCH_SDPA"}}
    assert config["default"]["skip_softmax"]["threshold"] == 0.5


def test_the_exact_role_wins_over_its_category(comfy_server):
    graph = Graph()
    cross = graph.add("TRTLLMAttentionRole", role="cross", backend="TORCH_SDPA")
    image = graph.add("TRTLLMAttentionRole", role="wan.image_cross", backend="REFERENCE", roles=cross)
    node = patch(graph, graph.load("wan_i2v"), backend="TORCH_SDPA", roles=image)
    sites, _ = sample(comfy_server, graph, node, "wan_i2v")
    used = backends_by_role(sites)
    assert used["cross"] == {"TORCH_SDPA"} and used["wan.image_cross"] == {"REFERENCE"}


def test_json_loads_into_the_graph_and_comes_back_equal(comfy_server):
    written = {
        "default": {
            "backend": "REFERENCE",
            "quant": {"dtype_qk": "fp8_e4m3", "q_block_size": 4, "k_block_size": 16},
            "skip_softmax": {"threshold": 0.05, "disabled_until_timestep": 0.97},
        },
        "per_role": {"cross": {"backend": "TORCH_SDPA"}, "wan.image_cross": {"backend": "REFERENCE"}},
    }
    graph = Graph()
    loaded = graph.add("TRTLLMAttentionConfig", config=json.dumps(written))
    node = graph.add(
        "TRTLLMAttentionPatch", model=graph.load("wan_t2v"), backend=loaded, token_order="cubes",
        quant=loaded[1], skip_softmax=loaded[2], roles=loaded[3])  # fmt: skip
    sites, config = sample(comfy_server, graph, node, "wan_t2v")
    assert backends_by_role(sites) == {"self": {"REFERENCE"}, "cross": {"TORCH_SDPA"}}

    again = Graph()
    loaded = again.add("TRTLLMAttentionConfig", config=json.dumps(config))
    node = again.add(
        "TRTLLMAttentionPatch", model=again.load("wan_t2v"), backend=loaded, token_order="cubes",
        quant=loaded[1], skip_softmax=loaded[2], roles=loaded[3])  # fmt: skip
    _, second = sample(comfy_server, again, node, "wan_t2v")
    assert second == config
    assert config["per_role"] == written["per_role"]
    defaults = {"q_block_size": 1, "k_block_size": 16}  # may be left out
    assert defaults | config["default"]["quant"] == written["default"]["quant"]
    assert config["default"]["skip_softmax"] == written["default"]["skip_softmax"]


@pytest.mark.parametrize(
    "text, parts",
    [
        ('{"default": {"backend": "TRITON_ATTN",}}', ["line 1"]),
        ('{"default": {"backnd": "TRITON_ATTN"}}', ["backnd", "backend"]),
        ('{"default": {"skip_softmax": {"target_sparsity": 75}}}', ["target_sparsity", "0.75"]),
        ('{"default": {"skip_softmax": {"threshold": 0.1, "target_sparsity": 0.5}}}', ["threshold", "target_sparsity"]),
    ],
)
def test_case_24_a_malformed_config_is_shown_on_its_node(comfy_server, text, parts):
    graph = Graph()
    loaded = graph.add("TRTLLMAttentionConfig", config=text)
    node = graph.add(
        "TRTLLMAttentionPatch", model=graph.load("wan_t2v"), backend=loaded, token_order="cubes")
    graph.save(graph.sample(node, "wan_t2v"))
    with pytest.raises(PromptError) as error:
        comfy_server.run(graph)
    assert error.value.node_id == loaded.id
    assert all(part in error.value.message for part in parts), error.value.message


def test_the_log_says_what_was_resolved(comfy_server):
    outcome = run(comfy_server, "wan_vace", backend="REFERENCE", sampling=ONE_STEP)
    assert "Resolved diffusion attention backend 'REFERENCE' for role='self' via attention_config.default" in comfy_server.log()
    assert outcome.calls == 8
