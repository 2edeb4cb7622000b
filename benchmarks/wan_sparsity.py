"""What the two exact reorderings are worth on a trained model's own attention: python benchmarks/wan_sparsity.py

Samples the small trained Wan in the real ComfyUI, takes q, k and v of its self-attention at four sigmas, and prints
how many tiles Skip-Softmax skips at an error of 0.3%, 1% and 3% of the attention output (relative L2 over all layers,
heads and sigmas): TensorRT-LLM's order against cubes that start at their own place. Tiles are those of the kernel that
would run here; without a GPU the reference counts. Needs a ComfyUI checkout (COMFYUI_PATH).
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "comfy")]

from harness import location, trained_wan  # noqa: E402
from harness.graphs import Graph  # noqa: E402
from harness.server import ComfyServer  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from trtllm_core import reference  # noqa: E402
from trtllm_core.token_order import TokenOrder  # noqa: E402

THRESHOLDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 0.6)
ERRORS = (0.003, 0.01, 0.03)
TILE = (128, 64)


def captured(grid, steps: int) -> list[tuple[torch.Tensor, ...]]:
    """(q, k, v) [1, tokens, heads, head_dim], float32 numbers of bf16, of every layer and sigma of one run on `grid`."""
    with tempfile.TemporaryDirectory() as workspace:
        models = Path(workspace) / "checkpoints" / "diffusion_models"
        models.mkdir(parents=True)
        (models / trained_wan.FILE).symlink_to(trained_wan.ASSETS / trained_wan.FILE)
        packs = {"test_nodes": location.TEST_PACK}
        with ComfyServer(Path(workspace) / "base", packs, models.parent, cpu=not torch.cuda.is_available()) as server:
            graph = Graph()
            model = graph.add("TestCaptureAttention", model=trained_wan.load(graph), name="captured")
            graph.save(trained_wan.sample(graph, model, seed=3, steps=steps, grid=grid))
            server.run(graph, timeout=3600)
            tensors = load_file(server.output_directory / "captured.safetensors")
    calls = sorted({key.rpartition(".")[0] for key in tensors})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [tuple(tensors[f"{call}.{letter}"][None].to(device).bfloat16().float() for letter in "qkv") for call in calls]


def sparse(q, k, v, threshold: float, kv_order: str):
    """(output, skipped tiles, all tiles) of one call."""
    if not torch.cuda.is_available():
        out, stats = reference.attention(q, k, v, threshold=threshold, tile=TILE, kv_order=kv_order)
        return out, stats.skipped, stats.total
    from trtllm_core.backends import AttentionCall, load_module

    backend = load_module("TRITON_ATTN")
    skipped = torch.zeros(1, dtype=torch.int64, device="cuda")
    half = (x.bfloat16() for x in (q, k, v))
    call = AttentionCall(*half, scale=q.shape[-1] ** -0.5, threshold=threshold, kv_order=kv_order, skipped=skipped)
    return backend.run(call).float(), int(skipped), backend.tile_count(call)


def curve(calls, grid, cubes: bool) -> list[tuple[float, float]]:
    """(error, sparsity) over all calls for every threshold."""
    order = TokenOrder(grid, device=calls[0][0].device) if cubes else None
    kv_order = "own_first" if cubes else "sequential"
    sums = [[0.0] * 4 for _ in THRESHOLDS]  # squared error, squared norm, tiles skipped, tiles
    for q, k, v in calls:
        dense = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        dense = dense.transpose(1, 2)
        inputs = [order.apply(x) for x in (q, k, v)] if cubes else (q, k, v)
        for threshold, total in zip(THRESHOLDS, sums):
            out, *tiles = sparse(*inputs, threshold, kv_order)
            out = order.undo(out) if cubes else out
            for i, term in enumerate((float((out - dense).square().sum()), float(dense.square().sum()), *tiles)):
                total[i] += term
    return [(math.sqrt(lost / norm), skipped / tiles) for lost, norm, skipped, tiles in sums]


def at_error(points, error: float) -> float | None:
    """Sparsity at `error`, linear in the logarithm of the error between two thresholds."""
    for (low, below), (high, above) in zip(points, points[1:]):
        if low <= error <= high and low > 0:
            share = math.log(error / low) / math.log(high / low) if high > low else 0.0
            return below + share * (above - below)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grid", default="12x40x40", help="frames x rows x columns of tokens")
    parser.add_argument("--steps", type=int, default=25)
    options = parser.parse_args()
    grid = tuple(int(n) for n in options.grid.split("x"))
    calls = captured(grid, options.steps)
    kernel = f"{torch.cuda.get_device_name()}, TRITON_ATTN" if torch.cuda.is_available() else f"CPU, reference, tiles {TILE}"
    print(f"{kernel}, torch {torch.__version__}, ComfyUI {location.comfyui_version()}")
    print(f"{options.grid} tokens, {options.steps} steps, {len(calls)} calls of {calls[0][0].shape[2]} heads\n")
    raster, cubes = curve(calls, grid, cubes=False), curve(calls, grid, cubes=True)
    print("| error | sequential, raster | own first, cubes | times as many |\n| --- | --- | --- | --- |")
    for error in ERRORS:
        a, b = at_error(raster, error), at_error(cubes, error)
        shown = [f"{x:.1%}" if x is not None else "out of range" for x in (a, b)]
        print(f"| {error:.1%} | {shown[0]} | {shown[1]} | {f'{b / a:.2f}' if a and b else '-'} |")


if __name__ == "__main__":
    main()
