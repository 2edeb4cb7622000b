"""The pack in the real frontend."""

import json

import pytest
from harness.graphs import Graph

pytestmark = pytest.mark.browser


def test_a_patched_graph_survives_the_frontend_and_runs(page, comfy_server):
    graph = Graph()
    skip = graph.add("TRTLLMSkipSoftmax", mode="threshold", threshold=0.03)
    patch = graph.add(
        "TRTLLMAttentionPatch", model=graph.load("wan_t2v"), backend="TORCH_SDPA", token_order="sequential"
    )
    graph.save(graph.sample(patch, "wan_t2v", steps=1), prefix="browser")

    page.evaluate("prompt => app.loadApiJson(prompt, 'api')", comfy_server.fit(graph.prompt()))
    page.wait_for_function("count => app.graph._nodes.length === count", arg=len(graph.nodes))
    missing = page.evaluate(
        "() => app.graph._nodes.filter(n => !LiteGraph.registered_node_types[n.type]).map(n => n.type)"
    )
    assert not missing
    # As text: passed as an object, undefined becomes null, which the frontend refuses.
    saved = page.evaluate("() => JSON.stringify(app.graph.serialize())")
    page.evaluate("() => app.graph.clear()")
    page.evaluate("workflow => app.loadGraphData(JSON.parse(workflow))", saved)
    page.wait_for_function("count => app.graph._nodes.length === count", arg=len(graph.nodes))
    prompt = json.loads(page.evaluate("async () => JSON.stringify((await app.graphToPrompt()).output)"))
    assert prompt[patch.id]["inputs"]["backend"] == "TORCH_SDPA"
    assert prompt[patch.id]["inputs"]["token_order"] == "sequential"
    assert prompt[skip.id]["inputs"]["threshold"] == 0.03

    assert comfy_server.run(prompt).outputs
    assert not page.errors
