"""Every form in which vLLM-Omni's guide writes an attention configuration, and what it means."""

import logging

import pytest

from trtllm_core.config import AttentionConfig
from trtllm_core.specs import AttentionSpec, AttnQuantSpec, SkipSoftmaxSpec

FP8 = AttnQuantSpec(dtype_qk="fp8_e4m3", q_block_size=1, k_block_size=16)


def default(backend, quant=None, skip=None, per_role=None):
    return AttentionConfig(AttentionSpec(backend, quant, skip), per_role or {})


SELF_AND_CROSS = default("FLASH_ATTN", per_role={"cross": AttentionSpec("TORCH_SDPA")})
SPARSE = SkipSoftmaxSpec(target_sparsity=0.65, disabled_until_timestep=0.86)
DIRECT = SkipSoftmaxSpec(threshold=0.05, disabled_until_timestep=0.97)

EXAMPLES = {
    "global flag": (
        "vllm-omni serve <model> --diffusion-attention-backend SAGE_ATTN",
        default("SAGE_ATTN"),
    ),
    "exported variable": (
        "export DIFFUSION_ATTENTION_BACKEND=SAGE_ATTN",
        default("SAGE_ATTN"),
    ),
    "dotted flags over several lines": (
        r"""vllm-omni serve <model> \
        --diffusion-attention-config.default.backend FLASH_ATTN \
        --diffusion-attention-config.per_role.cross.backend TORCH_SDPA""",
        SELF_AND_CROSS,
    ),
    "one JSON blob": (
        r"""vllm-omni serve <model> \
        --diffusion-attention-config \
        '{"default":{"backend":"FLASH_ATTN"},"per_role":{"cross":{"backend":"TORCH_SDPA"}}}'""",
        SELF_AND_CROSS,
    ),
    "flags without their command": (
        r"""--diffusion-attention-config.default.backend TRTLLM_ATTN \
        --diffusion-attention-config.default.skip_softmax.target_sparsity 0.5""",
        default("TRTLLM_ATTN", skip=SkipSoftmaxSpec(target_sparsity=0.5)),
    ),
    "sparsity and gate": (
        r"""vllm-omni serve Wan-AI/Wan2.2-T2V-A14B-Diffusers \
          --diffusion-attention-config '{"default": {"backend": "TRTLLM_ATTN",
              "skip_softmax": {"target_sparsity": 0.65, "disabled_until_timestep": 0.86}}}'""",
        default("TRTLLM_ATTN", skip=SPARSE),
    ),
    "quant": (
        r"""vllm-omni serve Wan-AI/Wan2.2-T2V-A14B-Diffusers \
          --diffusion-attention-config '{"default": {"backend": "TRTLLM_ATTN",
              "quant": {"dtype_qk": "fp8_e4m3", "q_block_size": 1, "k_block_size": 16}}}'""",
        default("TRTLLM_ATTN", FP8),
    ),
    "variable before an offline script": (
        r"""DIFFUSION_ATTENTION_BACKEND=FLASHINFER_ATTN python examples/text_to_video.py \
            --model Lightricks/LTX-2 --height 480 --num-inference-steps 40 --seed 42""",
        default("FLASHINFER_ATTN"),
    ),
    "a Hub backend by variable": (
        "export DIFFUSION_ATTENTION_BACKEND=FLASH_ATTN_HUB",
        default("FLASH_ATTN_HUB"),
    ),
    "a Hub backend by flag": (
        "vllm-omni serve <model> --diffusion-attention-backend FLASH_ATTN_HUB",
        default("FLASH_ATTN_HUB"),
    ),
    "a command that sets nothing": (
        r"""python examples/text_to_video.py \
            --model hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v \
            --prompt "Wheat, and a dog's ears." --guidance-scale 6.0 --output hv15.mp4""",
        AttentionConfig(),
    ),
    "SageAttention": (
        r"""DIFFUSION_ATTENTION_BACKEND=SAGE_ATTN python examples/text_to_video.py \
            --model Wan-AI/Wan2.2-TI2V-5B-Diffusers --prompt "Wheat." \
            --tensor-parallel-size 2 --output outputs/wan22_sage.mp4""",
        default("SAGE_ATTN"),
    ),
    "SageAttention 3": (
        r"""DIFFUSION_ATTENTION_BACKEND=SAGE_ATTN_3 python examples/text_to_video.py \
            --prompt "Wheat." --tensor-parallel-size 2""",
        default("SAGE_ATTN_3"),
    ),
    "parallelism that is none": ("--usp 8 --ring 1 --allgather-degree 1", AttentionConfig()),
    "dense TRTLLM_ATTN": (
        r"""vllm serve <model> --omni \
          --diffusion-attention-backend TRTLLM_ATTN""",
        default("TRTLLM_ATTN"),
    ),
    "both modes": (
        r"""vllm serve <model> --omni \
          --diffusion-attention-config '{
            "default": {
              "backend": "TRTLLM_ATTN",
              "quant": {"dtype_qk": "fp8_e4m3", "q_block_size": 1, "k_block_size": 16},
              "skip_softmax": {"threshold": 0.05, "disabled_until_timestep": 0.97}
            }
          }'""",
        default("TRTLLM_ATTN", FP8, DIRECT),
    ),
    "threshold": (
        r"""vllm serve <model> --omni \
          --diffusion-attention-config \
          '{"default":{"backend":"TRTLLM_ATTN","skip_softmax":{
            "threshold":0.05,"disabled_until_timestep":0.97}}}'""",
        default("TRTLLM_ATTN", skip=DIRECT),
    ),
    "calibrated checkpoint": (
        r"""vllm serve nvidia/Wan2.2-T2V-A14B-Diffusers-FP8 --omni \
          --diffusion-attention-config \
          '{"default":{"backend":"TRTLLM_ATTN","skip_softmax":{
            "target_sparsity":0.75,"disabled_until_timestep":0.86}}}'""",
        default(
            "TRTLLM_ATTN", skip=SkipSoftmaxSpec(target_sparsity=0.75, disabled_until_timestep=0.86)
        ),
    ),
    "FP8 SAGE": (
        r"""vllm serve <model> --omni \
          --diffusion-attention-config \
          '{"default":{"backend":"TRTLLM_ATTN","quant":{
            "dtype_qk":"fp8_e4m3","q_block_size":1,"k_block_size":16}}}'""",
        default("TRTLLM_ATTN", FP8),
    ),
    "a model's own role kept dense": (
        r"""vllm serve MiniMaxAI/MiniMax-H3 --omni \
          --diffusion-attention-config '{
            "default": {
              "backend": "TRTLLM_ATTN",
              "quant": {"dtype_qk": "fp8_e4m3", "q_block_size": 1, "k_block_size": 16},
              "skip_softmax": {"threshold": 0.05, "disabled_until_timestep": 0.97}
            },
            "per_role": {
              "minimax_h3.token_refiner": {"backend": "TRTLLM_ATTN"}
            }
          }'""",
        default(
            "TRTLLM_ATTN", FP8, DIRECT, {"minimax_h3.token_refiner": AttentionSpec("TRTLLM_ATTN")}
        ),
    ),
}

LEGACY = {
    "dense, by flag": (
        "vllm-omni serve <model> --diffusion-attention-backend trtllm-gen",
        default("TRTLLM_ATTN"),
    ),
    "dense, by variable": (
        "export DIFFUSION_ATTENTION_BACKEND=trtllm-gen",
        default("TRTLLM_ATTN"),
    ),
    "SAGE, with its variable in a comment": (
        """vllm-omni serve <model> --diffusion-attention-backend trtllm-gen --trtllm-gen-sage
        # the variable for it is TRTLLM_GEN_SAGE=1""",
        default("TRTLLM_ATTN", FP8),
    ),
    "SAGE, by variables": (
        "export DIFFUSION_ATTENTION_BACKEND=trtllm-gen TRTLLM_GEN_SAGE=1",
        default("TRTLLM_ATTN", FP8),
    ),
    "both, with comments behind the line ends": (
        """vllm-omni serve <model> \\
          --diffusion-attention-backend trtllm-gen --trtllm-gen-sage \\
          --trtllm-gen-target-sparsity 0.5 \\             # how much to skip
          --trtllm-gen-disabled-until-timestep 0.6       # dense before that""",
        default(
            "TRTLLM_ATTN", FP8, SkipSoftmaxSpec(target_sparsity=0.5, disabled_until_timestep=0.6)
        ),
    ),
    "skipping, by variables": (
        """export DIFFUSION_ATTENTION_BACKEND=trtllm-gen
        export TRTLLM_GEN_TARGET_SPARSITY=0.5
        export TRTLLM_GEN_DISABLED_UNTIL_TIMESTEP=0.6""",
        default(
            "TRTLLM_ATTN", skip=SkipSoftmaxSpec(target_sparsity=0.5, disabled_until_timestep=0.6)
        ),
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, caplog):
    text, expected = EXAMPLES[name]
    assert AttentionConfig.parse(text) == expected
    assert not caplog.records


@pytest.mark.parametrize("name", [*EXAMPLES, *LEGACY])
def test_example_round_trip(name):
    config = AttentionConfig.parse({**EXAMPLES, **LEGACY}[name][0])
    assert AttentionConfig.parse(config.to_json()) == config
    assert AttentionConfig.parse(config.to_json(indent=2)) == config


@pytest.mark.parametrize("name", LEGACY)
def test_the_older_spelling_is_translated_in_one_line(name, caplog):
    caplog.set_level(logging.WARNING, "trtllm_attention")
    text, expected = LEGACY[name]
    assert AttentionConfig.parse(text) == expected
    (record,) = caplog.records
    new_form = record.getMessage().partition("the same settings now: ")[2]
    assert AttentionConfig.parse(new_form) == expected


@pytest.mark.parametrize(
    "built",
    [
        SELF_AND_CROSS,
        default("TRTLLM_ATTN", skip=SPARSE),
        default("TRTLLM_ATTN", FP8),
    ],
)
def test_the_programmatic_examples_are_what_their_json_says(built):
    assert AttentionConfig.parse(built.to_json()) == built
    assert AttentionConfig.parse(built) == built


def test_a_plain_dict_is_a_config():
    tree = {"default": {"backend": "FLASH_ATTN"}, "per_role": {"cross": {"backend": "TORCH_SDPA"}}}
    assert AttentionConfig.parse(tree) == SELF_AND_CROSS
