"""Compile shipped configurations for one GPU, without having it, and print what the compiler says as JSON lines.

usage: python compile_report.py CAPABILITY, e.g. 86. Triton must not be interpreting.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from trtllm_core.kernels import has_fp8, kernel_config, unsupported
from trtllm_core.kernels.attention_kernel import attention_kernel
from trtllm_core.kernels.configs import padded_head_dim
from trtllm_core.kernels.quantize_kernels import quantize_tokens_kernel, quantize_value_kernel, statistics_kernel
from trtllm_core.specs import AttnQuantSpec

ELEMENTS = {None: "bf16", "int8": "i8", "fp8_e4m3": "fp8e4nv"}


def compile_kernel(kernel, capability, types, constants, **options):
    """The compiled kernel; types: argument name to Triton type, 'constexpr' for the rest."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or "stride" in name
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    return triton.compile(source, target=target, options={**options, "enable_fp_fusion": True})


def resources(compiled):
    """Registers, stack bytes (spills) and shared memory of a compiled kernel."""
    cuobjdump = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [cuobjdump, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),
        "shared": compiled.metadata.shared,
    }


def attention(capability, head_dim, quant, skip):
    config = kernel_config(capability, head_dim, quant, skip)
    sage = quant is not None
    fp8_value = sage and has_fp8(capability)
    padded = padded_head_dim(head_dim)
    qk, value = ELEMENTS[quant.dtype_qk if sage else None], "fp8e4nv" if fp8_value else "bf16"
    types = {"output": "*bf16", "key_lengths": "*i32", "skipped": "*i64", "scale": "fp32", "threshold": "fp32"}
    types |= dict.fromkeys(("query_scale", "key_scale", "value_scale", "value_mean"), "*fp32")
    types |= dict.fromkeys(("query_length", "key_length", "query_groups", "key_groups"), "i32")
    blocks = {
        "query": (qk, config.block_m, padded),
        "key": (qk, config.block_n, padded),
        "value": (value, padded, config.block_n) if fp8_value else (value, config.block_n, padded),
    }
    for name, (element, rows, columns) in blocks.items():
        types[name] = f"tensordesc<{element}[1, 1, {rows}, {columns}]>" if config.tma else f"*{element}"
        types |= {f"{name}_stride_{axis}": "i32" for axis in ("batch", "head", "row")}
    constants = dict(
        HEAD_DIM=head_dim, PADDED_DIM=padded, GROUP=1, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        Q_BLOCK=quant.q_block_size if sage else 1, K_BLOCK=quant.k_block_size if sage else 0, FP8_VALUE=fp8_value,
        SKIP=skip, OWN_FIRST=True, COUNT=skip, LENGTHS=False, TMA=config.tma,
        HARDWARE_VOTE=skip and config.hardware_vote,
    )
    options = dict(num_warps=config.warps, num_stages=config.stages)
    if config.registers:
        options["maxnreg"] = config.registers
    return compile_kernel(attention_kernel, capability, types, constants, **options)


def quantization(capability, head_dim, dtype_qk):
    """The three passes over Q, K and V."""
    pointers = dict.fromkeys(("key", "value", "source"), "*bf16")
    pointers |= dict.fromkeys(("partial", "mean", "out_scale", "scale"), "*fp32")
    pointers |= {"key_lengths": "*i32", "lengths": "*i32", "out": "*" + ELEMENTS[dtype_qk]}
    integers = ("key_length", "length", "groups", "padded_length", "stride_batch", "stride_row", "stride_head")
    types = pointers | dict.fromkeys(integers, "i32")
    types |= {f"{x}_stride_{axis}": "i32" for x in ("key", "value") for axis in ("batch", "row", "head")}
    shape = dict(HEAD_DIM=head_dim, PADDED_DIM=padded_head_dim(head_dim), LENGTHS=False)
    yield compile_kernel(statistics_kernel, capability, types, shape | dict(CHUNK=1024, BLOCK=64, KEY=True))
    yield compile_kernel(
        quantize_tokens_kernel, capability, types, shape | dict(BLOCK=128, TOKENS=16, MEAN=True), num_warps=8
    )
    if has_fp8(capability):
        types["out"] = "*fp8e4nv"
        yield compile_kernel(quantize_value_kernel, capability, types, shape | dict(BLOCK=128), num_warps=8)


def main():
    capability = divmod(int(sys.argv[1]), 10)
    for head_dim in (64, 80, 128, 256):
        for dtype_qk in (None, "int8", "fp8_e4m3"):
            quant = dtype_qk and AttnQuantSpec(dtype_qk=dtype_qk)
            if unsupported(capability, "bfloat16", head_dim, quant):
                continue
            for skip in (False, True):
                report = resources(attention(capability, head_dim, quant, skip))
                print(json.dumps({"head_dim": head_dim, "qk": dtype_qk, "skip": skip, **report}), flush=True)
            if quant and head_dim == 128:
                for compiled in quantization(capability, head_dim, dtype_qk):
                    name = compiled.metadata.name
                    print(json.dumps({"kernel": name, "qk": dtype_qk, **resources(compiled)}), flush=True)


if __name__ == "__main__":
    main()
