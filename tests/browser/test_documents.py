"""Nodes whose text output is a document: a picture, and in the panel a summary that is wholly visible."""

import json

from harness.graphs import Graph

SHOWN = "([id, text]) => app.graph.getNodeById(id).widgets.find((w) => w.name == 'status').element.textContent.includes(text)"
PICTURED = "id => app.graph.getNodeById(id).imgs?.length > 0"
FITS = """
id => {
    const panel = app.graph.getNodeById(id).widgets.find((w) => w.name == 'status').element;
    return panel.clientHeight > 0 && panel.scrollHeight <= panel.clientHeight;
}
"""


def test_the_summary_is_wholly_visible_and_also_there_when_all_is_cached(front, tmp_path):
    graph = Graph()
    skip = graph.add("TRTLLMSkipSoftmax", mode="threshold", threshold=0.5, target_sparsity=0.5)
    patched = graph.add(
        "TRTLLMAttentionPatch", model=graph.load("wan_t2v"), backend="REFERENCE", token_order="cubes", skip_softmax=skip
    )
    sampled = graph.sample(patched, "wan_t2v", steps=2, cfg=1.0, seed=front.fresh_seed())
    graph.add("TRTLLMAttentionReport", samples=sampled, stats=patched[1], filename_prefix="attention/report")
    graph.add("TRTLLMCompare", samples_a=sampled, samples_b=graph.latent("wan_t2v"))
    front.load_api(front.server.fit(graph.prompt()))
    report, compare = front.ids("TRTLLMAttentionReport")[0], front.ids("TRTLLMCompare")[0]
    workflow = tmp_path / "workflow.json"
    workflow.write_text(json.dumps(front.serialize()))

    def shows(node, text):
        front.look_at(node)
        front.page.wait_for_function(SHOWN, arg=[node, text])
        if not front.nodes2:
            front.page.wait_for_function(PICTURED, arg=node)
            front.page.wait_for_function(FITS, arg=node)

    front.run()
    shows(report, "of the counted tiles skipped")
    shows(compare, "samples_b against samples_a: PSNR")
    front.load(workflow)
    front.run()
    shows(report, "of the counted tiles skipped")
    shows(compare, "samples_b against samples_a: 2 frames")
    shows(compare, "PSNR of the mean squared error: ")
