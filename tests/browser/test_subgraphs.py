"""Panels of nodes inside a subgraph. A file, so a page, of its own: frontend 1.32's Nodes 2.0 draws no
workflow that is opened after a subgraph was, whatever its nodes are."""

from harness.graphs import Graph

INSIDE = """
id => {
    const outer = app.graph.convertToSubgraph(new Set([app.graph.getNodeById(id)])).node;
    const inner = outer.subgraph.nodes[0];
    window.patch = {outer, inner, panel: inner.widgets.find((w) => w.name == 'status').element};
    return `${outer.id}:${inner.id}`;
}
"""
SHOWN = "() => patch.panel.textContent.includes('last run: 2 steps')"


def test_a_patch_inside_a_subgraph_shows_what_ran(front):
    """Its execution id is the subgraph node's and its own, as in 12:7; seen from outside and from inside."""
    graph = Graph()
    unseen = front.fresh_seed() % 1000 / 1000  # a patched model from the cache names the node that made it
    skip = graph.add("TRTLLMSkipSoftmax", mode="threshold", threshold=unseen, target_sparsity=0.5)
    patched = graph.add(
        "TRTLLMAttentionPatch", model=graph.load("wan_t2v"), backend="REFERENCE", token_order="cubes", skip_softmax=skip
    )
    graph.save(graph.sample(patched, "wan_t2v", steps=2))
    front.load_api(front.server.fit(graph.prompt()))
    execution_id = front.js(INSIDE, front.ids("TRTLLMAttentionPatch")[0])
    front.run()
    assert execution_id in front.sent[-1]
    front.page.wait_for_function(SHOWN)
    front.js("() => { patch.inner.trtllmStatus.show(''); app.canvas.openSubgraph(patch.outer.subgraph, patch.outer); }")
    front.set(front.ids("KSampler")[0], "seed", front.fresh_seed())
    front.run()
    front.page.wait_for_function(SHOWN)
    assert front.page.get_by_text("last run: 2 steps").count() == 1
    assert front.js("() => patch.inner.widgets.map((w) => w.name)") == ["backend", "token_order", "status"]


WRAP = """
names => {
    const inside = new Set(app.graph._nodes.filter((n) => names.includes(n.type)));
    const outer = app.graph.convertToSubgraph(inside).node;
    for (const node of outer.subgraph.nodes) {
        const panel = (node.widgets ?? []).find((w) => w.element?.classList.contains('trtllm-panel'))?.element;
        window.inside = {...window.inside, [node.type]: {node, panel}};
    }
    window.outers = [...(window.outers ?? []), outer];
}
"""
TELLS = "([type, text]) => inside[type].panel.textContent.includes(text)"
TWICE = "() => { app.graph.add(LiteGraph.createNode(outers[0].subgraph.id)); }"
EDITED = "() => app.extensionManager.workflow.activeWorkflow.changeTracker.checkState()"


def test_drawn_nodes_inside_a_subgraph_see_the_model_outside(front):
    graph = Graph()
    model = graph.add("ModelSamplingSD3", model=graph.load("wan_t2v"), shift=5.0)
    gate = graph.add(
        "TRTLLMTimestepGate", disabled_until_timestep=0.9, steps=4, scheduler="simple", denoise=1.0, model=model
    )
    ignore = graph.add("TRTLLMLayerIgnoreList", patterns="", model=model)
    skip = graph.add("TRTLLMSkipSoftmax", mode="threshold", threshold=0.5, target_sparsity=0.5, gate=gate, ignore=ignore)
    patched = graph.add(
        "TRTLLMAttentionPatch", model=model, backend="REFERENCE", token_order="cubes", skip_softmax=skip
    )
    graph.save(graph.sample(patched, "wan_t2v", steps=4))
    front.load_api(front.server.fit(graph.prompt()))

    def tells(node, text):
        front.page.wait_for_function(TELLS, arg=[node, text])

    front.js("() => { window.outers = []; }")
    drawn = ["TRTLLMTimestepGate", "TRTLLMLayerIgnoreList"]
    front.js(WRAP, [*drawn, "TRTLLMSkipSoftmax", "TRTLLMAttentionPatch"])
    tells(drawn[0], "of 4 steps dense")
    tells(drawn[1], "0 of 4 layers stay dense")
    front.js(WRAP, ["UNETLoader", "ModelSamplingSD3"])  # the model now comes out of a second subgraph
    front.js("() => { inside.TRTLLMTimestepGate.node.widgets.find((w) => w.name == 'steps').value = 5; }")
    front.js(EDITED)
    tells(drawn[0], "of 5 steps dense")
    tells(drawn[1], "0 of 4 layers stay dense")
    front.js(TWICE)  # which of the two outsides is meant, only a run tells
    front.js(EDITED)
    tells(drawn[0], "Run once to see this model's schedule")
    tells(drawn[1], "Run once to choose this model's layers")
    front.js("() => { inside.TRTLLMLayerIgnoreList.node.onExecuted({layers: ['blocks.0.a', 'blocks.1.a']}); }")
    tells(drawn[1], "0 of 2 layers stay dense")
