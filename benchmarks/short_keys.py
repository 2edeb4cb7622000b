"""From how many keys on SAGE pays: python benchmarks/short_keys.py on a Hopper GPU.

Prints milliseconds of dense, INT8 and FP8 attention of both kernels over few keys, quantization included, which chose
FEWEST_SAGE_KEYS of trtllm_core/backends/triton_attn.py. Random numbers: nothing is skipped, and no error is measured.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from timing import median_ms  # noqa: E402

from trtllm_core.kernels import triton_attention  # noqa: E402
from trtllm_core.kernels.hopper import hopper_attention  # noqa: E402
from trtllm_core.specs import AttnQuantSpec  # noqa: E402

QUANTS = (None, AttnQuantSpec("int8"), AttnQuantSpec("fp8_e4m3"))


def main():
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, 40 heads x 128, ms of dense / INT8 / FP8\n")
    print("| queries x keys | Hopper kernels | portable kernels |\n| --- | --- | --- |")
    for queries in (32_760, 75_600):
        for keys in (256, 512, 1024, 2048, 4096):
            query, key, value = (
                torch.randn(1, tokens, 40, 128, device="cuda", dtype=torch.bfloat16) for tokens in (queries, keys, keys)
            )
            cells = [
                " / ".join(f"{median_ms(lambda: attend(query, key, value, quant=quant), 20):.2f}" for quant in QUANTS)
                for attend in (hopper_attention, triton_attention)
            ]
            print(f"| {queries:,} x {keys:,} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
