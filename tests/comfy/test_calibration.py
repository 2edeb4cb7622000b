"""Calibration in the real ComfyUI: count, fit, save, load in another process, and sample with it."""

import importlib
import json
from types import SimpleNamespace

import pytest
import torch
from harness.graphs import Graph
from harness.server import PromptError

TRAINED = "tiny_wan21_t2v.safetensors"
# 8 x 12 x 12 tokens: 9 x 18 tiles
SIZE = {"width": 192, "height": 192, "length": 29}


def trained(graph):
    return graph.add("ModelSamplingSD3", model=graph.load(TRAINED), shift=5.0)


def sample(graph, model, *, seed=1, steps=3, count="1", colour="red", shape="disc", size=SIZE):
    prompt = graph.add("TestTrainedConditioning", count=count, colour=colour, shape=shape)
    return graph.add(
        "KSampler", model=model, latent_image=graph.latent("wan_t2v", **size), seed=seed, steps=steps, cfg=3.0,
        sampler_name="euler", scheduler="simple", denoise=1.0, positive=prompt, negative=prompt[1],
    )  # fmt: skip


def calibrate(graph, filename, *, count_as="cubes", ignore=None, before=None, after=None, seeds=(1,), **sampling):
    """Calibrate, sample once per seed, save; returns the Save node and the last sampler."""
    model = trained(graph)
    if before:
        model = before(model)
    node = graph.add("TRTLLMCalibrate", model=model, count_as=count_as, ignore=ignore)
    model = after(node) if after else node
    samples = None
    for seed in seeds:
        latent = sample(graph, model, seed=seed, **sampling)
        # a chain of samplers, so that all of them run before Save does
        samples = latent if samples is None else graph.add("LatentBatch", samples1=samples, samples2=latent)
    return graph.add("TRTLLMSaveCalibration", run=node[1], samples=samples, filename=filename), samples


def saved_file(server, name):
    return server.workspace / "models" / "skip_softmax" / f"{name}.json"


def test_count_save_load_elsewhere_and_sample(comfy_server, new_server):
    graph = Graph()
    ignore = graph.add("TRTLLMLayerIgnoreList", patterns="blocks.0.self_attn, blocks.5.self_attn")
    save, _ = calibrate(graph, "tiny/wan", ignore=ignore, seeds=(1, 2))
    text = comfy_server.run(graph).ui(save)["text"][0]
    assert "24 calls of 4 layers in 2 runs" in text, text
    content = saved_file(comfy_server, "tiny/wan").read_text()
    block = json.loads(content)["sparse_attention_config"]
    group = block["config_groups"]["group_0"]
    assert {"blocks.0.attn1", "blocks.3.attn2"} <= set(group["ignore"])
    assert "blocks.1.attn1" not in group["ignore"]
    notes = block["trtllm_attention"]
    assert notes["model"] == "WAN21_T2V, 12 attention layers, width 384" and notes["steps"] == [3, 3]
    assert notes["grids"] == [[8, 12, 12]] and notes["key_lengths"] == [1152]
    assert (notes["tile"], notes["kv_order"], notes["token_order"]) == ([128, 64], "own_first", "cubes")

    other = new_server(args=["--use-pytorch-cross-attention"])
    target = saved_file(other, "curve")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(content)
    graph = Graph()
    calibration = graph.add("TRTLLMLoadCalibration", name="curve.json", component="transformer", path="")
    skip = graph.add(
        "TRTLLMSkipSoftmax", mode="calibrated", threshold=0.0, target_sparsity=0.5, calibration=calibration
    )
    patch = graph.add(
        "TRTLLMAttentionPatch", model=trained(graph), backend="REFERENCE", token_order="cubes", skip_softmax=skip
    )
    sampled = sample(graph, patch, seed=9, colour="blue", shape="square")
    report = graph.add("TestStatsReport", samples=sampled, stats=patch[1])
    graph.save(sampled)
    sites = [site for site in other.run(graph).ui(report)["sites"] if site["sparse_calls"]]
    assert {site["layer"] for site in sites} == {f"blocks.{n}.self_attn" for n in (1, 2, 3, 4)}
    achieved = sum(s["skipped"] for s in sites) / sum(s["total"] for s in sites)
    assert abs(achieved - 0.5) < 0.1, achieved


def test_counting_changes_nothing(comfy_server):
    def latent(calibrating):
        graph = Graph()
        model = graph.load("wan_t2v")
        if calibrating:
            model = graph.add("TRTLLMCalibrate", model=model, count_as="cubes")
        saved = graph.save(graph.sample(model, "wan_t2v"))
        return comfy_server.run(graph).latent(saved)

    assert latent(True).equal(latent(False))


def test_modelopts_rule_for_other_runtimes(comfy_server):
    graph = Graph()
    save, _ = calibrate(graph, "modelopt_rule", count_as="modelopt")
    comfy_server.run(graph)
    notes = json.loads(saved_file(comfy_server, "modelopt_rule").read_text())
    notes = notes["sparse_attention_config"]["trtllm_attention"]
    assert (notes["tile"], notes["kv_order"], notes["token_order"]) == ([128, 128], "sequential", "sequential")


def refused(server, graph, match):
    with pytest.raises(PromptError, match=match):
        server.run(graph)


def test_a_patch_after_it_leaves_nothing_to_save(comfy_server):
    graph = Graph()

    def patched(node):
        return graph.add("TRTLLMAttentionPatch", model=node, backend="auto", token_order="cubes")

    calibrate(graph, "nothing", after=patched)
    refused(comfy_server, graph, "nothing was counted")


def test_of_two_calibrations_on_a_wire_the_last_counts(comfy_server):
    graph = Graph()
    calibrate(graph, "first", after=lambda node: graph.add("TRTLLMCalibrate", model=node, count_as="cubes"))
    refused(comfy_server, graph, "nothing was counted.*second Calibrate")
    graph = Graph()
    before = lambda model: graph.add("TRTLLMCalibrate", model=model, count_as="sequential")  # noqa: E731
    save, _ = calibrate(graph, "second", before=before)
    assert "18 calls" in comfy_server.run(graph).ui(save)["text"][0]


def test_a_fit_that_cannot_be_right_is_refused(comfy_server):
    """32 tokens are one tile, which is never skipped."""
    graph = Graph()
    calibrate(graph, "one_tile", size={"width": 64, "height": 64, "length": 5}, steps=1)
    refused(comfy_server, graph, "only 0 of 22 points")
    assert not saved_file(comfy_server, "one_tile").exists()


@pytest.mark.parametrize("filename", ["../outside", "", "/tmp/elsewhere", ".json"])
def test_a_file_name_must_stay_in_its_folder(comfy_server, filename):
    graph = Graph()
    calibrate(graph, filename)
    with pytest.raises(PromptError, match="filename=") as caught:
        comfy_server.run(graph)
    assert caught.value.refused  # before sampling


def test_another_models_calibration_is_not_replaced(comfy_server):
    file = saved_file(comfy_server, "taken")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('{"threshold_scale_factor": {"a": 1.0, "b": 2.0}}')
    graph = Graph()
    calibrate(graph, "taken")
    refused(comfy_server, graph, "holds a calibration of unknown origin, not of WAN21_T2V")


def test_two_experts_do_not_share_a_file(comfy_server):
    graph = Graph()
    calibrate(graph, "experts")
    calibrate(graph, "experts", count_as="sequential")
    refused(comfy_server, graph, "another Calibrate node.*a file each")


def load(server, *, name="(none)", component="transformer", path=""):
    graph = Graph()
    node = graph.add("TRTLLMLoadCalibration", name=name, component=component, path=str(path))
    skip = graph.add("TRTLLMSkipSoftmax", mode="calibrated", threshold=0.0, target_sparsity=0.5, calibration=node)
    patch = graph.add(
        "TRTLLMAttentionPatch", model=graph.load("wan_t2v"), backend="REFERENCE", token_order="cubes", skip_softmax=skip
    )
    sampled = graph.sample(patch, "wan_t2v", steps=1)
    report = graph.add("TestStatsReport", samples=sampled, stats=patch[1])
    graph.save(sampled)
    return node, report, graph


@pytest.fixture
def two_experts(tmp_path):
    for component, a in (("transformer", 100.0), ("transformer_2", 200.0)):
        (tmp_path / component).mkdir()
        group = {"algorithm": "skip_softmax", "threshold_scale_factor": {"a": a, "b": 3.0}, "target_sparsity": 0.7}
        config = {"sparse_attention_config": {"config_groups": {"group_0": group}}}
        (tmp_path / component / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("component, a", [("transformer", "100"), ("transformer_2", "200")])
def test_each_expert_of_wan_22_gets_its_own_curve(comfy_server, two_experts, component, a):
    node, _, graph = load(comfy_server, component=component, path=two_experts)
    run = comfy_server.run(graph)
    text = run.ui(node)["text"][0]
    assert f"λ = {a} * exp(3" in text
    assert run.log.count("counted with 128x128 tiles") == 1 and "expect more sparsity" in run.log
    assert "suggests target_sparsity 0.7 (not applied)" in text


def test_a_missing_second_expert_samples_dense(comfy_server, two_experts):
    (two_experts / "transformer_2" / "config.json").unlink()
    node, report, graph = load(comfy_server, component="transformer_2", path=two_experts)
    run = comfy_server.run(graph)
    assert "it stays dense" in run.ui(node)["text"][0] and "it stays dense" in run.log
    assert not any(site["sparse_calls"] for site in run.ui(report)["sites"])


@pytest.mark.parametrize(
    "content, match",
    [
        ('{"sparse_attention_config": {"conf', "not valid JSON.*line 1 column 30"),
        ('{"model_type": "llama"}', "no Skip-Softmax calibration.*skip_softmax.threshold"),
        ('{"threshold_scale_factor": {"a": NaN, "b": 1}}', "a=nan"),
    ],
    ids=["truncated", "foreign", "NaN"],
)
def test_bad_files_are_named(comfy_server, tmp_path, content, match):
    (tmp_path / "config.json").write_text(content)
    refused(comfy_server, load(comfy_server, path=tmp_path / "config.json")[2], match)


def test_a_file_of_another_machine(comfy_server):
    refused(comfy_server, load(comfy_server, name="gone.json")[2], "'gone.json' is not there")


def test_a_changed_file_is_read_again(comfy_server, two_experts):
    load_graph = load(comfy_server, path=two_experts)
    comfy_server.run(load_graph[2])
    file = two_experts / "transformer" / "config.json"
    file.write_text(file.read_text().replace("100.0", "300.0"))
    assert "λ = 300" in comfy_server.run(load_graph[2]).ui(load_graph[0])["text"][0]


@pytest.fixture
def counting(pack):
    """CountingRun and what it is made of, from the pack in this process."""

    def part(name):
        return importlib.import_module(f"{pack.__name__}.{name}")

    class Counting:
        Call = part("trtllm_core.backends").AttentionCall
        Gate = part("trtllm_core.gate").TimestepGate

        def run(self, **options):
            rule = part("trtllm_core.skip_rule").SkipRule((16, 16))
            device = part("trtllm_core.device").Device.current("cpu")
            return part("nodes.hook.counting").CountingRun(device, rule, **options)

        def call(self, run, layer="blocks.0.self_attn", role="self", length=64, mask=None):
            x = torch.randn(1, length, 2, 32, generator=torch.Generator().manual_seed(length)) * 3
            site = SimpleNamespace(layer=layer, role=role)
            run.observe(site, self.Call(x, x, x, scale=1.0, mask=mask))

    return Counting()


def test_a_cancelled_run_keeps_its_counts_and_says_so(counting):
    run = counting.run()
    run.start(torch.tensor([1.0, 0.8, 0.5, 0.0]))
    for _ in range(2):
        counting.call(run)
    run.finish(completed=False)  # at the first of three steps
    assert run.summary() == "2 calls of 1 layers in 1 runs counted (1 cut short)"
    assert len(run.counts.points()) == 2 * 22
    run.start(torch.tensor([1.0, 0.8, 0.0]))
    run.clock.step = 1
    counting.call(run)
    run.finish(completed=True)
    assert run.summary() == "3 calls of 1 layers in 2 runs counted (1 cut short)"


def test_what_is_left_out_of_the_counts(counting):
    run = counting.run(ignore=("blocks.1.attn1",), gate=counting.Gate(0.9))
    counting.call(run)  # before a run
    run.start(torch.tensor([1.0, 0.5, 0.0]))
    run.clock.timestep = 0.95
    counting.call(run)  # the gate keeps it dense
    run.clock.timestep = 0.5
    counting.call(run, layer="blocks.1.self_attn")
    counting.call(run, layer="blocks.0.cross_attn", role="cross")
    assert run.counts.calls == 0
    counting.call(run)
    assert run.counts.layers == ("blocks.0.self_attn",)


def test_a_padding_mask_cuts_the_keys_and_any_other_is_not_counted(counting, caplog):
    run = counting.run()
    run.start(torch.tensor([1.0, 0.0]))
    keys = torch.zeros(1, 1, 1, 64)
    keys[..., 48:] = -torch.inf
    counting.call(run, mask=keys)
    assert run.counts.key_lengths == (48,)
    for _ in range(3):
        counting.call(run, mask=torch.randn(1, 1, 64, 64))
    assert run.counts.calls == 1
    assert caplog.text.count("not counted for the calibration") == 1
