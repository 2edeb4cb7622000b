"""How near a sparse run stays to the dense one at equal sparsity, for both token orders: python benchmarks/wan_psnr.py

Samples the small trained Wan in the real ComfyUI densely, then with Skip-Softmax at several thresholds in TensorRT-LLM's
order ("sequential") and in cubes that start at their own place ("cubes"); prints the share of tiles skipped and the PSNR
of the pictures to the dense run, and both orders' PSNR at equal shares. Needs a ComfyUI checkout (COMFYUI_PATH).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "comfy"))

from harness import location, trained_wan  # noqa: E402
from harness.graphs import Graph  # noqa: E402
from harness.server import ComfyServer  # noqa: E402

THRESHOLDS = (0.001, 0.003, 0.01, 0.03, 0.06, 0.1, 0.2, 0.4)
ORDERS = ("sequential", "cubes")
SHARES = (0.2, 0.25, 0.3, 0.35, 0.4)


def sampled(server, options, order=None, threshold=None):
    """(pictures, share of tiles skipped, backend) of one run; without an order, of the stock model."""
    graph = Graph()
    model, stats = trained_wan.load(graph), None
    if order is not None:
        skip = graph.add("TRTLLMSkipSoftmax", mode="threshold", threshold=threshold, target_sparsity=0.5)
        patch = graph.add(
            "TRTLLMAttentionPatch", model=model, backend=options.backend, token_order=order, skip_softmax=skip
        )
        model, stats = patch, patch[1]
    samples = trained_wan.sample(graph, model, seed=options.seed, steps=options.steps, grid=options.grid)
    report = graph.add("TestStatsReport", samples=samples, stats=stats) if stats else None
    saved = graph.save(samples)
    run = server.run(graph, timeout=3600)
    pictures = trained_wan.to_rgb(run.latent(saved))
    if report is None:
        return pictures, 0.0, "ComfyUI"
    sites = [site for site in run.ui(report)["sites"] if site["sparse_calls"]]
    backends = sorted({name for site in sites for name in site["backends"]})
    return pictures, sum(s["skipped"] for s in sites) / sum(s["total"] for s in sites), "+".join(backends)


def at_share(points, share: float) -> float | None:
    """PSNR at a share of skipped tiles, linear between two runs; None outside of them."""
    points = sorted(points)
    for (low, below), (high, above) in zip(points, points[1:]):
        if low <= share <= high:
            return below + (share - low) / (high - low) * (above - below) if high > low else below
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="12x24x24", help="frames x rows x columns of tokens")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--backend", default="TRITON_ATTN" if torch.cuda.is_available() else "REFERENCE")
    options = parser.parse_args()
    options.grid = tuple(int(n) for n in options.grid.split("x"))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    points = {order: [] for order in ORDERS}
    with tempfile.TemporaryDirectory() as models, tempfile.TemporaryDirectory() as workspace:
        (Path(models) / "diffusion_models").symlink_to(trained_wan.ASSETS)
        packs = {"pack": location.ROOT, "test_nodes": location.TEST_PACK}
        with ComfyServer(workspace, packs, models=models, cpu=not torch.cuda.is_available()) as server:
            print(f"{gpu}, torch {torch.__version__}, ComfyUI {location.comfyui_version()}, {options.steps} steps, seed {options.seed}")
            print("\n| token order | λ | tiles skipped | PSNR to dense | backend |\n| --- | --- | --- | --- | --- |")
            dense, _, _ = sampled(server, options)
            for order in ORDERS:
                for threshold in THRESHOLDS:
                    pictures, share, backend = sampled(server, options, order, threshold)
                    points[order].append((share, trained_wan.psnr(pictures, dense)))
                    print(f"| {order} | {threshold:g} | {share:.1%} | {points[order][-1][1]:.1f} dB | {backend} |", flush=True)
    print(f"\n| tiles skipped | {' | '.join(ORDERS)} |\n| --- | --- | --- |")
    for share in SHARES:
        values = [at_share(points[order], share) for order in ORDERS]
        print(f"| {share:.0%} | {' | '.join('outside' if v is None else f'{v:.1f} dB' for v in values)} |")


if __name__ == "__main__":
    main()
