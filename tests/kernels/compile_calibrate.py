"""Compile the calibration kernel for every architecture; prints `capability shared-memory-bytes`, the
most that one of its tiles takes.

Usage: compile_calibrate.py REPOSITORY. Needs no GPU, and must not run in Triton's interpreter.
"""

import sys

sys.path.insert(0, sys.argv[1])

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trtllm_core.kernels import calibrate

TILES, DIM, TRIALS = ((128, 128), (128, 64), (64, 128)), 128, 22
CONSTANTS = {
    **{"BLOCK_M": 0, "BLOCK_N": 0, "TILES": 0, "HEAD_DIM": DIM, "PADDED_DIM": DIM, "GROUPS": 1},
    **{"TRIALS": TRIALS, "PADDED_TRIALS": calibrate.padded(TRIALS), "OWN_FIRST": True},
}
ARGUMENTS = {
    **{"query": "*bf16", "key": "*bf16", "log_thresholds": "*fp32", "counts": "*i64", "scale": "fp32"},
    **{name: "i32" for name in ("q_length", "k_length", "q_token", "q_head", "k_token", "k_head")},
    **{"q_batch": "i64", "k_batch": "i64"},
    **{name: "constexpr" for name in CONSTANTS},
}
names = calibrate.count_kernel.arg_names
signature = {name: ARGUMENTS[name] for name in names}
aligned = [i for i, name in enumerate(names) if "_" not in name[:2] and signature[name][0] == "*"]
aligned += [i for i, name in enumerate(names) if name[:2] in ("q_", "k_") and "length" not in name]
for capability in (80, 86, 89, 90, 100, 120):
    shared = []
    for tile in TILES:
        together = calibrate.tiles_together(tile, own_first=True)
        source = ASTSource(
            fn=calibrate.count_kernel,
            signature=signature,
            constexprs={**CONSTANTS, "BLOCK_M": tile[0], "BLOCK_N": tile[1], "TILES": together},
            attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
        )
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target, options=calibrate.launch_options(DIM))
        shared.append(compiled.metadata.shared)
    print(capability, max(shared))
