"""Compile every shipped Hopper configuration for compute capability 9.0, without a GPU.

    python tests/kernels/compile_hopper.py

Prints a line of JSON for each: its name, shared memory, stack bytes, spill stores, and which matrix instructions it has.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

import triton

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from trtllm_core.kernels import hopper  # noqa: E402
from trtllm_core.specs import AttnQuantSpec  # noqa: E402

NAMES = {"bfloat16": "bf16", "float16": "fp16", "float8e4nv": "fp8e4nv", "int8": "i8"}
SPECS = {
    "none": None,
    "fp8-k16": AttnQuantSpec(dtype_qk="fp8_e4m3"),
    "int8-k16": AttnQuantSpec(dtype_qk="int8"),
    "int8-k4": AttnQuantSpec(dtype_qk="int8", k_block_size=4),
    "fp8-k1": AttnQuantSpec(dtype_qk="fp8_e4m3", k_block_size=1),
}
CASES = [(name, skip, 128, "bfloat16", False) for name in SPECS for skip in (False, True)] + [
    ("none", True, 64, "float16", False),
    ("none", True, 128, "bfloat16", True),
    ("int8-k16", True, 64, "float16", True),
]


def compiled(spec, skip, head_dim, dtype, lengths):
    """The attention kernel as the launcher would compile it, by types alone."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from trtllm_core.kernels.hopper_attention import attention_kernel

    config = hopper.hopper_config(head_dim, spec, skip)
    inputs = dtype if spec is None else {"int8": "int8", "fp8_e4m3": "float8e4nv"}[spec.dtype_qk]
    values = dtype if spec is None else "float8e4nv"

    def descriptor(name, block):
        layout = gl.NVMMASharedLayout.get_default_for(block, getattr(gl, name))
        return f"tensordesc<{NAMES[name]}[{','.join(map(str, block))}],{layout!r}>"

    rows, keys = [1, hopper.ROWS, 1, head_dim], [1, config.keys, 1, head_dim]
    floats = None if spec is None else "*fp32"
    arguments = dict(
        query=descriptor(inputs, rows), key=descriptor(inputs, keys), output=descriptor(dtype, rows),
        value=descriptor(values, keys if spec is None else [1, 1, head_dim, config.keys]),
        q_scales=floats, k_scales=floats, v_scales=floats, v_means="*fp32" if skip else floats,
        key_lengths="*i32" if lengths else None, skipped="*i64" if skip else None,
        query_length="i32", key_length="i32", heads_per_kv="i32", own_first="i32", scale="fp32", threshold="fp32",
    )  # fmt: skip
    constants = hopper.constants(config, head_dim, spec, skip)
    constants.update({name: None for name, kind in arguments.items() if kind is None})
    names = attention_kernel.arg_names
    signature = {name: arguments.get(name) or "constexpr" for name in names}
    source = GluonASTSource(attention_kernel, signature, {(names.index(name),): x for name, x in constants.items()})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=hopper.launch_options(config))


def usage(kernel):
    """What the compiler made of it, read from the machine code."""
    tools = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        sass, resources = (
            subprocess.run([tools / "cuobjdump", option, cubin.name], capture_output=True, text=True, check=True).stdout
            for option in ("-sass", "-res-usage")
        )
    return dict(
        shared=kernel.metadata.shared, stack=int(re.search(r"STACK:(\d+)", resources)[1]),
        spill_stores=len(re.findall(r"\bSTL\b", sass)), matrix=sorted(set(re.findall(r"\b[A-Z]+GMMA\b|\b[HQI]GMMA\b", sass))),
    )  # fmt: skip


def main():
    for case in CASES:
        name, skip, head_dim, dtype, lengths = case
        found = usage(compiled(SPECS[name], skip, head_dim, dtype, lengths))
        print(json.dumps({"case": "-".join(map(str, case)), **found}), flush=True)


if __name__ == "__main__":
    main()
