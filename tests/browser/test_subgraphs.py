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
