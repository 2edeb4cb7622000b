"""Write docs/images/nodes.png, the drawn nodes side by side: python scripts/make_screenshots.py

Needs what make_workflows.py needs. The patch is shown after a run of the small trained Wan of assets/.
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
    """One node as a picture; it gets the width of a comfortable read first."""
    node = front.ids(node_type)[0]
    front.js("id => { const n = app.graph.getNodeById(id); n.setSize([360, n.computeSize()[1]]); }", node)
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


def main():
    """The command line of the module's docstring."""
    models = location.CACHE / "models" / f"stock-{location.comfyui_version()}"
    link = models / "diffusion_models" / trained_wan.FILE
    if not link.exists():
        link.symlink_to(trained_wan.ASSETS / trained_wan.FILE)
    with tempfile.TemporaryDirectory() as workspace:
        packs = {"test_nodes": location.TEST_PACK, "trtllm-attention": ROOT}
        with ComfyServer(workspace, packs=packs, models=models) as server, Browser() as browser:
            pictures = take(browser.open(server))
    sheet = Image.new("RGB", (sum(p.width + GAP for p in pictures), max(p.height for p in pictures)), (32, 32, 32))
    x = GAP // 2
    for picture in pictures:
        sheet.paste(picture, (x, 0))
        x += picture.width + GAP
    target = ROOT / "docs" / "images" / "nodes.png"
    target.parent.mkdir(parents=True, exist_ok=True)
    sheet.quantize(128).save(target, optimize=True)


if __name__ == "__main__":
    main()
