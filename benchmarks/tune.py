"""Time candidate tiles of the attention kernel on this GPU and print the fastest as a line for kernels/configs.py.

usage: python benchmarks/tune.py [--mode dense|skip|int8|fp8|int8+skip|fp8+skip] [--head-dim 128] [--grid 32k] [--tma]
A candidate that does not compile, does not fit or is wrong is listed as such and never chosen.
"""

import argparse
import itertools
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from timing import median_ms
from workload import GRIDS, SampledRows, video_heads

from trtllm_core.kernels import KernelConfig, kernel_config, triton_attention
from trtllm_core.specs import AttnQuantSpec
from trtllm_core.token_order import TokenOrder

QUANTS = {"int8": AttnQuantSpec(dtype_qk="int8"), "fp8": AttnQuantSpec(dtype_qk="fp8_e4m3")}
LIMITS = {"dense": 3e-3, "skip": 0.1, "int8": 5e-2, "fp8": 6e-2}


def candidates(tma):
    """Tiles that keep a program's accumulator and scores in registers, with and without room for a second program."""
    for block_m, block_n, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3)):
        if block_m // (16 * warps) == 0 or block_m * block_n > 64 * 64 * warps:
            continue
        for registers in (None, 128) if tma else (None,):
            yield KernelConfig(block_m, block_n, warps, stages, registers, tma, hardware_vote=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("dense", "skip", "int8", "fp8", "int8+skip", "fp8+skip"), default="dense")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--grid", choices=GRIDS, default="32k")
    parser.add_argument("--threshold", type=float, default=0.01)
    parser.add_argument("--tma", action="store_true", help="tensor descriptors, for Hopper and later")
    arguments = parser.parse_args()
    parts = arguments.mode.split("+")
    quant = QUANTS.get(parts[0])
    threshold = arguments.threshold if "skip" in parts else None
    limit = sum(LIMITS[part] for part in parts)
    order = TokenOrder(GRIDS[arguments.grid], device="cuda")
    q, k, v = (order.apply(x) for x in video_heads(GRIDS[arguments.grid], arguments.heads, arguments.head_dim))
    rows = SampledRows(q, k, v)

    shipped = kernel_config(torch.cuda.get_device_capability(), arguments.head_dim, quant, threshold is not None)
    timed = []
    for config in dict.fromkeys([shipped, *candidates(arguments.tma)]):

        def run(config=config):
            return triton_attention(q, k, v, quant=quant, threshold=threshold, config=config)

        try:
            error = rows.error(run())
        except Exception as failure:  # a compiler's or driver's refusal, of any type: it is printed, not chosen
            print(f"{config}: {type(failure).__name__}: {str(failure)[:80]}")
            continue
        if not error <= limit:
            print(f"{config}: wrong, error {error:.2e}")
            continue
        ms = median_ms(run)
        timed.append((ms, config))
        print(f"{config}: {ms:.2f} ms, error {error:.2e}", flush=True)
    ms, best = min(timed, key=lambda pair: pair[0])
    print(f"\n# {torch.cuda.get_device_name()}, {arguments.mode}, {q.shape[1]:,} tokens, {arguments.heads} heads x "
          f"{arguments.head_dim}: {ms:.2f} ms\nreturn {best!r}")


if __name__ == "__main__":
    main()
