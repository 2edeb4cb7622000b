"""What the frontend asks before a run agrees with what the run does."""

import urllib.request

import pytest
from harness.graphs import Graph


def file(name, folder="diffusion_models"):
    return {"folder": folder, "name": f"{name}.safetensors"}


def ask(server, path, **asked):
    status, answer = server.post(f"/trtllm_attention/{path}", asked)
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("kind", ["wan_t2v", "wan_i2v", "wan_vace", "wan_animate", "hunyuan_10", "hunyuan_15"])
def test_layers_of_a_file_are_those_of_the_loaded_model(comfy_server, kind):
    graph = Graph()
    patterns = "*.0*\n# not a pattern\nblocks.1.attn2, transformer_blocks.1.attn"
    node = graph.add("TRTLLMLayerIgnoreList", patterns=patterns, model=graph.load(kind))
    skip = graph.add("TRTLLMSkipSoftmax", mode="threshold", threshold=0.5, target_sparsity=0.5, ignore=node)
    patched = graph.add(
        "TRTLLMAttentionPatch", model=graph.load(kind), backend="REFERENCE", token_order="cubes", skip_softmax=skip
    )
    graph.save(graph.sample(patched, kind, steps=1, cfg=1.0))
    ui = comfy_server.run(graph).ui(node)
    answer = ask(comfy_server, "layers", file=file(kind), patterns=patterns)
    assert answer["layers"] == ui["layers"] and len(ui["layers"]) >= 4
    selected = {index for match in answer["matches"] for index in match["layers"]}
    assert [answer["layers"][index] for index in sorted(selected)] == ui["ignored"]
    assert [match["pattern"] for match in answer["matches"]] == ["*.0*", "blocks.1.attn2", "transformer_blocks.1.attn"]
    again = ask(comfy_server, "layers", layers=ui["layers"], patterns=patterns)
    assert again == answer


@pytest.mark.parametrize("shift", [None, 3.0])
@pytest.mark.parametrize("kind, steps, scheduler, denoise", [
    ("wan_t2v", 20, "simple", 1.0), ("wan_t2v", 7, "beta", 0.6), ("hunyuan_15", 5, "normal", 1.0),
])  # fmt: skip
def test_schedule_of_a_file_is_that_of_the_loaded_model(comfy_server, kind, steps, scheduler, denoise, shift):
    graph = Graph()
    model = graph.load(kind)
    if shift is not None:
        model = graph.add("ModelSamplingSD3", model=model, shift=shift)
    gate = graph.add(
        "TRTLLMTimestepGate", disabled_until_timestep=0.9, steps=steps, scheduler=scheduler, denoise=denoise, model=model
    )
    skip = graph.add("TRTLLMSkipSoftmax", mode="threshold", threshold=0.5, target_sparsity=0.5, gate=gate)
    patched = graph.add("TRTLLMAttentionPatch", model=model, backend="REFERENCE", token_order="cubes", skip_softmax=skip)
    graph.save(graph.sample(patched, kind, steps=1, cfg=1.0))
    times = comfy_server.run(graph).ui(gate)["timesteps"]
    answer = ask(
        comfy_server, "schedule", file=file(kind), steps=steps, scheduler=scheduler, denoise=denoise, shift=shift
    )
    assert answer["timesteps"] == pytest.approx(times, abs=1e-4) and len(times) == steps


def test_what_cannot_be_known_is_empty(comfy_server):
    schedule = {"steps": 20, "scheduler": "simple", "denoise": 1.0}
    for unknown in (None, file("missing"), file("wan_t2v", "vae"), {"folder": "checkpoints"}):
        assert ask(comfy_server, "layers", file=unknown, patterns="*")["layers"] == []
        assert ask(comfy_server, "schedule", file=unknown, **schedule) == {"timesteps": []}
    for change in ({"steps": 0}, {"steps": 10**9}, {"denoise": 2.0}, {"denoise": 0.0}, {"scheduler": "none"}):
        assert ask(comfy_server, "schedule", file=file("wan_t2v"), **{**schedule, **change}) == {"timesteps": []}


def test_malformed_requests_are_answered(comfy_server):
    for path, asked in [("layers", {}), ("layers", []), ("schedule", {"steps": "many"}), ("schedule", 3)]:
        status, answer = comfy_server.post(f"/trtllm_attention/{path}", asked)
        assert status == 400 and answer["error"]


def test_the_patch_says_what_is_in_effect(comfy_server):
    graph = Graph()
    ignore = graph.add("TRTLLMLayerIgnoreList", patterns="blocks.0.self_attn")
    gate = graph.add("TRTLLMTimestepGate", disabled_until_timestep=0.9, steps=3, scheduler="simple", denoise=1.0)
    skip = graph.add(
        "TRTLLMSkipSoftmax", mode="threshold", threshold=0.5, target_sparsity=0.5, gate=gate, ignore=ignore
    )
    roles = graph.add("TRTLLMAttentionRole", role="cross", backend="TORCH_SDPA")
    quant = graph.add("TRTLLMSageQuant", dtype_qk="int8", q_block_size="4", k_block_size="16")
    patched = graph.add(
        "TRTLLMAttentionPatch", model=graph.load("wan_t2v"), backend="REFERENCE", token_order="cubes",
        skip_softmax=skip, roles=roles, quant=quant,
    )  # fmt: skip
    graph.save(graph.sample(patched, "wan_t2v", steps=2, cfg=1.0))
    (text,) = comfy_server.run(graph).ui(patched)["text"]
    assert text.splitlines() == [
        "self: REFERENCE (chosen here); SAGE int8, blocks of 4 and 16; Skip-Softmax λ 0.5; dense while t > 0.9; "
        "1 of 2 layers dense",
        "cross: TORCH_SDPA (chosen by an Attention Role)",
    ]


def test_the_frontend_finds_the_panels_whatever_the_folder_is_called(comfy_server):
    paths = [path for path in comfy_server.get("/extensions") if path.endswith("/trtllm_attention.js")]
    assert len(paths) == 1
    with urllib.request.urlopen(comfy_server.url + paths[0], timeout=30) as answer:
        assert b"registerExtension" in answer.read()
