"""Write docs/images/nodes.png and more_nodes.png, every node as it looks: python scripts/make_screenshots.py

Needs what make_workflows.py needs. Patch, Report, Compare and the calibration nodes are shown after a run of the small
trained Wan of assets/.
"""

import io
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "comfy"), str(ROOT / "tests" / "browser")]

from frontend import Browser  # noqa: E402
from harness import location, trained_wan  # noqa: E402
from harness.graphs import Graph  # noqa: E402
from harness.server import ComfyServer  # noqa: E402

STOCK = "wan2.1_t2v_1.3B_fp16.safetensors"
GAP = 16


def attention(graph, model, steps, patterns):
    """Gate, ignore list, Skip-Softmax and patch on `model`; returns the patch."""
    gate = graph.add(
        "TRTLLMTimestepGate", disabled_until_timestep=0.9, steps=steps, scheduler="simple", denoise=1.0, model=model
    )
    ignore = graph.add("TRTLLMLayerIgnoreList", patterns=patterns, model=model)
    skip = graph.add(
        "TRTLLMSkipSoftmax", mode="threshold", threshold=0.05, target_sparsity=0.5, gate=gate, ignore=ignore
    )
    return graph.add(
        "TRTLLMAttentionPatch", model=model, backend="REFERENCE", token_order="cubes", skip_softmax=skip
    )


def shot(front, node_type):
    """One node as a picture; it gets the width of a comfortable read, and a place to itself, first."""
    node = front.ids(node_type)[0]
    front.js(
        "id => { const n = app.graph.getNodeById(id); n.setSize([360, n.computeSize()[1]]); n.pos = [id * 1000, -9000]; }",
        node,
    )
    front.look_at(node)
    return Image.open(io.BytesIO(front.page.screenshot(clip=front.box(node)))).convert("RGB")


def take(front):
    """The pictures, in order."""
    graph = Graph()
    model = graph.add("ModelSamplingSD3", model=graph.load(STOCK), shift=8.0)
    attention(graph, model, 30, "blocks.0.self_attn\nblocks.29.self_attn\nblocks.1?.cross_attn")
    front.load_api(front.server.fit(graph.prompt()))
    front.settle(1000)
    pictures = [shot(front, f"TRTLLM{name}") for name in ("TimestepGate", "LayerIgnoreList", "SkipSoftmax")]
    graph = Graph()
    patched = attention(graph, trained_wan.load(graph), 6, "blocks.0.self_attn")
    graph.save(trained_wan.sample(graph, patched, steps=6, seed=int(time.time())))
    front.load_api(front.server.fit(graph.prompt()))
    front.run(timeout=400)
    front.settle(1000)
    return [*pictures, shot(front, "TRTLLMAttentionPatch")]


def take_more(front):
    """The other nodes, after a run that uses them all."""
    graph = Graph()
    model = trained_wan.load(graph)
    sampling = {"steps": 6, "seed": int(time.time())}
    counted = graph.add("TRTLLMCalibrate", model=model, count_as="cubes")
    dense = trained_wan.sample(graph, counted, **sampling)
    saved = graph.add("TRTLLMSaveCalibration", run=counted[1], samples=dense, filename="screenshot")
    quant = graph.add(
        "TRTLLMSageQuant", dtype_qk="int8", q_block_size="1", k_block_size="16", dtype_vo="default",
        flashinfer_backend="",
    )  # fmt: skip
    skip = graph.add(
        "TRTLLMSkipSoftmax", mode="calibrated", threshold=0.01, target_sparsity=0.4, calibration=saved
    )
    cross = graph.add("TRTLLMAttentionRole", role="cross", backend="TORCH_SDPA")
    patched = graph.add(
        "TRTLLMAttentionPatch", model=model, backend="REFERENCE", token_order="cubes", quant=quant,
        skip_softmax=skip, roles=cross,
    )  # fmt: skip
    sparse = trained_wan.sample(graph, patched, **sampling)
    graph.add("TRTLLMAttentionReport", samples=sparse, stats=patched[1], filename_prefix="screenshot")
    graph.add("TRTLLMCompare", samples_a=dense, samples_b=sparse)
    config = graph.add("TRTLLMAttentionConfig", config='{"default": {"backend": "auto",\n  "skip_softmax": {"threshold": 0.01}}}')
    graph.add("PreviewAny", source=config)
    graph.add("TRTLLMLoadCalibration", name="screenshot.json", component="transformer", path="")
    front.load_api(front.server.fit(graph.prompt()))
    front.run(timeout=600)
    front.settle(1500)
    names = ("SageQuant", "AttentionRole", "AttentionConfig", "Calibrate", "SaveCalibration", "LoadCalibration")
    return [shot(front, f"TRTLLM{name}") for name in (*names, "AttentionReport", "Compare")]


def write_sheet(pictures, name, columns):
    """Pictures in rows of `columns` as docs/images/NAME."""
    rows = [pictures[i : i + columns] for i in range(0, len(pictures), columns)]
    width = max(sum(p.width + GAP for p in row) for row in rows)
    heights = [max(p.height for p in row) + GAP for row in rows]
    sheet = Image.new("RGB", (width, sum(heights)), (32, 32, 32))
    for top, row in zip((sum(heights[:i]) for i in range(len(rows))), rows):
        x = GAP // 2
        for picture in row:
            sheet.paste(picture, (x, top))
            x += picture.width + GAP
    target = ROOT / "docs" / "images" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    sheet.quantize(128).save(target, optimize=True)


def main():
    """The command line of the module's docstring."""
    models = location.CACHE / "models" / f"stock-{location.comfyui_version()}"
    link = models / "diffusion_models" / trained_wan.FILE
    if not link.exists():
        link.symlink_to(trained_wan.ASSETS / trained_wan.FILE)
    with tempfile.TemporaryDirectory() as workspace:
        packs = {"test_nodes": location.TEST_PACK, "trtllm-attention": ROOT}
        with ComfyServer(workspace, packs=packs, models=models) as server, Browser() as browser:
            front = browser.open(server)
            write_sheet(take(front), "nodes.png", 4)
            write_sheet(take_more(front), "more_nodes.png", 4)


if __name__ == "__main__":
    main()
