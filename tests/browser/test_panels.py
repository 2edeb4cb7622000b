"""The drawn parts of the nodes: what is dragged, clicked or typed is what is sent, and what is shown is what runs."""

import pytest
from harness.graphs import Graph
from harness.location import comfyui_version

SPOTS = [(0, 0), (500, 0), (500, 600), (1100, 0), (1600, 0)]
OLD_NODES2 = "frontend 1.32's Nodes 2.0 draws hidden widgets"


def build(front, *, kind="wan_t2v", steps=4, patterns="", mode="threshold", backend="REFERENCE", wired=True):
    """A small graph with every drawn node, opened in the frontend."""
    graph = Graph()
    model = graph.add("ModelSamplingSD3", model=graph.load(kind), shift=5.0)
    source = model if wired else None
    gate = graph.add(
        "TRTLLMTimestepGate", disabled_until_timestep=0.9, steps=steps, scheduler="simple", denoise=1.0, model=source
    )
    ignore = graph.add("TRTLLMLayerIgnoreList", patterns=patterns, model=source)
    skip = graph.add("TRTLLMSkipSoftmax", mode=mode, threshold=0.5, target_sparsity=0.5, gate=gate, ignore=ignore)
    patched = graph.add("TRTLLMAttentionPatch", model=model, backend=backend, token_order="cubes", skip_softmax=skip)
    sampled = graph.sample(patched, kind, steps=steps, cfg=1.0)
    graph.save(sampled)
    front.load_api(front.server.fit(graph.prompt()))
    for node in front.js("() => app.graph._nodes.filter(n => n.type == 'KSampler').map(n => n.id)"):
        front.set(node, "seed", front.fresh_seed())
    return {name: front.ids(f"TRTLLM{name}")[0] for name in ("TimestepGate", "LayerIgnoreList", "SkipSoftmax", "AttentionPatch")}


def panel(front, node, kind):
    front.look_at(node, 1.2)
    return front.panel(node, kind)


def test_the_gate_is_dragged_and_sent(front):
    node = build(front)["TimestepGate"]
    gate = panel(front, node, "gate")
    assert front.shows(gate, "of 4 steps dense")
    box = gate.locator("svg").bounding_box()
    x, top, height = box["x"] + box["width"] / 2, box["y"], box["height"]
    front.page.mouse.move(x, top + 0.1 * height)
    front.page.mouse.down()
    front.page.mouse.move(x, top + 0.3 * height, steps=4)
    front.page.mouse.move(x, top + 0.45 * height, steps=4)
    front.page.mouse.up()
    front.settle()
    value = front.values(node)["disabled_until_timestep"]
    assert 0.4 < value < 0.6
    assert gate.inner_text().count(f"t {value:g}") == 1
    shown = gate.locator("b.dense").inner_text()
    history = front.run()
    assert front.sent[-1][str(node)]["inputs"]["disabled_until_timestep"] == value
    ui = history["outputs"][str(node)]
    assert shown == f"{ui['dense_steps'][0]} of 4 steps dense"


def test_the_gate_follows_its_wires_and_widgets(front):
    node = build(front, steps=7)["TimestepGate"]
    gate = panel(front, node, "gate")
    assert front.shows(gate, "of 7 steps")
    front.set(node, "steps", 1000)
    assert front.shows(gate, "of 1000 steps")
    assert gate.locator("svg path").count() < 10  # one shape per colour, not one element per step
    assert front.shows(gate, "KSampler: 7 steps")
    gate.locator("a.take").click()
    front.settle()
    assert front.values(node)["steps"] == 7 and "KSampler" not in gate.inner_text()
    dense = gate.locator("b.dense").inner_text()
    front.set(front.ids("ModelSamplingSD3")[0], "shift", 12.0)
    front.js("() => app.extensionManager.workflow.activeWorkflow.changeTracker.checkState()")
    front.settle()
    assert gate.locator("b.dense").inner_text() != dense


def test_layers_are_clicked_swept_and_sent(front):
    node = build(front)["LayerIgnoreList"]
    grid = panel(front, node, "layers")
    assert front.shows(grid, "0 of 4 layers stay dense")
    front.click_middle(grid.locator("[data-layer='0']"))
    assert front.values(node)["patterns"] == "blocks.0.self_attn"
    first, last = (front.middle(grid.locator(f"[data-layer='{index}']")) for index in (1, 3))
    front.page.mouse.move(*first)
    front.page.mouse.down()
    front.page.mouse.move(*last, steps=12)
    front.page.mouse.up()
    front.settle()
    # both cross-attention layers were touched: they became their kind
    assert front.values(node)["patterns"].split("\n") == ["blocks.0.self_attn", "blocks.*.cross_attn"]
    assert front.shows(grid, "3 of 4 layers stay dense")
    front.click_middle(grid.locator("[data-layer='3']"))
    assert front.values(node)["patterns"].split("\n") == ["blocks.0.self_attn", "blocks.0.cross_attn"]
    history = front.run()
    assert front.sent[-1][str(node)]["inputs"]["patterns"] == "blocks.0.self_attn\nblocks.0.cross_attn"
    assert history["outputs"][str(node)]["ignored"] == ["blocks.0.self_attn", "blocks.0.cross_attn"]


def test_typed_patterns_light_the_grid_up(front):
    node = build(front)["LayerIgnoreList"]
    grid = panel(front, node, "layers")
    front.set(node, "patterns", "# edges\ntransformer.blocks.1.attn1, nothing.*")
    assert front.shows(grid, "1 of 4 layers stay dense")
    assert grid.locator("rect.on").get_attribute("data-layer") == "2"
    assert front.shows(grid, "No layer is named nothing.*")
    front.click_middle(grid.locator("[data-layer='0']"))
    assert front.values(node)["patterns"].startswith("# edges\n")


def test_two_hundred_layers_are_readable(front):
    node = build(front, patterns="blocks.1?.cross_attn")["LayerIgnoreList"]
    names = [f"blocks.{block}.{kind}_attn" for block in range(100) for kind in ("self", "cross")]
    front.js("([id, names]) => app.graph.getNodeById(id).onExecuted({layers: names})", [node, names])
    front.settle()
    grid = panel(front, node, "layers")
    assert front.shows(grid, "10 of 200 layers stay dense")
    cell = grid.locator("[data-layer='0']").bounding_box()
    assert cell["width"] > 10 and cell["height"] > 10


def test_the_mode_hides_the_other_widgets_and_keeps_their_values(front):
    nodes = build(front)
    node = nodes["SkipSoftmax"]
    if front.nodes2 and comfyui_version().startswith("0.3."):
        pytest.skip(OLD_NODES2)
    assert front.shown_widgets(node) == ["mode", "threshold"]
    front.set(node, "mode", "calibrated")
    assert front.shown_widgets(node) == ["mode", "target_sparsity"]
    assert front.shows(panel(front, node, "lambda"), "Connect a calibration")
    front.set(node, "target_sparsity", 0.7)
    front.set(node, "mode", "threshold")
    front.set(node, "threshold", 0.25)
    assert front.shown_widgets(node) == ["mode", "threshold"]
    assert front.shows(panel(front, node, "lambda"), "λ = 0.25")
    front.run()
    inputs = front.sent[-1][str(node)]["inputs"]
    assert (inputs["mode"], inputs["threshold"], inputs["target_sparsity"]) == ("threshold", 0.25, 0.7)


def test_the_patch_shows_what_ran_and_refusals(front):
    nodes = build(front)
    node = nodes["AttentionPatch"]
    status = panel(front, node, "status")
    assert front.shows(status, "Run to see")
    front.run()
    assert front.shows(status, "of the tiles of those calls")
    assert front.shows(status, "self: REFERENCE (chosen here); Skip-Softmax λ 0.5; dense while t > 0.9")
    assert front.shows(status, "last run: 4 steps, 16 calls")
    front.run()  # everything from the cache: the text stays
    assert front.shows(status, "self: REFERENCE")
    front.set(node, "backend", "TRITON_ATTN")
    front.run()
    front.close_dialogs()
    assert front.shows(status, "TRITON_ATTN cannot run: it needs an NVIDIA GPU")
    assert status.locator(".bad").count() == 1
    front.set(node, "backend", "REFERENCE")
    front.set(front.ids("KSampler")[0], "seed", front.fresh_seed())
    front.run()
    assert front.shows(status, "last run") and status.locator(".bad").count() == 0


def test_a_run_leaves_one_text_on_the_patch(front):
    """The frontend would make a text widget of its own for what a node says: it must not, at no time of a run."""
    node = build(front)["AttentionPatch"]
    status = panel(front, node, "status")
    front.js(
        """id => {
            const node = app.graph.getNodeById(id), add = node.addCustomWidget;
            window.added = [];
            node.addCustomWidget = function (widget) { window.added.push(widget.name); return add.call(this, widget); };
        }""",
        node,
    )
    front.run()
    assert front.shows(status, "last run: 4 steps")
    assert front.page.get_by_text("last run: 4 steps").count() == 1
    assert front.js("() => window.added") == []
    assert list(front.values(node)) == ["backend", "token_order", "status"]
    saved = next(saved for saved in front.serialize()["nodes"] if str(saved["id"]) == str(node))
    assert saved["widgets_values"] == ["REFERENCE", "cubes"]
    assert set(front.prompt()[str(node)]["inputs"]) == {"backend", "token_order", "model", "skip_softmax"}


def test_a_refusal_stands_on_a_node_without_a_text_of_its_own(front):
    node = build(front, mode="calibrated")["SkipSoftmax"]
    front.run()
    front.close_dialogs()
    assert front.shows(front.panel(node, "status"), "needs a calibration")
    front.set(node, "mode", "threshold")
    front.run()
    front.panel(node, "status").wait_for(state="hidden")


def test_unconnected_nodes_say_what_to_connect(front):
    nodes = build(front, wired=False)
    assert front.shows(front.panel(nodes["TimestepGate"], "gate"), "Connect the sampler's model")
    assert front.shows(front.panel(nodes["LayerIgnoreList"], "layers"), "Connect model")


def test_panels_are_neither_saved_nor_sent(front):
    nodes = build(front)
    saved = {str(node["id"]): node for node in front.serialize()["nodes"]}
    assert saved[str(nodes["TimestepGate"])]["widgets_values"] == [0.9, 4, "simple", 1]
    assert saved[str(nodes["SkipSoftmax"])]["widgets_values"] == ["threshold", 0.5, 0.5]
    assert saved[str(nodes["LayerIgnoreList"])]["widgets_values"] == [""]
    assert saved[str(nodes["AttentionPatch"])]["widgets_values"] == ["REFERENCE", "cubes"]
    sent = front.prompt()[str(nodes["TimestepGate"])]["inputs"]
    assert set(sent) == {"disabled_until_timestep", "steps", "scheduler", "denoise", "model"}


def test_nothing_is_asked_while_nothing_changes(front):
    build(front)
    before = len(front.asked)
    front.settle(2500)
    assert len(front.asked) == before


def test_nothing_left_the_machine(front):
    assert not [url for url in front.asked if "trtllm" in url and not url.startswith(front.server.url)]


def test_from_an_empty_graph_with_the_mouse_and_the_keyboard(front):
    """A patched Wan with a gate and three ignored layers; the nodes are found by search."""
    if front.nodes2:
        pytest.skip("both renderers share the search")
    front.js("() => app.graph.clear()")
    front.settle()
    wanted = [
        ("Load Diffusion Model", "UNETLoader"), ("Timestep Gate", "TRTLLMTimestepGate"),
        ("Layer Ignore", "TRTLLMLayerIgnoreList"), ("Skip-Softmax", "TRTLLMSkipSoftmax"),
        ("TRTLLM Attention Patch", "TRTLLMAttentionPatch"),
    ]  # fmt: skip
    nodes = {}
    for place, (words, node_type) in enumerate(wanted):
        nodes[node_type] = front.add_by_search(words, node_type)
        front.js("([id, x, y]) => { app.graph.getNodeById(id).pos = [x, y]; }", [nodes[node_type], *SPOTS[place]])
    loader, gate, ignore, skip, patch = nodes.values()
    front.set(loader, "unet_name", "wan_t2v.safetensors")
    for source, output, target, name in [
        (loader, 0, gate, "model"), (loader, 0, ignore, "model"), (gate, 0, skip, "gate"),
        (ignore, 0, skip, "ignore"), (skip, 0, patch, "skip_softmax"), (loader, 0, patch, "model"),
    ]:  # fmt: skip
        front.js(
            """([source, output, target, name]) => {
                const node = app.graph.getNodeById(target);
                app.graph.getNodeById(source).connect(output, node, node.inputs.findIndex((i) => i.name == name));
            }""",
            [source, output, target, name],
        )
    front.settle()
    assert front.shows(panel(front, gate, "gate"), "of 20 steps dense")
    grid = panel(front, ignore, "layers")
    for layer in (0, 1, 2):
        front.click_middle(grid.locator(f"[data-layer='{layer}']"))
    assert front.shows(grid, "3 of 4 layers stay dense")
    sent = front.prompt()
    assert len(sent[str(ignore)]["inputs"]["patterns"].split("\n")) >= 2
    assert sent[str(patch)]["inputs"]["skip_softmax"] == [str(skip), 0]
