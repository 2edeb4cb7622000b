"""TRTLLM Compare: how far two videos, or two latents, are apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import comfy.model_management
import comfy.utils
import torch
from comfy_api.latest import io, ui

from ..trtllm_core.image_metrics import mean_squared_error, psnr_of_error, ssim
from . import lpips_distance
from .compare_picture import choose_frames, draw
from .latent_rgb import to_grey, to_rgb
from .report_text import table
from .schema import schema
from .status import show

DEFINITIONS = (
    "PSNR = 10 log10(peak² / mean squared error). SSIM: 11x11 Gaussian window of σ 1.5 wherever it fits, "
    "K1 0.01, K2 0.03, population covariance, each channel by itself. LPIPS: AlexNet, 0 is equal."
)


@dataclass(frozen=True)
class Pair:
    """Two batches as frames [N, C, H, W], the same as RGB to look at, and the peak of PSNR and SSIM."""

    names: tuple[str, str]
    a: torch.Tensor
    b: torch.Tensor
    rgb_a: torch.Tensor
    rgb_b: torch.Tensor
    peak: float
    notes: tuple[str, ...] = ()
    is_image: bool = True


@dataclass
class Scores:
    """One number per frame; ssim and lpips None where not computed, with the reason."""

    errors: list[float] = field(default_factory=list)
    psnr: list[float] = field(default_factory=list)
    ssim: list[float] | None = None
    lpips: list[float] | None = None
    reasons: dict[str, str] = field(default_factory=dict)


class TRTLLMCompare(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            "TRTLLMCompare",
            "TRTLLM Compare",
            "Measures two videos or two latents against each other, frame by frame: PSNR, SSIM and, "
            "where its package and weights are installed, LPIPS; with a picture of both and of their "
            "amplified difference.",
            search_aliases=("psnr", "ssim", "lpips", "difference", "A/B"),
            inputs=[
                io.Image.Input("images_a", optional=True, tooltip="The reference, such as the dense run."),
                io.Image.Input("images_b", optional=True, tooltip="What is compared with images_a."),
                io.Latent.Input("samples_a", optional=True, tooltip="Or: the reference's latent."),
                io.Latent.Input("samples_b", optional=True, tooltip="What is compared with samples_a."),
            ],
            outputs=[
                io.String.Output(display_name="report", tooltip="The text, as Markdown."),
                io.Image.Output(
                    display_name="strip", tooltip="Frames of a and b and their amplified difference."
                ),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, images_a=None, images_b=None, samples_a=None, samples_b=None) -> io.NodeOutput:
        _check_wires(images_a, images_b, samples_a, samples_b)
        pairs = []
        if images_a is not None:
            pairs.append(image_pair(images_a, images_b))
        if samples_a is not None:
            pairs.append(latent_pair(samples_a["samples"], samples_b["samples"]))
        progress = comfy.utils.ProgressBar(sum(len(pair.a) for pair in pairs))
        measured = [(pair, measure(pair, lambda: progress.update(1))) for pair in pairs]
        text = "# TRTLLM comparison\n\n"
        text += "\n\n".join(describe(pair, scores) for pair, scores in measured)
        text += f"\n\n{DEFINITIONS}\n"
        strip = picture(*measured[0])
        show(cls.hidden.unique_id, "; ".join(summary(*found) for found in measured))
        preview = ui.PreviewImage(strip, cls=cls).as_dict()
        return io.NodeOutput(text, strip, ui={**preview, "text": [text]})


def image_pair(a: torch.Tensor, b: torch.Tensor) -> Pair:
    """From two IMAGEs [N, H, W, C] in [0, 1]. Raises ValueError if they do not fit."""
    names = "images_a", "images_b"
    _check_tensors(names, a, b)
    a, b = a.movedim(-1, 1), b.movedim(-1, 1)
    shown = (_three_channels(x) for x in (a, b))
    return Pair(names, a, b, *shown, peak=1.0, notes=("peak 1",))


def latent_pair(a: torch.Tensor, b: torch.Tensor) -> Pair:
    """From two latents [B, C, H, W] or [B, C, T, H, W]. Raises ValueError if they do not fit."""
    names = "samples_a", "samples_b"
    _check_tensors(names, a, b)
    if a.ndim not in (4, 5):
        raise ValueError(f"samples_a is {_shape(a)}: only images and videos can be compared, 4-D or 5-D")
    a, b = a.cpu(), b.cpu()
    rgb_a, rgb_b = to_rgb(a), to_rgb(b)
    if rgb_a is None:
        shown = to_grey(a, a), to_grey(b, a)
        look = f"shown as the mean of its channels: no RGB factors for {a.shape[1]} channels"
    else:
        shown = rgb_a[0], rgb_b[0]
        look = f"shown by the RGB factors of {rgb_a[1]}, the usual latent of {a.shape[1]} channels"
    peak = float(a.max() - a.min())
    range_note = f"peak {peak:.4g}, the range of samples_a"
    if peak == 0:
        peak, range_note = 1.0, "samples_a is constant: peak 1"
    distance = float((a.double() - b.double()).norm() / a.double().norm().clamp(min=1e-300))
    notes = (range_note, f"relative L2 error {distance:.4g}", look)
    return Pair(names, *(_frames(x) for x in (a, b, *shown)), peak, notes, is_image=False)


def measure(pair: Pair, advance: Callable[[], None]) -> Scores:
    """All metrics of every frame; computes on the GPU if there is a CUDA one, a frame at a time."""
    device = comfy.model_management.get_torch_device()
    if device.type != "cuda":
        device = torch.device("cpu")
    scores = Scores()
    lpips, reason = None, "only of images"
    if pair.is_image:
        lpips, reason = lpips_distance.load(device)
    if lpips is None:
        scores.reasons["LPIPS"] = reason
    elif min(pair.a.shape[-2:]) < 32:
        lpips, scores.reasons["LPIPS"] = None, "frames are smaller than 32 pixels"
    for a, b, rgb_a, rgb_b in zip(pair.a, pair.b, pair.rgb_a, pair.rgb_b):
        comfy.model_management.throw_exception_if_processing_interrupted()
        a, b = a.to(device), b.to(device)
        error = mean_squared_error(a, b)
        scores.errors.append(error)
        scores.psnr.append(psnr_of_error(error, pair.peak))
        similarity = ssim(a, b, pair.peak)
        if similarity is None:
            scores.reasons["SSIM"] = f"frames of {_size(pair.a)} are smaller than its 11x11 window"
        else:
            scores.ssim = [*(scores.ssim or ()), similarity]
        if lpips is not None:
            scores.lpips = [*(scores.lpips or ()), lpips(rgb_a, rgb_b)]
        advance()
    return scores


def describe(pair: Pair, scores: Scores) -> str:
    """Means, worst frames and every frame, as Markdown."""
    count = len(scores.psnr)
    heading = f"## {pair.names[1]} against {pair.names[0]}: {count} frames of {_size(pair.a)}, {pair.a.shape[1]} channels"
    rows = [("PSNR", *_mean_and_worst(scores.psnr, "dB"))]
    overall = psnr_of_error(sum(scores.errors) / count, pair.peak)
    rows.append(("PSNR of the mean squared error", _decibel(overall), ""))
    for name, values, worst in (("SSIM", scores.ssim, min), ("LPIPS", scores.lpips, max)):
        if values is None:
            rows.append((name, f"not computed: {scores.reasons[name]}", ""))
        else:
            rows.append((name, *_mean_and_worst(values, "", worst)))
    columns = {"frame": [str(i + 1) for i in range(count)], "PSNR": [_decibel(v) for v in scores.psnr]}
    for name, values in (("SSIM", scores.ssim), ("LPIPS", scores.lpips)):
        if values is not None:
            columns[name] = [f"{value:.5f}" for value in values]
    parts = [
        heading,
        "; ".join(pair.notes) + ".",
        table(("metric", "mean of the frames", "worst frame"), rows),
        table(tuple(columns), list(zip(*columns.values()))),
    ]
    return "\n\n".join(parts)


def summary(pair: Pair, scores: Scores) -> str:
    overall = psnr_of_error(sum(scores.errors) / len(scores.errors), pair.peak)
    words = f"{pair.names[1]} against {pair.names[0]}: PSNR {_decibel(overall)}"
    if scores.ssim is not None:
        words += f", SSIM {sum(scores.ssim) / len(scores.ssim):.4f}"
    return words


def picture(pair: Pair, scores: Scores) -> torch.Tensor:
    """The strip: evenly spread frames and the worst one."""
    chosen = choose_frames(scores.psnr)
    labels = []
    for index in chosen:
        lines = [f"frame {index + 1}", _decibel(scores.psnr[index])]
        if scores.ssim is not None:
            lines.append(f"SSIM {scores.ssim[index]:.4f}")
        if scores.lpips is not None:
            lines.append(f"LPIPS {scores.lpips[index]:.4f}")
        labels.append("\n".join(lines))
    shown = (x[chosen].float() for x in (pair.rgb_a, pair.rgb_b))
    return draw(*shown, labels, summary(pair, scores), pair.names)


def _check_wires(images_a, images_b, samples_a, samples_b) -> None:
    wires = {"images_a": images_a, "images_b": images_b, "samples_a": samples_a, "samples_b": samples_b}
    for first, second in (("images_a", "images_b"), ("samples_a", "samples_b")):
        missing = [name for name in (first, second) if wires[name] is None]
        if len(missing) == 1:
            raise ValueError(f"{missing[0]} is not connected, its partner is: wire both")
    if all(wire is None for wire in wires.values()):
        raise ValueError("nothing to compare: wire images_a and images_b, or samples_a and samples_b")


def _check_tensors(names: tuple[str, str], a: torch.Tensor, b: torch.Tensor) -> None:
    for name, x in zip(names, (a, b)):
        if getattr(x, "is_nested", False):
            raise ValueError(f"{name} holds several latents in one (video and audio): split them first")
        if x.numel() == 0:
            raise ValueError(f"{name} is empty: {_shape(x)}")
        bad = int((~torch.isfinite(x)).sum())
        if bad:
            raise ValueError(f"{name} has {bad:,} values that are NaN or infinite, of {x.numel():,}")
    if a.shape != b.shape:
        raise ValueError(f"{names[0]} is {_shape(a)} and {names[1]} is {_shape(b)}: sizes must be equal")


def _frames(x: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] or [B, C, T, H, W] as [B * T, C, H, W]."""
    return x if x.ndim == 4 else x.movedim(2, 1).flatten(0, 1)


def _three_channels(x: torch.Tensor) -> torch.Tensor:
    return x[:, :3] if x.shape[1] >= 3 else x[:, :1].expand(-1, 3, -1, -1)


def _mean_and_worst(values: list[float], unit: str, worst=min) -> tuple[str, str]:
    at = values.index(worst(values))
    finite = [value for value in values if math.isfinite(value)]
    if unit != "dB":
        return f"{sum(values) / len(values):.5f}", f"{values[at]:.5f} (frame {at + 1})"
    if not finite:
        return "inf: all frames are equal", ""
    equal = len(values) - len(finite)
    note = f", without {equal} equal frames" if equal else ""
    return f"{_decibel(sum(finite) / len(finite))}{note}", f"{_decibel(values[at])} (frame {at + 1})"


def _decibel(value: float) -> str:
    return f"{value:.2f} dB"


def _shape(x: torch.Tensor) -> str:
    return "x".join(str(n) for n in x.shape)


def _size(frames: torch.Tensor) -> str:
    return f"{frames.shape[-1]}x{frames.shape[-2]}"
