"""Workflows saved by earlier releases, and on other machines."""

import json

import pytest
from harness.graphs import Graph
from harness.location import ROOT

FOLDER = ROOT / "tests" / "assets" / "workflows"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("saved_by_*.json")))
def test_case_17_a_saved_workflow_opens_with_its_values(front, name):
    """The file is what a release saved, never written again; values are listed by name inside it."""
    path = FOLDER / f"{name}.json"
    expected = json.loads(path.read_text())["extra"]["values"]
    front.load(path)
    assert front.unknown_nodes() == [] and not front.dialogs()
    prompt = front.prompt()
    assert expected.keys() <= prompt.keys()
    for node_id, values in expected.items():
        sent = {key: value for key, value in prompt[node_id]["inputs"].items() if not isinstance(value, list)}
        assert {key: sent.get(key) for key in values} == values, prompt[node_id]["class_type"]


def test_case_22_what_is_missing_on_this_machine_is_said_by_the_run(front):
    graph = Graph()
    curve = graph.add("TRTLLMLoadCalibration", name="of_another_machine.json", component="transformer", path="")
    skip = graph.add("TRTLLMSkipSoftmax", mode="calibrated", threshold=0.1, target_sparsity=0.5, calibration=curve)
    patched = graph.add(
        "TRTLLMAttentionPatch", model=graph.load("wan_t2v"), backend="ATTN_OF_2031", token_order="cubes", skip_softmax=skip
    )
    graph.save(graph.sample(patched, "wan_t2v", steps=1))
    front.load_api(front.server.fit(graph.prompt()))
    curve, patch = front.ids("TRTLLMLoadCalibration")[0], front.ids("TRTLLMAttentionPatch")[0]
    assert front.values(curve)["name"] == "of_another_machine.json"
    assert front.values(patch)["backend"] == "ATTN_OF_2031"
    front.run()
    front.close_dialogs()
    assert front.shows(front.panel(curve, "status"), "'of_another_machine.json' is not there")
    front.set(front.ids("TRTLLMSkipSoftmax")[0], "mode", "threshold")
    front.js("id => app.graph.getNodeById(id).disconnectOutput(0)", curve)
    front.run()
    front.close_dialogs()
    assert front.shows(front.panel(patch, "status"), "'ATTN_OF_2031'")
