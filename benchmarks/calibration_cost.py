"""What counting for a calibration costs: `python -m benchmarks.calibration_cost` on one GPU.

Times the counting kernel beside the platform's best dense attention on the same q, k and v, for the
skip rule of ModelOpt and that of this GPU's Skip-Softmax kernel. "calibrating" is dense attention and
counting (and, for cubes, permuting q and k) over dense attention alone: an upper bound for a whole
sampling run, which does other things too (`wan_in_comfyui.py --modes stock,calibrate` times that).
Fails if the counts differ from the PyTorch reference, or if calibrating an attention call costs more
than `--limit` times a dense one.
"""

from __future__ import annotations

import argparse
import platform
import sys

import torch
import triton

from benchmarks.timing import median_ms
from benchmarks.workload import GRIDS, video_heads
from trtllm_core.api import plan
from trtllm_core.backends import AttentionCall
from trtllm_core.calibration_counts import TRIAL_THRESHOLDS, count_skipped_tiles, reference_count
from trtllm_core.device import Device
from trtllm_core.skip_rule import SkipRule, skip_rule
from trtllm_core.specs import AttentionSpec
from trtllm_core.token_order import TokenOrder


def check(query, key, rule: SkipRule) -> str:
    """"" if the kernel counts what PyTorch counts on one head, up to rounding at a threshold."""
    query, key = query[:, :, :1], key[:, :, :1]
    scale = query.shape[-1] ** -0.5
    rules = (TRIAL_THRESHOLDS, rule.tile, rule.kv_order)
    expected = reference_count(query, key, scale, *rules)
    counts = count_skipped_tiles(query, key, tile=rule.tile, kv_order=rule.kv_order)
    off = ((counts - expected).abs() / expected.max().clamp(min=1)).max().item()
    return f"counts differ by {off:.1%} of the tiles" if off > 1e-3 else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grids", nargs="+", default=list(GRIDS), choices=list(GRIDS))
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--limit", type=float, default=2.0)
    options = parser.parse_args()
    device = Device.current()
    dense = plan(AttentionSpec(), device, head_dim=128, dtype=torch.bfloat16).active
    print(f"{device.name}, torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}")
    print(f"{options.heads} heads x 128, bfloat16; dense attention: {dense.backend}\n")
    print("| tokens | rule | dense ms | counting ms | calibrating / dense |")
    print("| --- | --- | --- | --- | --- |")
    rules = [SkipRule(), skip_rule("TRITON_ATTN", device, 128, "cubes")]
    worst, wrong = 0.0, []
    for name in options.grids:
        query, key, value = video_heads(GRIDS[name], options.heads)
        order = TokenOrder(GRIDS[name], device=query.device)

        def attend():
            return dense.compute(AttentionCall(query, key, value, scale=128**-0.5))

        for rule in rules:
            q, k = query, key
            if rule.token_order == "cubes":
                q, k = order.apply(query), order.apply(key)
            problem = check(q, k, rule)
            if problem:
                wrong.append(f"{name}, {rule}: {problem}")
            del q, k

            def count():
                q, k = query, key
                if rule.token_order == "cubes":
                    q, k = order.apply(query), order.apply(key)
                return count_skipped_tiles(q, k, tile=rule.tile, kv_order=rule.kv_order)

            base, extra = (median_ms(f, options.repeats, warm_up=2) for f in (attend, count))
            ratio = (base + extra) / base
            worst = max(worst, ratio)
            print(f"| {query.shape[1]:,} | {rule} | {base:.1f} | {extra:.1f} | {ratio:.2f} |", flush=True)
        del query, key, value
    for problem in wrong:
        print(f"WRONG: {problem}")
    if worst > options.limit:
        print(f"calibrating costs {worst:.2f} times dense attention, more than {options.limit:g}")
    return 1 if wrong or worst > options.limit else 0


if __name__ == "__main__":
    sys.exit(main())
