"""The compare node: its numbers, its strip, and its refusals."""

import importlib
import math
import types

import numpy
import pytest
import torch
from harness.graphs import Graph
from harness.server import PromptError
from PIL import Image


@pytest.fixture(scope="module")
def compare(pack):
    return importlib.import_module(f"{pack.__name__}.nodes.compare")


@pytest.fixture(scope="module")
def lpips_distance(pack):
    return importlib.import_module(f"{pack.__name__}.nodes.lpips_distance")


def measured(compare, pair):
    return compare.measure(pair, lambda: None)


def test_every_frame_and_the_mean(compare):
    a = torch.rand(5, 24, 40, 3)
    amplitudes = (0.01, 0.1, 0.0, 0.05, 0.2)
    b = torch.stack([x + amplitude for x, amplitude in zip(a, amplitudes)])
    pair = compare.image_pair(a, b)
    scores = measured(compare, pair)
    expected = [math.inf if not n else -20 * math.log10(n) for n in amplitudes]
    assert scores.psnr == pytest.approx(expected, abs=1e-4)
    assert scores.ssim[2] == 1.0 and len(scores.ssim) == 5
    text = compare.describe(pair, scores)
    overall = -10 * math.log10(sum(n * n for n in amplitudes) / 5)
    finite = sum(v for v in expected if v < math.inf) / 4
    assert f"| PSNR | {finite:.2f} dB, without 1 equal frames | {expected[4]:.2f} dB (frame 5) |" in text
    assert f"| PSNR of the mean squared error | {overall:.2f} dB |" in text
    assert "| 3 | inf dB | 1.00000 |" in text and "40x24" in text


def test_equal_batches(compare):
    a = torch.rand(2, 16, 16, 3)
    pair = compare.image_pair(a, a.clone())
    scores = measured(compare, pair)
    assert scores.psnr == [math.inf] * 2 and scores.ssim == [1.0] * 2
    assert "inf: all frames are equal" in compare.describe(pair, scores)
    strip = compare.picture(pair, scores)
    assert strip.shape[0] == 1 and strip.shape[-1] == 3


@pytest.mark.parametrize(
    "shape, frames, shown_by",
    [
        ((1, 16, 3, 12, 20), 3, "Wan21"),
        ((2, 48, 2, 12, 12), 4, "Wan22"),
        ((1, 32, 1, 12, 12), 1, "HunyuanVideo15"),
        ((1, 4, 16, 16), 1, "SDXL"),
        ((1, 7, 2, 12, 12), 2, "no RGB factors for 7 channels"),
    ],
)
def test_latents_are_compared_frame_by_frame(compare, shape, frames, shown_by):
    a = torch.randn(shape)
    b = a + 0.1
    pair = compare.latent_pair(a, b)
    scores = measured(compare, pair)
    peak = float(a.max() - a.min())
    assert scores.psnr == pytest.approx([20 * math.log10(peak / 0.1)] * frames, abs=1e-3)
    text = compare.describe(pair, scores)
    assert shown_by in text and "| LPIPS | not computed: only of images |" in text
    assert f"relative L2 error {0.1 * a.numel() ** 0.5 / float(a.norm()):.4g}" in text
    assert pair.rgb_a.shape == (frames, 3, *shape[-2:])


def test_a_latent_looks_as_in_comfyuis_preview(compare):
    import comfy.latent_formats
    from latent_preview import Latent2RGBPreviewer

    wan = comfy.latent_formats.Wan21()
    model_space = torch.randn(1, 16, 2, 12, 20) / 4
    pair = compare.latent_pair(wan.process_out(model_space), wan.process_out(model_space))
    previewer = Latent2RGBPreviewer(wan.latent_rgb_factors, wan.latent_rgb_factors_bias)
    preview = numpy.asarray(previewer.decode_latent_to_preview(model_space))
    mine = pair.rgb_a[0].clamp(0, 1).mul(255).permute(1, 2, 0).numpy()
    assert numpy.abs(mine - preview).max() <= 1.0


def test_small_latents_have_no_ssim_and_say_why(compare):
    x = torch.randn(1, 16, 1, 8, 8)
    pair = compare.latent_pair(x, x + 1)
    text = compare.describe(pair, measured(compare, pair))
    assert "| SSIM | not computed: frames of 8x8 are smaller than its 11x11 window |" in text


def test_a_constant_latent_has_a_stated_peak(compare):
    pair = compare.latent_pair(torch.zeros(1, 16, 1, 12, 12), torch.ones(1, 16, 1, 12, 12))
    assert measured(compare, pair).psnr == [0.0] and "samples_a is constant: peak 1" in pair.notes


@pytest.mark.parametrize("difference, factor", [(0.5, 2), (0.1, 8), (0.004, 128), (1e-6, 256), (1.0, 1), (0.0, 1)])
def test_the_difference_is_amplified_by_a_power_of_two(compare, difference, factor):
    picture = importlib.import_module(compare.__name__ + "_picture")
    a = torch.zeros(1, 3, 16, 16)
    assert picture.amplification(a, a + difference) == factor


def test_the_strip_shows_a_b_and_the_amplified_difference(compare):
    picture = importlib.import_module(compare.__name__ + "_picture")
    a = torch.full((1, 3, 160, 320), 0.25)
    b = a.clone()
    b[:, 0] += 0.1
    strip = picture.draw(a, b, ["frame 1"], "title", ("a", "b"))[0]
    y, left = picture.HEADER + 50, picture.LABEL + 50
    pitch = picture.CELL + picture.GAP
    found = [strip[y, left + column * pitch].tolist() for column in range(3)]
    expected = [[0.25, 0.25, 0.25], [0.35, 0.25, 0.25], [0.8, 0, 0]]
    for pixel, colour in zip(found, expected):
        assert pixel == pytest.approx(colour, abs=2 / 255)


def test_the_worst_frame_is_in_the_strip(compare):
    picture = importlib.import_module(compare.__name__ + "_picture")
    scores = [40.0] * 81
    scores[23] = 12.0
    assert picture.choose_frames(scores) == [0, 23, 27, 53, 80]
    assert picture.choose_frames([1.0]) == [0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_numbers_are_refused(compare, bad):
    a, b = torch.rand(2, 12, 12, 3), torch.rand(2, 12, 12, 3)
    b[1, 2, 3, 0] = bad
    with pytest.raises(ValueError, match="images_b has 1 values that are NaN or infinite, of 864"):
        compare.image_pair(a, b)


def test_lpips_is_never_downloaded(lpips_distance, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert lpips_distance.load(torch.device("cpu")) == (None, "the lpips package is not installed")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setitem(__import__("sys").modules, "lpips", None)
    assert "cannot be imported: ModuleNotFoundError" in lpips_distance.load(torch.device("cpu"))[1]

    weights = types.SimpleNamespace(IMAGENET1K_V1=types.SimpleNamespace(url="https://x/alexnet-1.pth"))
    models = types.ModuleType("torchvision.models")
    models.AlexNet_Weights = weights
    package = types.ModuleType("lpips")
    package.LPIPS = lambda net, verbose: (_ for _ in ()).throw(AssertionError("built without weights"))
    monkeypatch.setitem(__import__("sys").modules, "lpips", package)
    monkeypatch.setitem(__import__("sys").modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(__import__("sys").modules, "torchvision.models", models)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    found, reason = lpips_distance.load(torch.device("cpu"))
    assert found is None and "alexnet-1.pth belongs in" in reason

    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "alexnet-1.pth").touch()

    class Network(torch.nn.Module):
        def forward(self, x, y):
            assert x.shape == y.shape == (1, 3, 33, 40) and float(x.min()) == -1 and float(y.max()) == 1
            return (x - y).abs().mean().reshape(1, 1, 1, 1)

    package.LPIPS = lambda net, verbose: Network()
    distance, _ = lpips_distance.load(torch.device("cpu"))
    assert distance(torch.zeros(3, 33, 40), torch.ones(3, 33, 40)) == 2.0


def image_graph(server, a, b):
    """A graph that compares two pictures through LoadImage."""
    graph, nodes = Graph(), []
    for name, pixels in (("compare_a.png", a), ("compare_b.png", b)):
        Image.fromarray((pixels * 255).round().astype(numpy.uint8)).save(server.workspace / "input" / name)
        nodes.append(graph.add("LoadImage", image=name))
    return graph, graph.add("TRTLLMCompare", images_a=nodes[0], images_b=nodes[1])


def test_images_in_comfyui(comfy_server):
    pixels = numpy.random.default_rng(3).random((48, 64, 3)).astype(numpy.float32) / 2
    graph, node = image_graph(comfy_server, pixels, pixels + 51 / 255)
    ui = comfy_server.run(graph).ui(node)
    assert f"| PSNR | {-20 * math.log10(51 / 255):.2f} dB |" in ui["text"][0]
    assert "| LPIPS | not computed: the lpips package is not installed |" in ui["text"][0]
    strip = comfy_server.workspace / "temp" / ui["images"][0]["subfolder"] / ui["images"][0]["filename"]
    assert strip.is_file()


def test_latents_in_comfyui_and_the_outputs(comfy_server):
    graph = Graph()
    latents = [graph.sample(graph.load("wan_t2v"), "wan_t2v", steps=1, cfg=1.0, seed=s, width=96, height=96) for s in (1, 2)]
    node = graph.add("TRTLLMCompare", samples_a=latents[0], samples_b=latents[1])
    text = graph.add("PreviewAny", source=node)
    strip = graph.add("PreviewImage", images=node[1])
    run = comfy_server.run(graph)
    assert "samples_b against samples_a: 2 frames of 12x12, 16 channels" in run.ui(text)["text"][0]
    assert run.ui(strip)["images"] and "Wan21" in run.ui(node)["text"][0]


@pytest.mark.parametrize(
    "wires, message",
    [
        ({}, "nothing to compare"),
        ({"images_a": 8}, "images_b is not connected, its partner is"),
        ({"images_b": 8}, "images_a is not connected"),
        ({"images_a": 8, "images_b": 16}, "images_a is 1x8x8x3 and images_b is 1x16x16x3: sizes must be equal"),
    ],
)
def test_refusals_in_comfyui(comfy_server, wires, message):
    graph = Graph()
    images = {n: graph.add("EmptyImage", width=s, height=s, batch_size=1, color=0) for n, s in wires.items()}
    graph.add("TRTLLMCompare", **images)
    with pytest.raises(PromptError, match=message):
        comfy_server.run(graph)
