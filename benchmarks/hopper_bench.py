"""The Hopper kernels against FlashAttention-3 on the synthetic video workload: time and error, in one run.

    python benchmarks/hopper_bench.py [--sizes 75k 32k] [--seconds 0.7] [--variants]

Quantization, the permutation into cubes and back, and the look for NaN in V are inside the times. FlashAttention-3
is `fa3_fwd_interface` (pip install fa3-fwd) if it imports; its bf16 time in the same run is 1.00.
--variants times the configurations that were not chosen as well. A mode whose error is over its limit gets no time, and the command fails.
"""

import argparse
import pathlib
import statistics
import sys
import time

import torch
import triton

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent), str(pathlib.Path(__file__).resolve().parent)]
from workload import GRIDS, SampledRows, video_heads  # noqa: E402

from trtllm_core.kernels.hopper import HopperConfig, hopper_attention, hopper_config, tile_count  # noqa: E402
from trtllm_core.specs import AttnQuantSpec  # noqa: E402
from trtllm_core.token_order import TokenOrder  # noqa: E402

FP8, INT8 = AttnQuantSpec(dtype_qk="fp8_e4m3"), AttnQuantSpec(dtype_qk="int8")
# name, quant, λ, cubes, largest error that is reported
MODES = (
    ("dense", None, None, False, 3e-3),
    ("skip 0", None, 0.0, True, 3e-3),
    ("skip .001", None, 0.001, True, 4e-3),
    ("skip .01", None, 0.01, True, 6e-2),
    ("SAGE fp8", FP8, None, False, 6e-2),
    ("SAGE int8", INT8, None, False, 4.5e-2),
    ("SAGE fp8 + skip .01", FP8, 0.01, True, 8e-2),
    ("SAGE int8 + skip .01", INT8, 0.01, True, 8e-2),
)
VARIANTS = {
    "dense": (HopperConfig(), HopperConfig(k_stages=3, turns=True), HopperConfig(consumers=2, k_stages=3, v_stages=3, turns=True)),
    "skip .01": (HopperConfig(k_stages=3), HopperConfig(consumers=2, v_stages=3, on_demand=True)),
    "SAGE fp8": (HopperConfig(k_stages=4, v_stages=4, turns=True), HopperConfig(k_stages=3, v_stages=3)),
    "SAGE int8": (HopperConfig(k_stages=4, v_stages=4, turns=True), HopperConfig(k_stages=3, v_stages=3)),
    "SAGE fp8 + skip .01": (HopperConfig(k_stages=3, v_stages=4, on_demand=True),),
}


def milliseconds(function, seconds):
    """Median time of one call by CUDA events, after one warm-up call."""
    function()
    torch.cuda.synchronize()
    times, began = [], time.time()
    while len(times) < 5 or (time.time() - began < seconds and len(times) < 100):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def flash_attention_3():
    """(q, k, v) -> output of FlashAttention-3, or None."""
    try:
        from fa3_fwd_interface import flash_attn_func
    except ImportError:
        return None

    def run(query, key, value, **scales):
        result = flash_attn_func(query, key, value, **scales)
        return result[0] if isinstance(result, tuple) else result

    return run


def rival_rows(tensors, rows, seconds):
    """(name, ms, error) of FlashAttention-3 in bf16 and, with one scale per tensor, in FP8."""
    run = flash_attention_3()
    if run is None:
        return []
    found = [("FlashAttention-3 bf16", milliseconds(lambda: run(*tensors), seconds), rows.error(run(*tensors)))]
    steps = [tensor.abs().amax().float() / 448 for tensor in tensors]
    small = [(tensor / step).to(torch.float8_e4m3fn) for tensor, step in zip(tensors, steps)]
    heads = tensors[0].shape[2]
    scales = {f"{n}_descale": step.reshape(1, 1).expand(1, heads) for n, step in zip("qkv", steps)}
    name = "FlashAttention-3 fp8, quantization not included"
    found.append((name, milliseconds(lambda: run(*small, **scales), seconds), rows.error(run(*small, **scales))))
    return found


def describe(config):
    """A configuration in a few characters."""
    flags = "".join(f", {name}" for name in ("on_demand", "turns") if getattr(config, name))
    return f"{config.consumers} consumers, stages {config.k_stages}/{config.v_stages}{flags}"


def our_row(name, quant, threshold, cubes, config, tensors, order, rows, seconds):
    """(name, ms, error, share of skipped tiles) of one mode and configuration."""
    skipped = torch.zeros(1, dtype=torch.int64, device="cuda")

    def run(counter=None):
        inputs = [order.apply(tensor) for tensor in tensors] if cubes else tensors
        output = hopper_attention(*inputs, threshold=threshold, quant=quant, skipped=counter, config=config)
        return order.undo(output) if cubes else output

    error = rows.error(run(skipped))
    tokens, heads, _ = tensors[0].shape[1:]
    total = tile_count((64, config.keys), batch=1, heads=heads, query_length=tokens, key_length=tokens)
    return name, milliseconds(run, seconds), error, skipped.item() / total


def modes(variants):
    """(name, quant, λ, cubes, configuration, limit) of every row."""
    for name, quant, threshold, cubes, limit in MODES:
        yield name, quant, threshold, cubes, hopper_config(128, quant, threshold is not None), limit
        for config in VARIANTS.get(name, ()) if variants else ():
            yield f"{name}: {describe(config)}", quant, threshold, cubes, config, limit


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["75k", "32k"], choices=list(GRIDS))
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.7, help="of timing per row")
    parser.add_argument("--variants", action="store_true")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    wrong = []
    for size in options.sizes:
        tensors = video_heads(GRIDS[size], options.heads)
        rows = SampledRows(*tensors, heads=4)
        order = TokenOrder(GRIDS[size], device="cuda")
        tokens = tensors[0].shape[1]
        flop = 4 * tokens * tokens * 128 * options.heads
        rivals = rival_rows(tensors, rows, options.seconds)
        base = rivals[0][1] if rivals else None
        print(f"\n| {tokens:,} tokens x {options.heads} heads x 128, bf16 | ms | of FA3 | TFLOP/s-equivalent | error | tiles skipped |")
        print("| --- | --- | --- | --- | --- | --- |")
        for name, ms, error in rivals:
            print(f"| {name} | {ms:.2f} | {ms / base:.3f} | {flop / ms / 1e9:.0f} | {error:.2e} | |", flush=True)
        for *mode, config, limit in modes(options.variants):
            name, ms, error, sparsity = our_row(*mode, config, tensors, order, rows, options.seconds)
            if not error <= limit:
                wrong.append(f"{name} at {tokens} tokens: error {error:.2e} over {limit:.2e}")
                continue
            ratio = f"{ms / base:.3f}" if base else "FA3 not installed"
            print(f"| {name} | {ms:.2f} | {ratio} | {flop / ms / 1e9:.0f} | {error:.2e} | {sparsity:.3f} |", flush=True)
        del tensors, rows
    if wrong:
        sys.exit("; ".join(wrong))


if __name__ == "__main__":
    main()
