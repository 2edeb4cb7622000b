"""The report node in the real ComfyUI: its numbers, its picture, and what it says when there is nothing."""

import importlib
import re
import time
from types import SimpleNamespace

import pytest
from harness.graphs import Graph
from patched import patch
from PIL import Image
from trtllm_core.calibration import Calibration

TRAINED = "tiny_wan21_t2v.safetensors"
SMALL = {"width": 128, "height": 128, "length": 13}


def graph_with_report(steps=3, cfg=1.0, seed=7, prefix="reports/run", before=None, probe=True, sampling=None, **options):
    """Sampling of the trained model with a report behind it: (graph, report node, stats probe or None)."""
    graph = Graph()
    model = graph.add("ModelSamplingSD3", model=graph.load(TRAINED), shift=8.0)
    node = patch(graph, model, **{"threshold": 2.0, **options})
    model = before(graph, node) if before else node
    sampled = graph.sample(model, "wan_t2v", steps=steps, cfg=cfg, seed=seed, **{**SMALL, **(sampling or {})})
    report = graph.add("TRTLLMAttentionReport", samples=sampled, stats=node[1], filename_prefix=prefix)
    graph.save(report)
    stats = graph.add("TestStatsReport", samples=report, stats=node[1]) if probe else None
    return graph, report, stats


def text_of(run, report):
    return run.ui(report)["text"][0]


def row(text, section, role):
    """The cells of `role` in the table of a section, by column."""
    body = text.split(f"## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in body.splitlines() if line.startswith("|")]
    header, *rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return next(dict(zip(header, cells)) for cells in rows if cells[0] == role)


def colour_at(picture, x, y):
    return picture.getpixel((x, y))


def test_numbers_are_those_of_the_run(comfy_server):
    graph, report, stats = graph_with_report(gate=0.9, ignore="blocks.2.self_attn")
    run = comfy_server.run(graph)
    text, sites = text_of(run, report), run.ui(stats)["sites"]
    mine = [site for site in sites if site["role"] == "self"]
    counted = [site for site in mine if site["skipped"] is not None]
    skipped, total = sum(s["skipped"] for s in counted), sum(s["total"] for s in counted)
    assert total > skipped > 0

    ran = row(text, "What ran", "self")
    assert ran["calls"] == str(sum(s["calls"] for s in mine)) and ran["layers"] == "6"
    assert ran["sparse calls"] == str(sum(s["sparse_calls"] for s in mine)) == "5"  # 1 step, 5 layers
    assert ran["ran"] == "REFERENCE x 18"
    assert ran["asked for"] == "REFERENCE; λ = 2; gate t = 0.9; ignoring blocks.2.self_attn"
    gave = row(text, "What it gave", "self")
    assert gave["tiles of sparse calls"] == f"{total:,}" and gave["skipped"] == f"{skipped / total:.1%}"
    # all self calls of this model are of one size: 1 sparse call in ... of the role's work
    shares = [s["skipped"] / s["total"] for s in counted]
    assert gave["saved"] == f"{sum(shares) / 2 / len(mine):.1%}"
    assert all(re.fullmatch(r"[\d.,]+ m?s", gave[column]) for column in ("time", "a dense call", "a sparse call"))
    assert "ComfyUI " in text and "the CPU" in text and "torch " in text


def test_files_and_preview_go_where_comfyui_saves(comfy_server):
    graph, report, _ = graph_with_report(prefix="deep/er/%year%", probe=False)
    run = comfy_server.run(graph)
    (picture,) = run.files(report, "images")
    assert picture.is_file() and "%" not in str(picture) and picture.parent.name == "er"
    assert picture.with_suffix(".md").read_text(encoding="utf-8") == text_of(run, report)
    with Image.open(picture) as image:
        assert image.width == 1280 and "prompt" in image.info


def test_the_heat_map_is_grey_before_the_gate_and_coloured_after(comfy_server):
    graph, report, _ = graph_with_report(gate=0.9, ignore="blocks.2.self_attn", probe=False)
    run = comfy_server.run(graph)
    picture = Image.open(run.files(report, "images")[0]).convert("RGB")
    grey, steps = (188, 194, 201), (280, 590, 1010)  # a pixel in each of the three columns
    rows = [126 + 26 * layer + 4 for layer in range(6)]
    for layer, y in enumerate(rows):
        dense = [colour_at(picture, x, y) == grey for x in steps]
        assert dense == [True, True, layer == 2], (layer, dense)


def test_a_target_is_set_beside_what_was_achieved(comfy_server):
    folder = comfy_server.workspace / "models" / "skip_softmax"
    folder.mkdir(parents=True, exist_ok=True)
    Calibration(a=300.0, b=2.0, ignore=("*cross_attn*",)).save(folder / "report.json")

    def calibrated(graph):
        curve = graph.add("TRTLLMLoadCalibration", name="report.json", component="transformer", path="")
        return graph.add(
            "TRTLLMSkipSoftmax", mode="calibrated", threshold=0.0, target_sparsity=0.4, calibration=curve
        )

    graph = Graph()
    model = graph.load(TRAINED)
    node = graph.add(
        "TRTLLMAttentionPatch", model=model, backend="REFERENCE", token_order="cubes", skip_softmax=calibrated(graph)
    )
    sampled = graph.sample(node, "wan_t2v", steps=1, cfg=1.0, **SMALL)
    report = graph.add("TRTLLMAttentionReport", samples=sampled, stats=node[1], filename_prefix="reports/target")
    text = text_of(comfy_server.run(graph), report)
    gave = row(text, "What it gave", "self")
    assert gave["requested"] == "40%" and "%" in gave["skipped"]
    assert row(text, "What ran", "self")["asked for"] == "REFERENCE; target sparsity 40%"
    assert row(text, "What ran", "cross")["sparse calls"] == "0"
    assert "cross: Skip-Softmax was asked for and no call used it: all of its layers are ignored" in text


def test_never_called(comfy_server):
    def replaced(graph, node):
        return graph.add("TestForeignForward", model=node)

    graph, report, _ = graph_with_report(before=replaced, probe=False, prefix="reports/never")
    text = text_of(comfy_server.run(graph), report)
    assert "**The patch was never called" in text and "## What ran" not in text


def test_no_run_yet(comfy_server):
    graph = Graph()
    node = patch(graph, graph.load("wan_t2v"), threshold=0.5)
    report = graph.add(
        "TRTLLMAttentionReport", samples=graph.latent("wan_t2v"), stats=node[1], filename_prefix="reports/none"
    )
    run = comfy_server.run(graph)
    assert "No run yet" in text_of(run, report) and run.files(report, "images")[0].is_file()


def test_a_report_linked_after_the_run_says_so_and_the_next_run_counts(comfy_server):
    graph, report, _ = graph_with_report(seed=901, threshold=1.5, probe=False)
    without = {key: value for key, value in graph.prompt().items() if key != report.id}
    for node in without.values():
        for name, value in node["inputs"].items():
            if isinstance(value, list) and value[0] == report.id:
                sampler = next(k for k, v in without.items() if v["class_type"] == "KSampler")
                node["inputs"] = {**node["inputs"], name: [sampler, 0]}
    comfy_server.run(without)
    graph, report, _ = graph_with_report(seed=901, threshold=1.5, probe=False)
    first = text_of(comfy_server.run(graph), report)
    assert "times were not recorded in this run" in first.lower()
    assert row(first, "What it gave", "self")["time"] == "-"
    graph, report, _ = graph_with_report(seed=902, threshold=1.5, probe=False)
    second = text_of(comfy_server.run(graph), report)
    gave = row(second, "What it gave", "self")
    assert "not recorded" not in second and gave["time"] != "-" and "%" in gave["skipped"]
    assert "## Runs of this patch" in second


def test_calls_left_to_comfyui_are_listed_with_the_reason(comfy_server):
    def foreign(graph, node):
        return graph.add("TestForeignOverride", model=node, tag="report", keyword="new_keyword")

    graph, report, _ = graph_with_report(before=foreign, probe=False, prefix="reports/declined")
    text = text_of(comfy_server.run(graph), report)
    assert "| keyword new_keyword | 36 |" in text
    assert "36 more left to ComfyUI" in text


def test_a_gate_that_never_opens_is_explained(comfy_server):
    graph, report, _ = graph_with_report(gate=0.05, probe=False)
    assert "no call used it: the gate kept every step dense" in text_of(comfy_server.run(graph), report)


@pytest.fixture(scope="module")
def report_parts(pack):
    """(report_text, report_picture, wires, stats, device) of the pack."""
    names = ("nodes.report_text", "nodes.report_picture", "nodes.wires", "trtllm_core.stats", "trtllm_core.device")
    return [importlib.import_module(f"{pack.__name__}.{name}") for name in names]


def made_up_run(stats, layers, steps, reached=None, counted=True):
    """Self calls of `layers` layers that skip half of their tiles from the third step on."""
    run = stats.RunStats(count_tiles=True, steps=steps)
    for step in range(reached or steps):
        for layer in range(layers):
            site = run.site(f"double_blocks.{layer}", "self", step, 1 - step / steps)
            site.calls, site.work, site.seconds = 2, 2 * 10**12, 0.02
            site.backends["TRITON_ATTN/hopper"] += 2
            if step >= 2:
                site.sparse_calls, site.sparse_work, site.total_tiles = 2, 2 * 10**12, 100
                site.skipped_tiles = 50 if counted else None
    return run


def holder_of(wires, device, *runs):
    patch = SimpleNamespace(settings_for=lambda role: (wires.RoleSettings(), "default"), device=device)
    return wires.StatsHolder(runs=list(runs), patch=patch)


def test_a_run_that_ended_early_a_gpu_and_its_kernel_are_named(report_parts):
    text, _, wires, stats, device = report_parts
    gpu = device.Device("cuda", (9, 0), "NVIDIA H200", cudnn=91002, packages={"triton": "3.6.0"})
    holder = holder_of(wires, gpu, made_up_run(stats, 2, 20), made_up_run(stats, 2, 20, reached=5))
    words = text.report(holder)
    assert "Ended at step 5 of 20" in words.split("\n")[2]
    assert row(words, "What ran", "self")["ran"] == "TRITON_ATTN/hopper x 20"
    assert "NVIDIA H200 (sm_90), torch" in words and "cuDNN 91002, triton 3.6.0" in words
    assert "| -1 | 20 steps | 80 | 72 | 50.0% |" in words
    gave = row(words, "What it gave", "self")
    assert (gave["work"], gave["saved"], gave["time"]) == ("20 TFLOP", "15.0%", "200 ms")
    assert gave["a sparse call"] == "10 ms"


def test_a_backend_that_cannot_count_and_compilation_are_said(report_parts):
    text, _, wires, stats, device = report_parts
    run = made_up_run(stats, 4, 5, counted=False)
    next(iter(run.sites.values())).seconds = 30.0
    words = text.report(holder_of(wires, device.Device("cuda", (9, 0)), run))
    assert "self: TRITON_ATTN/hopper cannot count skipped tiles" in words
    assert "self: 30 s of its time are beyond calls times their median" in words
    assert row(words, "What it gave", "self")["skipped"] == "-"


@pytest.mark.parametrize("layers, steps, height", [(6, 3, 500), (40, 50, 1100), (200, 1000, 1200)])
def test_a_picture_of_any_size_is_readable_and_quick(report_parts, layers, steps, height):
    _, picture, _, stats, _ = report_parts
    run = made_up_run(stats, layers, steps)
    started = time.perf_counter()
    drawn = picture.draw(run, "title", "subtitle", {"self": 0.99})
    assert drawn.shape[2] == 1280 and drawn.shape[1] < height
    assert time.perf_counter() - started < 60
    last = drawn[0, picture.TOP + picture.HEADER + 2, picture.LEFT + picture.PLOT - 2] * 255
    assert last.tolist() == pytest.approx([53, 162, 159], abs=1)


@pytest.mark.parametrize("prefix", ["../outside", "/outside"])
def test_no_file_outside_the_output_folder(comfy_server, prefix):
    from harness.server import PromptError

    graph, _, _ = graph_with_report(prefix=prefix, probe=False)
    with pytest.raises(PromptError, match="outside the output folder"):
        comfy_server.run(graph)


def test_a_report_without_a_patch_passes_the_samples_on(comfy_server):
    # a bypassed patch takes its stats with it: the picture must still come out
    graph = Graph()
    sampled = graph.sample(graph.load("wan_t2v"), "wan_t2v", steps=1, cfg=1.0)
    report = graph.add("TRTLLMAttentionReport", samples=sampled, filename_prefix="none")
    saved = graph.save(report)
    finished = comfy_server.run(graph)
    assert "No statistics are wired" in finished.ui(report)["text"][0]
    assert finished.latent(saved).std() > 0.1


def test_a_report_says_when_its_run_is_of_an_earlier_prompt(comfy_server):
    graph = Graph()
    model = graph.load("wan_t2v")
    patched = graph.add("TRTLLMAttentionPatch", model=model, backend="REFERENCE", token_order="cubes")
    sampled = graph.sample(patched, "wan_t2v", steps=1, cfg=1.0, seed=77)
    report = graph.add("TRTLLMAttentionReport", samples=sampled, stats=patched[1], filename_prefix="one")
    assert "not sampled in this prompt" not in comfy_server.run(graph).ui(report)["text"][0]
    graph.nodes[sampled.id]["inputs"]["model"] = [model.id, 0]  # past the patch
    assert "not sampled in this prompt" in comfy_server.run(graph).ui(report)["text"][0]


def test_a_replaced_patch_says_so(comfy_server):
    graph = Graph()
    first = graph.add(
        "TRTLLMAttentionPatch", model=graph.load("wan_t2v"), backend="REFERENCE", token_order="cubes"
    )
    second = graph.add("TRTLLMAttentionPatch", model=first, backend="TORCH_SDPA", token_order="cubes")
    sampled = graph.sample(second, "wan_t2v", steps=1, cfg=1.0, seed=78)
    report = graph.add("TRTLLMAttentionReport", samples=sampled, stats=first[1], filename_prefix="two")
    finished = comfy_server.run(graph)
    assert "took this patch's place" in finished.ui(report)["text"][0]
    assert "replaces an earlier one" in finished.log


def test_a_report_of_an_earlier_run_begins_with_saying_so(comfy_server):
    """A patch that was in effect in one prompt and is replaced in the next."""
    graph = Graph()
    first = graph.add("TRTLLMAttentionPatch", model=graph.load("wan_t2v"), backend="REFERENCE", token_order="cubes")
    sampled = graph.sample(first, "wan_t2v", steps=1, cfg=1.0, seed=79)
    report = graph.add("TRTLLMAttentionReport", samples=sampled, stats=first[1], filename_prefix="three")
    comfy_server.run(graph)
    second = graph.add("TRTLLMAttentionPatch", model=first, backend="TORCH_SDPA", token_order="cubes")
    graph.nodes[sampled.id]["inputs"]["model"] = [second.id, 0]
    lines = comfy_server.run(graph).ui(report)["text"][0].splitlines()
    assert "not sampled in this prompt" in lines[2] and "took this patch's place" in lines[4]
    graph.nodes[sampled.id]["inputs"]["model"] = [first.id, 0]
    graph.nodes[sampled.id]["inputs"]["seed"] = 80
    assert "not sampled" not in comfy_server.run(graph).ui(report)["text"][0]


def test_a_role_that_the_model_does_not_have_is_said(comfy_server):
    graph = Graph()
    role = graph.add("TRTLLMAttentionRole", role="wan.imge_cross", backend="TORCH_SDPA")
    patched = graph.add(
        "TRTLLMAttentionPatch", model=graph.load("wan_i2v"), backend="TORCH_SDPA", token_order="cubes", roles=role
    )
    graph.save(graph.sample(patched, "wan_i2v", steps=1, cfg=1.0))
    log = comfy_server.run(graph).log
    assert "role 'wan.imge_cross' matches no attention of this model, did you mean 'wan.image_cross'?" in log
