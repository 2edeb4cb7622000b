"""Every attention call of every family is reached, once, with its own layer name and role."""

import pytest
from patched import plain, run

STEPS = 2
SAMPLING = {"steps": STEPS, "cfg": 1.0}


def wan(blocks, cross=("cross",), prefix="blocks"):
    return {(f"{prefix}.{n}.self_attn", "self") for n in range(blocks)} | {
        (f"{prefix}.{n}.cross_attn", role) for n in range(blocks) for role in cross
    }


# Layer and role of every call of one model call.
EXPECTED = {
    "wan_t2v": wan(2),
    "wan_i2v": wan(2, ("wan.image_cross", "cross")),
    "wan_vace": wan(2) | wan(2, prefix="vace_blocks"),
    "wan_camera": wan(2, ("wan.image_cross", "cross")),
    "wan_humo": wan(2)
    | {(f"blocks.{n}.audio_cross_attn_wrapper.audio_cross_attn", "wan.audio_cross") for n in range(2)},
    "hunyuan_10": {(f"double_blocks.{n}", "self") for n in range(2)}
    | {(f"single_blocks.{n}", "self") for n in range(2)}
    | {(f"txt_in.individual_token_refiner.blocks.{n}.self_attn", "hunyuan_video.token_refiner") for n in range(2)},
}
EXPECTED["hunyuan_15"] = EXPECTED["hunyuan_10"]


@pytest.mark.parametrize("kind", EXPECTED)
def test_every_call_has_its_layer_and_role(comfy_server, kind):
    outcome = run(comfy_server, kind, backend="TORCH_SDPA", sampling=SAMPLING)
    assert outcome.roles() == EXPECTED[kind]
    assert {site["step"] for site in outcome.sites} == set(range(STEPS))
    assert outcome.calls == len(EXPECTED[kind]) * STEPS and not outcome.declined


def test_animate_and_s2v_name_what_they_reach(comfy_server):
    animate = run(comfy_server, "wan_animate", backend="TORCH_SDPA", sampling=SAMPLING)
    assert {layer for layer, role in animate.roles() if role == "self"} == {f"blocks.{n}.self_attn" for n in range(5)}
    s2v = run(comfy_server, "wan_s2v", backend="TORCH_SDPA", sampling=SAMPLING)
    roles = s2v.roles()
    assert ("blocks.0.self_attn", "self") in roles and ("blocks.1.cross_attn", "cross") in roles
    assert {role for layer, role in roles if layer.startswith("audio_injector")} == {"wan.audio_cross"}


@pytest.mark.parametrize("kind", ["wan_t2v", "wan_i2v", "hunyuan_10", "hunyuan_15"])
def test_torch_sdpa_is_bit_identical_to_comfyui(comfy_server, kind):
    outcome = run(comfy_server, kind, backend="TORCH_SDPA", sampling=SAMPLING)
    assert outcome.backends() == {"TORCH_SDPA"}
    assert outcome.latent.equal(plain(comfy_server, kind, sampling=SAMPLING))


def test_a_masked_hunyuan_is_bit_identical_too(comfy_server):
    sampling = {"steps": 1, "cfg": 1.0, "conditioning": {"pad": 8}}
    outcome = run(comfy_server, "hunyuan_15", backend="TORCH_SDPA", sampling=sampling)
    assert outcome.calls == 6 and not outcome.declined
    assert outcome.latent.equal(plain(comfy_server, "hunyuan_15", sampling=sampling))
