"""Sample the small trained Wan twice in a real ComfyUI, dense and patched, and compare: python demo.py.

One seed, the same graph; the second run has Skip-Softmax, its gate and SAGE quantization. Writes
demo/demo.png (dense, patched, difference), demo/tiles.png (what was skipped) and demo/report.md. Runs on the GPU if there is one.
"""

import platform
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "comfy"))

from harness import location, trained_wan  # noqa: E402
from harness.graphs import Graph  # noqa: E402
from harness.server import ComfyServer  # noqa: E402

OUTPUT = ROOT / "demo"
WORKSPACE = location.CACHE / "demo"
STEPS, SEED = 20, 3
VIDEO = {"count": "2", "colour": "red", "shape": "disc"}
THRESHOLD, DISABLED_UNTIL = 0.1, 0.9
QUANT = {"dtype_qk": "int8", "q_block_size": "1", "k_block_size": "16"}

FRAME_PIXELS, GAP, LABEL_HEIGHT, AMPLIFICATION = 128, 4, 22, 16


def graph_of(patched, steps):
    """The prompt, the node that saves the latent, and with `patched` the one that reports."""
    graph = Graph()
    model = trained_wan.load(graph)
    if not patched:
        return graph, graph.save(trained_wan.sample(graph, model, seed=SEED, steps=steps, **VIDEO)), None
    gate = graph.add(
        "TRTLLMTimestepGate", disabled_until_timestep=DISABLED_UNTIL, steps=steps,
        scheduler=trained_wan.SAMPLING["scheduler"], denoise=1.0, model=model,
    )  # fmt: skip
    skip = graph.add("TRTLLMSkipSoftmax", mode="threshold", threshold=THRESHOLD, gate=gate)
    patch = graph.add(
        "TRTLLMAttentionPatch", model=model, backend="auto", token_order="cubes",
        quant=graph.add("TRTLLMSageQuant", **QUANT), skip_softmax=skip,
    )  # fmt: skip
    sampled = trained_wan.sample(graph, patch, seed=SEED, steps=steps, **VIDEO)
    report = graph.add("TRTLLMAttentionReport", samples=sampled, stats=patch[1])
    return graph, graph.save(report), report


def picture_of(rows, path):
    """Rows of (label, frames [frames, height, width, 3] in 0..1) as one PNG, frames side by side."""
    import torch
    from PIL import Image, ImageDraw, ImageFont

    count = rows[0][1].shape[0]
    row_height = LABEL_HEIGHT + FRAME_PIXELS + GAP
    width = count * (FRAME_PIXELS + GAP) + GAP
    picture = Image.new("RGB", (width, len(rows) * row_height + GAP), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(size=14)
    for row, (label, frames) in enumerate(rows):
        top = row * row_height
        draw.text((GAP, top + 3), label, fill="black", font=font)
        for column, frame in enumerate((frames * 255).round().to(torch.uint8).numpy()):
            tile = Image.fromarray(frame).resize((FRAME_PIXELS, FRAME_PIXELS), Image.Resampling.NEAREST)
            picture.paste(tile, (GAP + column * (FRAME_PIXELS + GAP), top + LABEL_HEIGHT))
    picture.save(path)


def commit():
    """The commit of this checkout, or "unknown" outside git."""
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip() or "unknown"


def markdown(server, runs, steps, decibels, report):
    """The text of report.md."""
    system, device = server.system, server.get("/system_stats")["devices"][0]["name"]
    lines = [
        "# TRTLLM Attention: demo",
        "",
        "Written by `make demo`. The same seed sampled twice: dense, and with the patch.",
        "",
        f"- date: {date.today().isoformat()}, commit {commit()}",
        f"- ComfyUI {system['comfyui_version']}, torch {system['pytorch_version']}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        f"- device: {device}",
        "- model: the small trained Wan 2.1 of assets/ (6 blocks, 3 heads of 128), 8 x 16 x 16 tokens, "
        f"{steps} steps, seed {SEED}, {VIDEO['count']} x {VIDEO['colour']} {VIDEO['shape']}",
        f"- patch: backend auto, token order cubes, Skip-Softmax threshold {THRESHOLD}, "
        f"dense while t > {DISABLED_UNTIL}, SAGE {QUANT['dtype_qk']}",
        "",
        "| run | seconds |",
        "| --- | --- |",
        *[f"| {name} | {run.seconds:.1f} |" for name, run in runs.items()],
        "",
        f"PSNR of the patched pictures against the dense ones: {decibels:.1f} dB.",
        "",
        "On a CPU the patched run uses the reference, plain PyTorch that computes every tile and then",
        "leaves out what would be skipped: its seconds say nothing about a GPU.",
        "",
        "![dense, patched, difference](demo.png)",
        "",
        "![tiles skipped by layer and step](tiles.png)",
        "",
        report.strip(),
        "",
    ]
    return "\n".join(lines)


def compare(server, output, steps=STEPS):
    """Run both graphs on `server` and write the three files into `output`; returns the PSNR in dB."""
    runs, pictures = {}, {}
    for name in ("dense", "patched"):
        graph, saved, report = graph_of(name == "patched", steps)
        runs[name] = server.run(graph, timeout=1200)
        pictures[name] = trained_wan.to_rgb(runs[name].latent(saved))
        print(f"{name}: {steps} steps in {runs[name].seconds:.0f} s", flush=True)
    decibels = trained_wan.psnr(pictures["patched"], pictures["dense"])
    report_text = "\n".join(runs["patched"].ui(report)["text"])
    difference = ((pictures["patched"] - pictures["dense"]).abs() * AMPLIFICATION).clamp(0, 1)
    rows = [
        ("dense", pictures["dense"]),
        (f"patched: Skip-Softmax + gate + SAGE, {decibels:.1f} dB", pictures["patched"]),
        (f"difference x {AMPLIFICATION}", difference),
    ]
    output.mkdir(exist_ok=True)
    shutil.copy(runs["patched"].files(report, "images")[0], output / "tiles.png")
    picture_of(rows, output / "demo.png")
    (output / "report.md").write_text(markdown(server, runs, steps, decibels, report_text))
    return decibels


def main():
    """Start ComfyUI with the pack and the trained model, and compare; returns the PSNR in dB."""
    import torch

    shutil.rmtree(WORKSPACE, ignore_errors=True)
    models = WORKSPACE / "checkpoints" / "diffusion_models"
    models.mkdir(parents=True)
    (models / trained_wan.FILE).symlink_to(trained_wan.ASSETS / trained_wan.FILE)
    packs = {"test_nodes": location.TEST_PACK, "trtllm-attention": ROOT}
    with ComfyServer(WORKSPACE, packs, models.parent, cpu=not torch.cuda.is_available()) as server:
        print(f"ComfyUI {server.system['comfyui_version']} started in {server.start_seconds:.0f} s", flush=True)
        decibels = compare(server, OUTPUT)
    print(f"{decibels:.1f} dB; see {OUTPUT.name}/demo.png and {OUTPUT.name}/report.md")
    return decibels


if __name__ == "__main__":
    main()
