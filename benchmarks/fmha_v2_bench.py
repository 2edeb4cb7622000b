"""FMHA_V2 on a Hopper GPU: compile minutes, milliseconds and error of dense and Skip-Softmax.

    python benchmarks/fmha_v2_bench.py            table of times and errors
    python benchmarks/fmha_v2_bench.py --fp16     and what the fp16 kernels do, which are not used
    python benchmarks/fmha_v2_bench.py --compile  only compile, and say how long it took

Prints Markdown; refuses to report where an output is wrong.
"""

import argparse
import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from benchmarks.peers import flash_attention_3  # noqa: E402
from benchmarks.timing import median_ms  # noqa: E402
from benchmarks.workload import GRIDS, SampledRows, video_heads  # noqa: E402
from trtllm_core import reference  # noqa: E402
from trtllm_core.backends import AttentionCall, fmha_v2  # noqa: E402
from trtllm_core.device import Device  # noqa: E402
from trtllm_core.token_order import TokenOrder  # noqa: E402

HEADS = 40
DENSE_LIMIT = 5e-3
SKIP_LIMIT = 2e-2  # against the reference, which skips by the same rule
THRESHOLDS = (None, 0.01, 0.05)


def timed(call):
    """Milliseconds of a call and its output."""
    return median_ms(call, warm_up=2), call()


def adapter(query, key, value, threshold=None):
    return fmha_v2.run(AttentionCall(query, key, value, scale=128**-0.5, threshold=threshold))


def direct(query, key, value):
    """FlashInfer's function with everything prepared, for what the adapter adds."""
    tokens = query.shape[1]
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=query.device)
    q, k, v = (x[0] for x in (query, key, value))
    buffer = torch.zeros(16 << 20, dtype=torch.uint8, device=query.device)
    return lambda: fmha_v2._attention(
        (q, k, v), "SEPARATE_Q_K_V", buffer, starts[1:], tokens, tokens, 128**-0.5, 1.0, 1, starts, starts,
        mask_mode="padding",
    )  # fmt: skip


def row(*cells):
    print("| " + " | ".join(str(c) for c in cells) + " |", flush=True)


def report(name, tokens, ms, error, limit, sparsity="-"):
    if not error <= limit:
        sys.exit(f"{name} at {tokens} tokens is wrong: relative error {error:.3g} over {limit:g}")
    row(name, f"{tokens:,}", f"{ms:.1f}", f"{error:.1e}", sparsity)


def check_skipping(tensors, out, threshold, tokens):
    """Compare one head with the reference under the kernel's own rule; returns its sparsity."""
    head = tuple(x[:, :, :1].float() for x in tensors)
    expected, stats = reference.attention(
        *head, threshold=threshold, tile=(64, 128), kv_order="sequential"
    )
    difference = float((out[:, :, :1].float() - expected).norm() / expected.norm())
    if not difference <= SKIP_LIMIT:
        sys.exit(f"λ={threshold} at {tokens} tokens is {difference:.3g} off the reference")
    return f"{stats.sparsity:.0%}"


def table(grids, with_fp16):
    row("kernel", "tokens", "ms", "error to fp64", "skipped (head 0)")
    row(*["---"] * 5)
    for grid in grids:
        query, key, value = video_heads(grid, HEADS)
        tokens = query.shape[1]
        rows = SampledRows(query, key, value)
        order = TokenOrder(grid, device="cuda")
        cubes = tuple(order.apply(x) for x in (query, key, value))
        for threshold in THRESHOLDS:
            name = "FMHA_V2 dense" if threshold is None else f"FMHA_V2 λ={threshold:g}"
            for kind, tensors in (("raster", (query, key, value)), ("cubes", cubes)):
                taken, out = timed(lambda: adapter(*tensors, threshold))
                sparsity = "-" if threshold is None else check_skipping(tensors, out, threshold, tokens)
                error = rows.error(order.undo(out) if kind == "cubes" else out)
                limit = DENSE_LIMIT if threshold is None else 1.0
                report(f"{name}, {kind}", tokens, taken, error, limit, sparsity)
        taken, _ = timed(lambda: order.undo(adapter(*(order.apply(x) for x in (query, key, value)), 0.05)))
        row("FMHA_V2 λ=0.05, cubes, permuting included", f"{tokens:,}", f"{taken:.1f}", "as above", "as above")
        taken, out = timed(direct(query, key, value))
        report("FlashInfer called directly, dense", tokens, taken, rows.error(out[None]), DENSE_LIMIT)
        del cubes, out
        others(query, key, value, tokens, rows)
        del query, key, value, rows
        if with_fp16:
            half_precision(grid)


def half_precision(grid):
    """What float16 inputs become in the fp16 kernels, and cast to bfloat16."""
    query, key, value = video_heads(grid, HEADS, dtype=torch.float16)
    rows = SampledRows(query, key, value)
    tokens = f"{query.shape[1]:,}"
    taken, out = timed(direct(query, key, value))
    row("fp16 inputs, fp16 kernel", tokens, f"{taken:.1f}", f"{rows.error(out[None]):.1e}", "-")
    taken, out = timed(lambda: adapter(*(x.to(torch.bfloat16) for x in (query, key, value))))
    row("fp16 inputs, cast to bf16", tokens, f"{taken:.1f}", f"{rows.error(out):.1e}", "-")


def others(query, key, value, tokens, rows):
    """What else is installed, on the same tensors."""
    function = flash_attention_3()
    if function is None:
        print("(FlashAttention-3 is not installed)")
        return
    taken, out = timed(lambda: function(query, key, value))
    report("FlashAttention-3", tokens, taken, rows.error(out), DENSE_LIMIT)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--grids", nargs="+", choices=GRIDS, default=list(GRIDS))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    device = Device.current()
    fmha_v2.load(device)
    start = time.perf_counter()
    fmha_v2.prepare()
    print(f"kernels ready after {time.perf_counter() - start:.1f} s", flush=True)
    if arguments.compile:
        return
    small = torch.randn(1, 256, 4, 128, device="cuda", dtype=torch.bfloat16)
    start = time.perf_counter()
    adapter(small, small, small)
    torch.cuda.synchronize()
    print(f"first call after that: {1e3 * (time.perf_counter() - start):.0f} ms")
    flashinfer = device.packages.get("flashinfer")
    print(f"{device.label}, torch {device.torch}, flashinfer {flashinfer}, {HEADS} heads x 128\n")
    table([GRIDS[name] for name in arguments.grids], arguments.fp16)


if __name__ == "__main__":
    main()
