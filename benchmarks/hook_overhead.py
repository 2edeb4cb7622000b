"""What the patch adds to one attention call: python benchmarks/hook_overhead.py

Calls a Wan self-attention module of one token and minimal width, unpatched and through the patch with
backend TORCH_SDPA in turn, so that nothing but Python is left to measure. Needs a ComfyUI checkout
(COMFYUI_PATH) and the packages of requirements-dev.txt.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "comfy"))

from harness import location, pack_import  # noqa: E402

CALLS = 500
ROUNDS = 40


def seconds_per_call(forward, *args, **kwargs) -> float:
    started = time.process_time()
    for _ in range(CALLS):
        forward(*args, **kwargs)
    return (time.process_time() - started) / CALLS


def main() -> None:
    pack_import.enable_comfyui()
    pack = pack_import.import_pack()
    import importlib

    import comfy.cli_args

    comfy.cli_args.args.use_pytorch_cross_attention = True  # the attention that TORCH_SDPA equals
    import comfy.ops
    from comfy.ldm.wan.model import WanSelfAttention

    def part(path):
        return importlib.import_module(f"{pack.__name__}.{path}")

    layers, install, run_module, wires = map(
        part, ("nodes.hook.layers", "nodes.hook.install", "nodes.hook.run", "nodes.wires")
    )
    settings = wires.RoleSettings.of("TORCH_SDPA")
    run = run_module.PatchRun(
        settings,
        {},
        part("trtllm_core.device").Device.current("cpu"),
        token_order="cubes",
        holder=wires.StatsHolder(),
        count_tiles=False,
    )
    run.start(torch.tensor([1.0, 0.0]))
    operations = {"operations": comfy.ops.disable_weight_init, "device": "cpu", "dtype": torch.float32}
    module = WanSelfAttention(8, 1, operation_settings=operations)
    module.requires_grad_(False)
    layer = layers.Layer("blocks.0.self_attn", "blocks.0.self_attn", ("self",), 8)
    override = install._layer_override([install._site(run, layer.name, role) for role in layer.roles])
    patched = install._wrap_forward(module.forward, override)
    x = torch.zeros(1, 1, 8)
    freqs = torch.zeros(1, 1, 1, 4, 2, 2)
    options = {"sigmas": torch.ones(1)}
    torch.set_num_threads(1)
    times = {"unpatched": [], "patched": []}
    for forward in (module.forward, patched):
        seconds_per_call(forward, x, freqs, transformer_options=options)
    for _ in range(ROUNDS):
        for name, forward in (("unpatched", module.forward), ("patched", patched)):
            times[name].append(seconds_per_call(forward, x, freqs, transformer_options=options))
    median = {name: statistics.median(values) * 1e6 for name, values in times.items()}
    added = statistics.median(p - u for p, u in zip(times["patched"], times["unpatched"])) * 1e6
    print(f"ComfyUI {location.comfyui_version()}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    print("| forward of one Wan self-attention, 1 token | CPU µs |\n| --- | --- |")
    for name, value in median.items():
        print(f"| {name} | {value:.1f} |")
    print(f"| added by the patch (median of {ROUNDS} paired rounds) | {added:.1f} |")


if __name__ == "__main__":
    main()
