"""Reading, priorities, exclusions, round trips and errors of the attention configuration."""

import copy
import dataclasses
import logging
import math

import pytest

from trtllm_core.config import AttentionConfig, environment
from trtllm_core.specs import BACKEND_NAMES, AttentionSpec, AttnQuantSpec, SkipSoftmaxSpec

CONFIG = "--diffusion-attention-config"
BACKEND = "--diffusion-attention-backend"


def backend_of(config, role="self"):
    spec, _ = config.resolve(role)
    return spec.backend if spec else None


def test_nothing_written_is_the_platform_default():
    for source in (None, "", "  \n", {}, [], "{}", '{"default": null, "per_role": {}}'):
        config = AttentionConfig.parse(source)
        assert config == AttentionConfig()
        assert config.resolve("self") == (None, "platform default")


def test_roles_resolve_exact_then_category_then_default_then_platform():
    own, cross, rest = (AttentionSpec(name) for name in ("TORCH_SDPA", "CUDNN_ATTN", "FLASH_ATTN"))
    config = AttentionConfig(rest, {"ltx2.audio_to_video": own, "cross": cross})
    assert config.resolve("ltx2.audio_to_video", "cross") == (
        own,
        "attention_config.per_role.ltx2.audio_to_video",
    )
    assert config.resolve("ltx2.video_to_audio", "cross") == (
        cross,
        "attention_config.per_role.cross",
    )
    assert config.resolve("cross") == (cross, "attention_config.per_role.cross")
    assert config.resolve("self") == (rest, "attention_config.default")
    assert config.resolve("ltx2.video_to_audio") == (rest, "attention_config.default")
    assert AttentionConfig(None, {"cross": cross}).resolve("self") == (None, "platform default")


def test_a_role_inherits_nothing():
    config = AttentionConfig.parse(
        '{"default": {"backend": "TRTLLM_ATTN", "quant": {"dtype_qk": "int8"}},'
        ' "per_role": {"cross": {"backend": "TRTLLM_ATTN"}}}'
    )
    assert config.resolve("cross")[0] == AttentionSpec("TRTLLM_ATTN")


class TestPriority:
    VARIABLES = {"DIFFUSION_ATTENTION_BACKEND": "SAGE_ATTN"}

    def test_variable_alone(self):
        config = AttentionConfig.parse("", self.VARIABLES)
        assert config.resolve("self") == (AttentionSpec("SAGE_ATTN"), "attention_config.default")

    def test_flag_beats_variable(self):
        assert (
            backend_of(AttentionConfig.parse(f"{BACKEND} TORCH_SDPA", self.VARIABLES))
            == "TORCH_SDPA"
        )

    def test_config_beats_variable(self):
        config = AttentionConfig.parse('{"default": {"backend": "FLASH_ATTN"}}', self.VARIABLES)
        assert backend_of(config) == "FLASH_ATTN"

    def test_a_variable_written_in_the_text_beats_the_process(self):
        text = "export DIFFUSION_ATTENTION_BACKEND=CUDNN_ATTN"
        assert backend_of(AttentionConfig.parse(text, self.VARIABLES)) == "CUDNN_ATTN"

    def test_roles_stand_beside_flag_and_variable(self):
        text = f"{BACKEND} FLASH_ATTN {CONFIG}.per_role.cross.backend TORCH_SDPA"
        config = AttentionConfig.parse(text)
        assert (backend_of(config), backend_of(config, "cross")) == ("FLASH_ATTN", "TORCH_SDPA")
        config = AttentionConfig.parse(
            {"per_role": {"cross": {"backend": "TORCH_SDPA"}}}, self.VARIABLES
        )
        assert (backend_of(config), backend_of(config, "cross")) == ("SAGE_ATTN", "TORCH_SDPA")

    def test_flag_and_blocks_of_the_default(self):
        text = f"{BACKEND} TRTLLM_ATTN {CONFIG}.default.skip_softmax.threshold 0.05"
        assert AttentionConfig.parse(text).default == AttentionSpec(
            "TRTLLM_ATTN", skip_softmax=SkipSoftmaxSpec(threshold=0.05)
        )

    @pytest.mark.parametrize("auto", ["auto", "AUTO"])
    def test_auto_unsets(self, auto):
        assert AttentionConfig.parse(f"{BACKEND} {auto}", self.VARIABLES) == AttentionConfig()
        assert (
            AttentionConfig.parse({"default": {"backend": auto}}, self.VARIABLES)
            == AttentionConfig()
        )

    def test_auto_of_a_role_is_not_the_default_s_backend(self):
        config = AttentionConfig.parse(
            {"default": {"backend": "SAGE_ATTN"}, "per_role": {"cross": {"backend": "auto"}}}
        )
        assert config.resolve("cross")[0] == AttentionSpec()
        assert AttentionConfig.parse(config.to_json()) == config

    def test_an_empty_variable_is_not_set(self):
        assert AttentionConfig.parse("", {"DIFFUSION_ATTENTION_BACKEND": ""}) == AttentionConfig()

    def test_parse_does_not_look_at_the_process(self, monkeypatch):
        monkeypatch.setenv("DIFFUSION_ATTENTION_BACKEND", "SAGE_ATTN")
        assert AttentionConfig.parse("") == AttentionConfig()
        assert environment() == {"DIFFUSION_ATTENTION_BACKEND": "SAGE_ATTN"}
        assert backend_of(AttentionConfig.parse("", environment())) == "SAGE_ATTN"


@pytest.mark.parametrize(
    "flags",
    [
        [f"{CONFIG}.default.backend", "FLASH_ATTN"],
        [f"{CONFIG}.default.backend=FLASH_ATTN"],
        [f"{CONFIG}.default", '{"backend": "FLASH_ATTN"}'],
        [CONFIG, '{"default": {"backend": "FLASH_ATTN"}}'],
        [CONFIG + '={"default": {"backend": "FLASH_ATTN"}}'],
        ["--diffusion_attention_config.default.backend", "FLASH_ATTN"],
        [f"{BACKEND}=FLASH_ATTN"],
        ["vllm", "serve", "model", "--omni", "--port", "8000", BACKEND, "FLASH_ATTN"],
        [".venv/bin/vllm-omni", "serve", "model", BACKEND, "FLASH_ATTN"],
    ],
    ids=lambda flags: " ".join(flags)[:60],
)
def test_forms_of_one_setting(flags):
    assert AttentionConfig.parse(flags) == AttentionConfig(AttentionSpec("FLASH_ATTN"))


def test_every_key_has_a_dotted_flag():
    text = f"""
        {CONFIG}.default.backend TRTLLM_ATTN
        {CONFIG}.default.quant.dtype_qk int8
        {CONFIG}.default.quant.q_block_size 4
        {CONFIG}.default.quant.k_block_size=1
        {CONFIG}.default.skip_softmax.threshold 5e-2
        {CONFIG}.default.skip_softmax.disabled_until_timestep 0.9
        {CONFIG}.per_role.minimax_h3.token_refiner.backend FLASHINFER_ATTN
        {CONFIG}.per_role.minimax_h3.token_refiner.quant.dtype_vo bfloat16
        {CONFIG}.per_role.minimax_h3.token_refiner.quant.flashinfer_backend fa2
        {CONFIG}.per_role.cross.skip_softmax.target_sparsity 0.5
    """
    assert AttentionConfig.parse(text) == AttentionConfig(
        AttentionSpec(
            "TRTLLM_ATTN", AttnQuantSpec("int8", None, 4, 1), SkipSoftmaxSpec(0.05, None, 0.9)
        ),
        {
            "minimax_h3.token_refiner": AttentionSpec(
                "FLASHINFER_ATTN", AttnQuantSpec(dtype_vo="bfloat16", flashinfer_backend="fa2")
            ),
            "cross": AttentionSpec(skip_softmax=SkipSoftmaxSpec(target_sparsity=0.5)),
        },
    )


def test_a_blob_and_dotted_flags_add_up():
    blob = '{"default": {"backend": "FLASH_ATTN"}}'
    text = f"{CONFIG} '{blob}' {CONFIG}.per_role.cross.backend TORCH_SDPA"
    config = AttentionConfig.parse(text)
    assert (backend_of(config), backend_of(config, "cross")) == ("FLASH_ATTN", "TORCH_SDPA")


def quants():
    yield None
    for dtype in ("int8", "fp8_e4m3"):
        yield AttnQuantSpec(dtype, None, 4, 1)
    yield AttnQuantSpec("float16", "bfloat16", flashinfer_backend="fa3")
    yield AttnQuantSpec()


@pytest.mark.parametrize("backend", [None, *BACKEND_NAMES])
@pytest.mark.parametrize("quant", list(quants()))
@pytest.mark.parametrize(
    "skip",
    [
        None,
        SkipSoftmaxSpec(0.0),
        SkipSoftmaxSpec(1e-9, None, 1.0),
        SkipSoftmaxSpec(None, 1 / 3, 0.86),
    ],
)
def test_round_trip(backend, quant, skip):
    spec = AttentionSpec(backend, quant, skip)
    config = AttentionConfig(spec, {"self": spec, "wan.image_cross": AttentionSpec("TORCH_SDPA")})
    assert AttentionConfig.parse(config.to_json()) == config


def test_a_config_is_frozen_and_copies():
    per_role = {"cross": AttentionSpec("TORCH_SDPA")}
    config = AttentionConfig(None, per_role)
    per_role["self"] = AttentionSpec("FLASH_ATTN")
    assert list(config.per_role) == ["cross"]
    assert copy.deepcopy(config) == config and hash(config) == hash(copy.copy(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.default = None


ERRORS = {
    "unknown backend": ('{"default": {"backend": "FLASH_ATN"}}', "did you mean 'FLASH_ATTN'"),
    "unknown backend of the flag": (f"{BACKEND} sage-attn", "did you mean 'SAGE_ATTN'"),
    "backend of a wrong type": ('{"default": {"backend": 3}}', "backend=3 must be a string"),
    "unknown top key": ('{"defualt": {}}', "no key 'defualt' .*did you mean 'default'"),
    "unknown spec key": ('{"default": {"skip": {}}}', "attention_config.default has no key 'skip'"),
    "unknown skip key": (
        '{"default": {"skip_softmax": {"treshold": 0.1}}}',
        "skip_softmax has no key 'treshold' .*did you mean 'threshold'",
    ),
    "unknown quant key": (
        '{"per_role": {"self": {"quant": {"dtype": "int8"}}}}',
        "per_role.self.quant has no key 'dtype' .*did you mean 'dtype_qk'",
    ),
    "unknown category": (
        '{"per_role": {"crss": {}}}',
        "role category 'crss', did you mean 'cross'",
    ),
    "empty role": ('{"per_role": {"": {}}}', "'' is not a role name"),
    "unknown dotted key": (f"{CONFIG}.default.bakend X", "did you mean 'backend'"),
    "unknown dotted top": (f"{CONFIG}.per_rol.cross.backend X", "did you mean 'per_role'"),
    "dotted role missing": (f"{CONFIG}.per_role.backend X", "a role is missing"),
    "dotted key too deep": (f"{CONFIG}.default.self.backend X", "no key 'self' in default"),
    "dotted block without value": (f"{CONFIG}.default.quant int8", "must be an object"),
    "unknown flag": ("--diffusion-attention-bakend X", f"did you mean '{BACKEND}'"),
    "misspelt flag in a command": (
        "vllm serve m --difusion-attention-backend X",
        f"did you mean '{BACKEND}'",
    ),
    "foreign flag alone": ("--tensor-parallel-size 2", "unknown flag"),
    "a dotted backend flag": (f"{BACKEND}.default X", "only --diffusion-attention-config takes"),
    "flag without value": (f"{BACKEND}", "needs a value"),
    "flag before a flag": (f"vllm serve m {BACKEND} --omni", "needs a value"),
    "a bare name": ("SAGE_ATTN", "neither JSON nor a flag"),
    "an open quote": (f"{CONFIG} '{{", "No closing quotation"),
    "both ways to set the default": (
        f"{BACKEND} TORCH_SDPA {CONFIG}.default.backend FLASH_ATTN",
        "set the same thing: remove one",
    ),
    "both ways, with JSON": (
        f"""{BACKEND} TORCH_SDPA {CONFIG} '{{"default": {{"backend": "FLASH_ATTN"}}}}'""",
        "set the same thing: remove one",
    ),
    "flag twice": (f"{BACKEND} TORCH_SDPA {BACKEND} FLASH_ATTN", "given twice"),
    "dotted flag twice": (
        f"{CONFIG}.default.backend TORCH_SDPA {CONFIG}.default.backend FLASH_ATTN",
        "attention_config.default.backend is given twice: 'TORCH_SDPA' and 'FLASH_ATTN'",
    ),
    "key twice": (
        '{"default": {"backend": "A", "backend": "B"}}',
        "key 'backend' twice: 'A' and 'B'",
    ),
    "variable twice": (
        "DIFFUSION_ATTENTION_BACKEND=SAGE_ATTN DIFFUSION_ATTENTION_BACKEND=TORCH_SDPA",
        "given twice",
    ),
    "broken JSON": ('{"default": {"backend": "TORCH_SDPA",}}', "line 1, column 38, near"),
    "broken JSON, later line": ('{"default":\n  {backend: 1}}', "line 2, column 4"),
    "broken JSON of the flag": (CONFIG + " '{\"default\": }'", "is not valid JSON: .*column 13"),
    "JSON without quotes around it": (
        CONFIG + ' {"default":{"backend":"FLASH_ATTN"}}',
        "JSON belongs in single quotes",
    ),
    "JSON that is no object": ([CONFIG, "[]"], "must be a JSON object, not list"),
    "a string for a spec": ({"default": "FLASH_ATTN"}, 'must be an object such as {"backend"'),
    "a list of roles": ({"per_role": ["cross"]}, "per_role=.* must be an object"),
    "sparsity and threshold": (
        {"default": {"skip_softmax": {"threshold": 0.1, "target_sparsity": 0.5}}},
        "set the same kernel threshold: remove one",
    ),
    "neither": ({"default": {"skip_softmax": {"disabled_until_timestep": 0.5}}}, "needs threshold"),
    "percent": (
        {"default": {"skip_softmax": {"target_sparsity": 75}}},
        "target_sparsity=75 must be .* in \\[0, 1\\].*0.75",
    ),
    "negative threshold": (
        {"default": {"skip_softmax": {"threshold": -1}}},
        "threshold=-1 .*at least 0",
    ),
    "NaN": ('{"default": {"skip_softmax": {"threshold": NaN}}}', "threshold=nan must be finite"),
    "infinity": (
        {"default": {"skip_softmax": {"threshold": math.inf}}},
        "threshold=inf must be finite",
    ),
    "a number in quotes": ({"default": {"skip_softmax": {"threshold": "0.1"}}}, "not str"),
    "a boolean": ({"default": {"skip_softmax": {"threshold": True}}}, "not bool"),
    "gate beyond 1": (
        {"default": {"skip_softmax": {"threshold": 0, "disabled_until_timestep": 1.5}}},
        "disabled_until_timestep=1.5",
    ),
    "block size": (
        {"default": {"quant": {"dtype_qk": "int8", "q_block_size": 8}}},
        "8 is not one of 1, 4, 16",
    ),
    "quant dtype": ({"default": {"quant": {"dtype_qk": "fp8"}}}, "did you mean 'fp8_e4m3'"),
    "ring with skipping": (
        f"{BACKEND} TRTLLM_ATTN {CONFIG}.default.skip_softmax.threshold 0.1 --ring 2",
        "--ring 2 bypasses",
    ),
    "gathered keys": (f"{BACKEND} TRTLLM_ATTN --allgather-degree 4", "--allgather-degree 4 cannot"),
    "a degree that is none": ("--usp 0", "must be a whole number, at least 1"),
    "old flag, other backend": (
        f"{BACKEND} FLASH_ATTN --trtllm-gen-sage",
        "belongs to the backend",
    ),
    "old flag, no backend": ("--trtllm-gen-target-sparsity 0.5", "belongs to the backend"),
    "old flag, wrong number": (
        f"{BACKEND} trtllm-gen --trtllm-gen-target-sparsity much",
        "must be a number",
    ),
    "old flag, out of range": (
        f"{BACKEND} trtllm-gen --trtllm-gen-target-sparsity 50",
        "did you mean 0.5",
    ),
    "old flag, not a switch": (f"{BACKEND} trtllm-gen --trtllm-gen-sage=maybe", "must be 1 or 0"),
    "old flag and new block": (
        f"{BACKEND} trtllm-gen --trtllm-gen-sage {CONFIG}.default.quant.dtype_qk int8",
        "set the same thing",
    ),
    "old flag twice": (f"{BACKEND} trtllm-gen --trtllm-gen-sage --trtllm-gen-sage", "given twice"),
    "not a config at all": (3, "cannot read an attention config from int"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_case_24_malformed(name):
    source, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        AttentionConfig.parse(source)


def test_an_old_variable_gives_way_to_other_settings_and_that_is_said(caplog):
    caplog.set_level(logging.WARNING, "trtllm_attention")
    config = AttentionConfig.parse(f"{BACKEND} FLASH_ATTN", {"TRTLLM_GEN_SAGE": "1"})
    assert config == AttentionConfig(AttentionSpec("FLASH_ATTN"))
    assert "TRTLLM_GEN_SAGE is ignored" in caplog.text


def test_an_old_gate_without_a_sparsity_is_said(caplog):
    caplog.set_level(logging.WARNING, "trtllm_attention")
    text = f"{BACKEND} trtllm-gen --trtllm-gen-disabled-until-timestep 0.6"
    assert AttentionConfig.parse(text) == AttentionConfig(AttentionSpec("TRTLLM_ATTN"))
    assert "has no effect without a target sparsity" in caplog.text


def test_an_old_switch_may_be_off():
    text = f"{BACKEND} trtllm-gen"
    config = AttentionConfig.parse(text, {"TRTLLM_GEN_SAGE": "0"})
    assert config == AttentionConfig(AttentionSpec("TRTLLM_ATTN"))


@pytest.mark.parametrize("text", ["[]", '[{"default": {}}]', "null", "true"])
def test_json_that_is_no_object_is_called_so(text):
    with pytest.raises(ValueError, match="must be a JSON object, not"):
        AttentionConfig.parse(text)


def test_a_byte_order_mark_is_no_part_of_the_json():
    assert AttentionConfig.parse('\ufeff{"default": {"backend": "TORCH_SDPA"}}').default.backend == "TORCH_SDPA"
