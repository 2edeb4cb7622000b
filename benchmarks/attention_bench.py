"""Time the portable kernels against FlashAttention-3 on the synthetic video heads, and print a Markdown table.

usage: python benchmarks/attention_bench.py [--grid 32k|75k] [--heads 40] [--head-dim 128] [--threshold 0.01]
Quantization, and the permutation into cubes and back, are inside every time. Prints no table if any result is wrong.
"""

import argparse
import pathlib
import platform
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from peers import peers
from timing import median_ms
from workload import GRIDS, SampledRows, video_heads

from trtllm_core.kernels import tile_count, tile_shape, triton_attention, unsupported
from trtllm_core.specs import AttnQuantSpec
from trtllm_core.token_order import TokenOrder

INT8, FP8 = AttnQuantSpec(dtype_qk="int8"), AttnQuantSpec(dtype_qk="fp8_e4m3")
BASELINES = ("FlashAttention-3 bf16", "PyTorch, cuDNN")
# what each mode may err by on this workload before its time means nothing; λ adds its own
LIMITS = {None: 3e-3, INT8: 5e-2, FP8: 6e-2}


def ours(grid, threshold, capability, head_dim):
    """Every mode of the portable kernels: (name, quant, threshold or None, function of q, k, v)."""
    order = TokenOrder(grid, device="cuda")

    def mode(quant, level):
        def run(q, k, v, skipped=None):
            if level is None:
                return triton_attention(q, k, v, quant=quant)
            q, k, v = order.apply(q), order.apply(k), order.apply(v)
            return order.undo(triton_attention(q, k, v, quant=quant, threshold=level, skipped=skipped))

        return run

    for quant, label in ((None, ""), (INT8, "SAGE int8"), (FP8, "SAGE fp8")):
        if unsupported(capability, "bfloat16", head_dim, quant):
            continue
        for level in (None, 0.0, threshold / 10, threshold):
            parts = [label] if label else []
            if level is not None:
                parts.append(f"skip λ={level:g}")
            yield " + ".join(parts) or "dense", quant, level, mode(quant, level)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grid", choices=GRIDS, default="75k")
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--threshold", type=float, default=0.01)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    grid = GRIDS[arguments.grid]
    q, k, v = video_heads(grid, arguments.heads, arguments.head_dim)
    tokens = q.shape[1]
    capability = torch.cuda.get_device_capability()
    rows = SampledRows(q, k, v)
    operations = 4 * tokens**2 * arguments.head_dim * arguments.heads

    results, wrong = [], []
    for name, function in peers(q, k, v):
        if name not in BASELINES:  # hopper_bench.py has them all
            continue
        results.append((name, median_ms(function, arguments.repeats), rows.error(function()), None))
    reference = results[0][1]
    for name, quant, level, function in ours(grid, arguments.threshold, capability, arguments.head_dim):
        counter = torch.zeros(1, dtype=torch.int64, device="cuda") if level is not None else None
        error = rows.error(function(q, k, v) if level is None else function(q, k, v, counter))
        sparsity = None
        if level is not None:
            tile = tile_shape(capability, arguments.head_dim, quant, True)
            total = tile_count(tile, batch=1, heads=arguments.heads, query_length=tokens, key_length=tokens)
            sparsity = counter.item() / total
        if not error <= LIMITS[quant] + (0.1 if level else 0):
            wrong.append(f"{name}: error {error:.2e}")
        results.append((name, median_ms(lambda: function(q, k, v), arguments.repeats), error, sparsity))
    if wrong:
        sys.exit("wrong results, no table: " + "; ".join(wrong))

    import triton

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, Python "
          f"{platform.python_version()}; {tokens:,} tokens, {arguments.heads} heads x {arguments.head_dim}, bfloat16\n")
    print(f"| kernel | ms | time / {results[0][0]} | TFLOP/s, as if dense | error | tiles skipped |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, ms, error, sparsity in results:
        share = "" if sparsity is None else f"{sparsity:.1%}"
        print(f"| {name} | {ms:.2f} | {ms / reference:.3f} | {operations / ms / 1e9:.0f} | {error:.2e} | {share} |")


if __name__ == "__main__":
    main()
