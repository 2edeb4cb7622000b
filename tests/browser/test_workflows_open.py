"""Every example workflow opens without a warning, with the values of its API-format twin."""

import json

import pytest
from harness.location import ROOT

FOLDER = ROOT / "workflows"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_a_workflow_opens_as_its_twin(front, name):
    front.load(FOLDER / f"{name}.json")
    assert not front.dialogs() and not front.toasts()
    assert front.unknown_nodes() == []
    prompt = front.prompt()
    twin = json.loads((FOLDER / "api" / f"{name}.json").read_text())
    assert prompt.keys() == twin.keys()
    for node_id, node in twin.items():
        assert prompt[node_id]["class_type"] == node["class_type"]
        shown = prompt[node_id]["inputs"]
        if node["class_type"] != "SaveVideo":  # later versions have one codec per format
            assert {key: shown.get(key) for key in node["inputs"]} == node["inputs"]


def test_the_frontend_finds_the_help_pages(front, server):
    names = [name for name in server.object_info if name.startswith("TRTLLM")]
    assert len(names) == 12
    for name in names:
        module = server.object_info[name]["python_module"].split(".")[1]
        page = front.page.request.get(f"{server.url}/extensions/{module}/docs/{name}.md")
        assert page.status == 200 and page.text().startswith("# ")


def test_titles_are_those_of_the_schemas(front, server):
    """The frontend reads the English texts as messages with a syntax of their own."""
    for name, info in server.object_info.items():
        if name.startswith("TRTLLM"):
            title = front.js("type => LiteGraph.createNode(type).title", name)
            assert title == info["display_name"]
