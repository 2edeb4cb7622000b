"""SAGE Quant: the precision of QK and PV."""

from __future__ import annotations

from comfy_api.latest import io

from ..trtllm_core.specs import BLOCK_SIZES, FLASHINFER_DTYPES, SAGE_DTYPES, AttnQuantSpec
from .schema import Quant, schema

SIZES = [str(size) for size in BLOCK_SIZES]


class TRTLLMSageQuant(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            "TRTLLMSageQuant",
            "SAGE Quant",
            "Low-precision attention: Q and K in INT8 or FP8 with fine scales, P and V in FP8.",
            search_aliases=("sage attention", "int8 attention", "fp8 attention", "quantization"),
            inputs=[
                io.Combo.Input(
                    "dtype_qk",
                    options=[*reversed(SAGE_DTYPES), *reversed(FLASHINFER_DTYPES)],
                    default="fp8_e4m3",
                    tooltip="fp8_e4m3 and int8 turn SAGE on. bfloat16 and float16 are options of "
                    "FLASHINFER_ATTN only.",
                ),
                io.Combo.Input(
                    "q_block_size",
                    options=SIZES,
                    default="1",
                    tooltip="Consecutive query tokens that share one scale. Smaller is closer to dense.",
                ),
                io.Combo.Input(
                    "k_block_size",
                    options=SIZES,
                    default="16",
                    tooltip="Consecutive key tokens that share one scale. Smaller is closer to dense.",
                ),
                io.Combo.Input(
                    "dtype_vo",
                    options=["default", *reversed(FLASHINFER_DTYPES)],
                    default="default",
                    tooltip="FLASHINFER_ATTN only: dtype of V and the output.",
                ),
                io.String.Input(
                    "flashinfer_backend",
                    default="",
                    tooltip="FLASHINFER_ATTN only: its own kernel choice, such as fa2 or fa3.",
                ),
            ],
            outputs=[Quant.Output(display_name="quant")],
        )

    @classmethod
    def execute(
        cls, dtype_qk, q_block_size, k_block_size, dtype_vo="default", flashinfer_backend=""
    ) -> io.NodeOutput:
        return io.NodeOutput(
            AttnQuantSpec(
                dtype_qk=dtype_qk,
                dtype_vo=None if dtype_vo == "default" else dtype_vo,
                q_block_size=int(q_block_size),
                k_block_size=int(k_block_size),
                flashinfer_backend=flashinfer_backend or None,
            )
        )
