"""Does a calibrated curve keep its promise? Requested against achieved sparsity on held-out runs.

    python benchmarks/calibration_check.py

Calibrates the trained tiny Wan in the real ComfyUI, then samples with the saved curve: other seeds,
another prompt class (colour and shape never calibrated) and another grid. Prints a Markdown table and
fails where the achieved sparsity is further than `--limit` from the request. Needs a ComfyUI checkout
(COMFYUI_PATH). On a CPU use small grids: --calibrate 8x16x16 --held-out 8x16x24 --steps 8.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "comfy"))

from harness import location  # noqa: E402
from harness.graphs import Graph  # noqa: E402
from harness.server import ComfyServer, PromptError  # noqa: E402

MODEL = "tiny_wan21_t2v.safetensors"
CALIBRATED = (("1", "red", "disc"), ("2", "green", "disc"))  # prompt classes: count, colour, shape
HELD_OUT = ("3", "blue", "square")
TARGETS = (0.3, 0.5, 0.7)


def sample(graph, model, grid: str, prompt, seed: int, steps: int):
    """A KSampler on `grid` ("frames x rows x columns" of tokens) with the trained conditioning."""
    frames, rows, columns = (int(n) for n in grid.split("x"))
    count, colour, shape = prompt
    text = graph.add("TestTrainedConditioning", count=count, colour=colour, shape=shape)
    latent = graph.latent("wan_t2v", width=columns * 16, height=rows * 16, length=frames * 4 - 3)
    return graph.add(
        "KSampler", model=model, latent_image=latent, seed=seed, steps=steps, cfg=3.0, sampler_name="euler",
        scheduler="simple", denoise=1.0, positive=text, negative=text[1],
    )  # fmt: skip


def calibrate(server, options) -> None:
    """Sample every calibration grid with every calibrated prompt, then save the curve of all runs."""
    runs = [(grid, prompt) for grid in options.calibrate for prompt in CALIBRATED]
    for seed, (grid, prompt) in enumerate(runs, start=1):
        graph = Graph()  # begins with the nodes of the run before: ComfyUI keeps them, and their counts
        model = graph.add("ModelSamplingSD3", model=graph.load(MODEL), shift=5.0)
        node = graph.add("TRTLLMCalibrate", model=model, count_as=options.token_order)
        samples = sample(graph, node, grid, prompt, seed, options.steps)
        graph.save(samples)
        if seed == len(runs):
            save = graph.add("TRTLLMSaveCalibration", run=node[1], samples=samples, filename="check")
        run = server.run(graph, timeout=options.timeout)
    print(run.ui(save)["text"][0].splitlines()[0])
    saved = json.loads((server.workspace / "models" / "skip_softmax" / "check.json").read_text())
    block = saved["sparse_attention_config"]
    curve = block["config_groups"]["group_0"]["threshold_scale_factor"]["coefficients"]
    notes = block["trtllm_attention"]
    print(f"a = {curve['a']:.5g}, b = {curve['b']:.4f}, R squared {notes['r_squared']:.3f}, tile {notes['tile']}\n")


def achieved(server, options, grid: str, prompt, seed: int, target: float) -> tuple[float, str]:
    graph = Graph()
    model = graph.add("ModelSamplingSD3", model=graph.load(MODEL), shift=5.0)
    curve = graph.add("TRTLLMLoadCalibration", name="check.json", component="transformer", path="")
    skip = graph.add("TRTLLMSkipSoftmax", mode="calibrated", threshold=0.0, target_sparsity=target, calibration=curve)
    patch = graph.add(
        "TRTLLMAttentionPatch", model=model, backend=options.backend, token_order=options.token_order, skip_softmax=skip
    )
    sampled = sample(graph, patch, grid, prompt, seed, options.steps)
    report = graph.add("TestStatsReport", samples=sampled, stats=patch[1])
    graph.save(sampled)
    sites = server.run(graph, timeout=options.timeout).ui(report)["sites"]
    sites = [site for site in sites if site["sparse_calls"]]
    backends = sorted({name for site in sites for name in site["backends"]})
    return sum(s["skipped"] for s in sites) / sum(s["total"] for s in sites), "+".join(backends)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibrate", nargs="+", default=["12x24x24", "12x40x40"], help="grids, in tokens")
    parser.add_argument("--held-out", nargs="+", default=["16x40x40"], help="grids, in tokens")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--token-order", default="cubes", choices=("cubes", "sequential"))
    parser.add_argument("--backend", default="TRITON_ATTN" if torch.cuda.is_available() else "REFERENCE")
    parser.add_argument("--limit", type=float, default=0.07)
    parser.add_argument("--timeout", type=float, default=1800)
    options = parser.parse_args()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    worst = 0.0
    with tempfile.TemporaryDirectory() as models, tempfile.TemporaryDirectory() as workspace:
        (Path(models) / "diffusion_models").symlink_to(location.ROOT / "assets")
        packs = {"pack": location.ROOT, "test_nodes": location.TEST_PACK}
        cpu = not torch.cuda.is_available()
        with ComfyServer(workspace, packs, models=models, cpu=cpu) as server:
            print(f"{gpu}, torch {torch.__version__}, ComfyUI {location.comfyui_version()}, {options.steps} steps")
            try:
                calibrate(server, options)
            except PromptError as error:
                print(f"no calibration: {error.message}")
                return 1
            cases = [("a calibrated run again", options.calibrate[0], CALIBRATED[0], 1)]
            cases += [("held out", grid, HELD_OUT, 1000) for grid in options.held_out]
            print("| run | grid | backend | requested | achieved | off by |")
            print("| --- | --- | --- | --- | --- | --- |", flush=True)
            for name, grid, prompt, seed in cases:
                for target in TARGETS:
                    share, backend = achieved(server, options, grid, prompt, seed, target)
                    worst = max(worst, abs(share - target))
                    row = f"| {name} | {grid} | {backend} | {target:.2f} | {share:.3f} | {share - target:+.3f} |"
                    print(row, flush=True)
    if worst > options.limit:
        print(f"off by {worst:.3f}, more than {options.limit:g}")
    return 1 if worst > options.limit else 0


if __name__ == "__main__":
    sys.exit(main())
