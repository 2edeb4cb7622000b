"""A Wan of real shape sampled in the real ComfyUI: seconds per step and memory of each mode.

    python benchmarks/wan_in_comfyui.py --size 1.3B --video 480p --modes stock,TORCH_SDPA,skip

Random weights: their attention is nearly uniform, so Skip-Softmax skips next to nothing here and
what is measured for it is its overhead; benchmarks/attention_bench.py has it on structured scores.
Needs a ComfyUI checkout (COMFYUI_PATH); runs on the CPU where there is no GPU, for which --video tiny.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "comfy"))

from harness import location  # noqa: E402
from harness.graphs import Graph  # noqa: E402
from harness.server import ComfyServer, PromptError  # noqa: E402

VIDEOS = {"tiny": (64, 64, 5), "480p": (832, 480, 81), "720p": (1280, 720, 81)}

# mode -> (backend, dtype_qk, λ); None as backend: the stock ComfyUI without the pack
MODES = {
    "stock": (None, None, None),
    "TORCH_SDPA": ("TORCH_SDPA", None, None),
    "CUDNN_ATTN": ("CUDNN_ATTN", None, None),
    "FLASH_ATTN": ("FLASH_ATTN", None, None),
    "FLASHINFER_ATTN": ("FLASHINFER_ATTN", None, None),
    "SAGE_ATTN": ("SAGE_ATTN", None, None),
    "FMHA_V2": ("FMHA_V2", None, None),
    "FMHA_V2 skip .01": ("FMHA_V2", None, 0.01),
    "FMHA_V2 skip .05": ("FMHA_V2", None, 0.05),
    "TRITON_ATTN": ("TRITON_ATTN", None, None),
    "skip .001": ("TRITON_ATTN", None, 0.001),
    "skip .01": ("TRITON_ATTN", None, 0.01),
    "sage int8": ("TRITON_ATTN", "int8", None),
    "sage fp8": ("TRITON_ATTN", "fp8_e4m3", None),
    "sage fp8 + skip .01": ("TRITON_ATTN", "fp8_e4m3", 0.01),
    "calibrate": (None, None, None),  # dense and counting, on auto's backend
}


def graph_of(size: str, video: str, mode: str, steps: int):
    """The prompt of one mode, and the nodes to read: times, statistics (None for stock), latent."""
    backend, dtype_qk, threshold = MODES[mode]
    width, height, length = VIDEOS[video]
    graph = Graph()
    model = graph.add("TestRandomWan", size=size)
    if mode == "calibrate":
        model = graph.add("TRTLLMCalibrate", model=model, count_as="cubes")
    stats = None
    if backend is not None:
        quant = skip = None
        if dtype_qk:
            quant = graph.add(
                "TRTLLMSageQuant", dtype_qk=dtype_qk, q_block_size="1", k_block_size="16",
                dtype_vo="default", flashinfer_backend="")  # fmt: skip
        if threshold is not None:
            skip = graph.add("TRTLLMSkipSoftmax", mode="threshold", threshold=threshold, target_sparsity=0.5)
        roles = graph.add("TRTLLMAttentionRole", role="cross", backend="auto")
        model = graph.add(
            "TRTLLMAttentionPatch", model=model, backend=backend, token_order="cubes", quant=quant,
            skip_softmax=skip, roles=roles)  # fmt: skip
        stats = model[1]
    timed = graph.add("TestStepTimes", model=model)
    sampled = graph.sample(
        timed, "wan_t2v", steps=steps, cfg=1.0, width=width, height=height, length=length,
        conditioning={"tokens": 512})  # fmt: skip
    times = graph.add("TestStepTimesReport", samples=sampled)
    report = graph.add("TestStatsReport", samples=times, stats=stats) if stats else None
    saved = graph.save(sampled)
    return graph, times, report, saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="1.3B", choices=("tiny", "1.3B", "14B"))
    parser.add_argument("--video", default="480p", choices=VIDEOS)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--portable", action="store_true", help="no Hopper kernels, on a Hopper GPU either")
    parser.add_argument("--comfyui", default="", help="further arguments of ComfyUI's main.py")
    options = parser.parse_args()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    with tempfile.TemporaryDirectory() as workspace:
        packs = {"pack": location.ROOT, "test_nodes": location.TEST_PACK}
        arguments = options.comfyui.split()
        environment = {"TEST_PORTABLE_KERNELS": "1"} if options.portable else {}
        cpu = not torch.cuda.is_available()
        with ComfyServer(workspace, packs, args=arguments, cpu=cpu, environment=environment) as server:
            print(f"{gpu}, torch {torch.__version__}, ComfyUI {location.comfyui_version()}")
            print(f"Wan 2.1 {options.size}, {options.video}, random bf16 weights, {options.steps} steps, cfg 1\n")
            print("| mode | s per step | of stock | GiB before | peak GiB | differs from stock | self-attention ran on | tiles skipped |")
            print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
            stock = None
            for mode in options.modes.split(","):
                stock = measure(server, options, mode.strip(), stock) or stock


def measure(server, options, mode: str, stock):
    """Print one row; returns (seconds, latent) of the stock run, else None."""
    graph, times, report, saved = graph_of(options.size, options.video, mode, options.steps)
    try:
        run = server.run(graph, timeout=900)
    except PromptError as error:
        print(f"| {mode} | not run: {error.message.strip().splitlines()[0]} | | | | | | |", flush=True)
        return None
    seconds, held, peak = (run.ui(times)[name][0] for name in ("seconds", "held_bytes", "peak_bytes"))
    latent = run.latent(saved)
    used, share = ("auto, counting" if mode == "calibrate" else "ComfyUI"), ""
    if report is not None:
        sites = [site for site in run.ui(report)["sites"] if site["role"] == "self"]
        used = ", ".join(sorted({name for site in sites for name in site["backends"]}))
        total = sum(site["total"] for site in sites)
        share = f"{sum(site['skipped'] or 0 for site in sites) / total:.1%}" if total else ""
    ratio = difference = ""
    if stock:
        ratio = f"{seconds / stock[0]:.2f}"
        difference = f"{float((latent - stock[1]).norm() / stock[1].norm()):.1e}"
    memory = f"{held / 2**30:.1f} | {peak / 2**30:.1f}"
    print(f"| {mode} | {seconds:.3f} | {ratio} | {memory} | {difference} | {used} | {share} |", flush=True)
    return (seconds, latent) if mode == "stock" else None


if __name__ == "__main__":
    main()
