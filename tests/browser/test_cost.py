"""What the panels cost when a workflow opens."""

import json

from harness.graphs import Graph

TWENTY = 5  # times four drawn nodes
LOADS = 5

SWITCH = """
(on) => {
  const extension = app.extensions.find((e) => e.name === 'trtllm.attention');
  extension.kept ??= {made: extension.nodeCreated, configured: extension.afterConfigureGraph};
  extension.nodeCreated = on ? extension.kept.made : () => {};
  extension.afterConfigureGraph = on ? extension.kept.configured : () => {};
}
"""
OPEN = """
async (workflow) => {
  app.graph.configure(JSON.parse(workflow));
  app.extensions.find((e) => e.name === 'trtllm.attention').afterConfigureGraph();
  await new Promise((done) => setTimeout(done, 400)); // the server's answers are drawn, too
}
"""


def script_seconds(session) -> float:
    """Processor time that the page's scripts have used; other processes do not count."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(metric["value"] for metric in metrics if metric["name"] == "ScriptDuration")


def test_twenty_nodes_add_less_than_50_ms(front):
    graph = Graph()
    model = graph.load("wan_t2v")
    for _ in range(TWENTY):
        gate = graph.add(
            "TRTLLMTimestepGate", disabled_until_timestep=0.9, steps=50, scheduler="simple", denoise=1.0, model=model
        )
        ignore = graph.add("TRTLLMLayerIgnoreList", patterns="blocks.0.*", model=model)
        skip = graph.add(
            "TRTLLMSkipSoftmax", mode="threshold", threshold=0.1, target_sparsity=0.5, gate=gate, ignore=ignore
        )
        graph.add("TRTLLMAttentionPatch", model=model, backend="auto", token_order="cubes", skip_softmax=skip)
    front.load_api(front.server.fit(graph.prompt()))
    workflow = json.dumps(front.serialize())
    session = front.page.context.new_cdp_session(front.page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    used = {True: [], False: []}
    for load in range(2 * LOADS):
        panels = bool(load % 2)
        front.js(SWITCH, panels)
        front.js("() => app.graph.clear()")
        front.settle(200)
        before = script_seconds(session)
        front.js(OPEN, workflow)
        used[panels].append(1000 * (script_seconds(session) - before))
    front.js(SWITCH, True)
    added = min(used[True]) - min(used[False])
    print(f"20 nodes: {added:.1f} ms added to {min(used[False]):.1f} ms")
    assert added < 50
