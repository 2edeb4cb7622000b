"""Frames of two batches side by side, with their difference amplified."""

from __future__ import annotations

import math

import numpy
import torch
from PIL import Image, ImageDraw, ImageFont

CELL = 320  # pixels, the longer side of a frame
LABEL, GAP, HEADER = 130, 10, 92
INK, QUIET = "#1f2328", "#59636e"
LARGEST_FACTOR = 256
NEARLY_ALL = 0.999


def choose_frames(scores: list[float], count: int = 4) -> list[int]:
    """Up to `count` frames evenly spread, and the one that scores lowest."""
    last = len(scores) - 1
    spread = {round(last * i / max(count - 1, 1)) for i in range(count)}
    return sorted(spread | {min(range(len(scores)), key=scores.__getitem__)})


def amplification(a: torch.Tensor, b: torch.Tensor) -> int:
    """The largest power of two, up to 256, under which 99.9% of the differences stay below 1."""
    differences = (a - b).abs().flatten().cpu().numpy()
    typical = float(numpy.quantile(differences, NEARLY_ALL)) or float(differences.max())
    if typical == 0:
        return 1
    return 2 ** min(max(math.floor(math.log2(1 / typical)), 0), int(math.log2(LARGEST_FACTOR)))


def draw(
    a: torch.Tensor, b: torch.Tensor, labels: list[str], title: str, names: tuple[str, str]
) -> torch.Tensor:
    """RGB frames a, b [N, 3, H, W] in [0, 1] as rows A | B | difference: IMAGE [1, h, w, 3].

    labels: what to say beside each row, lines separated by newlines. Values outside [0, 1] are
    shown as the nearest colour.
    """
    factor = amplification(a, b)
    width, height, resample = _cell_size(a.shape[-1], a.shape[-2])
    size = LABEL + 3 * (width + GAP), HEADER + len(labels) * (height + GAP)
    image = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(image)
    large, small = ImageFont.load_default(24), ImageFont.load_default(17)
    pen.text((GAP, 14), title, fill=INK, font=large)
    difference = (a - b).abs() * factor
    columns = (*names, f"|a - b| x {factor}")
    for column, heading in enumerate(columns):
        pen.text((LABEL + column * (width + GAP), HEADER - 10), heading, fill=INK, font=small, anchor="ls")
    for row, label in enumerate(labels):
        y = HEADER + row * (height + GAP)
        pen.text((GAP, y), label, fill=QUIET, font=small, spacing=8)
        for column, frames in enumerate((a, b, difference)):
            cell = _picture(frames[row]).resize((width, height), resample)
            image.paste(cell, (LABEL + column * (width + GAP), y))
    return torch.from_numpy(numpy.asarray(image).copy()).float().div(255).unsqueeze(0)


def _cell_size(width: int, height: int) -> tuple[int, int, Image.Resampling]:
    """Small frames grow by a whole factor, pixels kept; large ones shrink."""
    longer = max(width, height)
    if longer <= CELL:
        times = CELL // longer
        return width * times, height * times, Image.Resampling.NEAREST
    return max(1, round(width * CELL / longer)), max(1, round(height * CELL / longer)), Image.Resampling.BOX


def _picture(frame: torch.Tensor) -> Image.Image:
    pixels = frame.clamp(0, 1).mul(255).round().byte().permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(numpy.ascontiguousarray(pixels))
