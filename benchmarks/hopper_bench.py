"""The Hopper kernels against FlashAttention-3 on the synthetic video workload: time and error, in one run.

    python benchmarks/hopper_bench.py [--sizes 75k 32k] [--seconds 0.7] [--variants] [--count] [--only "skip .01"]

Quantization, the permutation into cubes and back, and the look for NaN in V are inside the times. Other libraries
stand in the table where they are installed (peers.py); FlashAttention-3's bf16 time in the same run is 1.00.
The error is the mean over the heads that attention_bench.py samples too; "worst head" is the largest of ten.
--variants times the configurations that were not chosen as well. A mode whose error is over its limit gets no time, and the command fails.
"""

import argparse
import pathlib
import sys

import torch
import triton

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent), str(pathlib.Path(__file__).resolve().parent)]
from peers import peers  # noqa: E402
from timing import median_ms  # noqa: E402
from workload import GRIDS, SampledRows, video_heads  # noqa: E402

from trtllm_core.kernels import tile_count  # noqa: E402
from trtllm_core.kernels.hopper import HopperConfig, hopper_attention, hopper_config  # noqa: E402
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


def peer_rows(tensors, rows, spread, seconds):
    """(name, ms, error, worst head's error) of every peer; what one raised stands in its name, without numbers."""
    for name, run in peers(*tensors):
        try:
            output = run()
            errors = rows.error(output), max(spread.errors(output))
            yield name, median_ms(run, seconds=seconds), *errors
        except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:  # a peer that cannot run here
            yield f"{name}: {str(error).splitlines()[0][:80]}", None, None, None


def describe(config):
    """A configuration in a few characters."""
    flags = "".join(f", {name}" for name in ("on_demand", "turns") if getattr(config, name))
    return f"{config.consumers} consumers, stages {config.k_stages}/{config.v_stages}{flags}"


def our_row(name, quant, threshold, cubes, config, tensors, order, rows, spread, seconds, count):
    """(name, ms, error, worst head's error, share of skipped tiles) of one mode and configuration."""
    skipped = torch.zeros(1, dtype=torch.int64, device="cuda")

    def run(counter=None):
        inputs = [order.apply(tensor) for tensor in tensors] if cubes else tensors
        output = hopper_attention(*inputs, threshold=threshold, quant=quant, skipped=counter, config=config)
        return order.undo(output) if cubes else output

    output = run(skipped)
    error, worst = rows.error(output), max(spread.errors(output))
    tokens, heads, _ = tensors[0].shape[1:]
    total = tile_count((64, config.keys), batch=1, heads=heads, query_length=tokens, key_length=tokens)
    share = skipped.item() / total
    return name, median_ms(lambda: run(skipped if count else None), seconds=seconds), error, worst, share


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
    parser.add_argument("--count", action="store_true", help="count skipped tiles inside the times, as a report does")
    parser.add_argument("--only", nargs="+", help="modes by name, without the other libraries")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    wrong = [problem for size in options.sizes for problem in table(size, options)]
    if wrong:
        sys.exit("; ".join(wrong))


def table(size, options):
    """Print the table of one size; returns what was wrong."""
    tensors = video_heads(GRIDS[size], options.heads)
    rows, spread = SampledRows(*tensors), SampledRows(*tensors, heads=10)
    order = TokenOrder(GRIDS[size], device="cuda")
    tokens = tensors[0].shape[1]
    flop = 4 * tokens * tokens * 128 * options.heads
    base, wrong = None, []
    title = f"{tokens:,} tokens x {options.heads} heads x 128, bf16"
    print(f"\n| {title} | ms | of FA3 | TFLOP/s-equivalent | error | worst head | tiles skipped |")
    print("| --- | --- | --- | --- | --- | --- | --- |")

    def show(name, ms, error, worst, skipped=""):
        ratio = f"{ms / base:.3f}" if base else ""
        print(f"| {name} | {ms:.2f} | {ratio} | {flop / ms / 1e9:.0f} | {error:.2e} | {worst:.2e} | {skipped} |", flush=True)

    for name, ms, error, worst in () if options.only else peer_rows(tensors, rows, spread, options.seconds):
        if ms is None:
            print(f"| {name} | | | | | | |", flush=True)
            continue
        if name.startswith("FlashAttention-3 bf16"):
            base = ms
        show(name, ms, error, worst)
    for *mode, config, limit in modes(options.variants):
        if options.only and mode[0] not in options.only:
            continue
        name, ms, error, worst, skipped = our_row(
            *mode, config, tensors, order, rows, spread, options.seconds, options.count
        )
        if error <= limit:
            show(name, ms, error, worst, f"{skipped:.3f}")
        else:
            wrong.append(f"{name} at {tokens} tokens: error {error:.2e} over {limit:.2e}")
    return wrong


if __name__ == "__main__":
    main()
