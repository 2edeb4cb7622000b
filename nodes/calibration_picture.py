"""A picture of counted points and the curve fitted to them."""

from __future__ import annotations

import math

import numpy
import torch
from PIL import Image, ImageDraw, ImageFont

from ..trtllm_core.calibration import Calibration, Point

SIZE = (960, 600)
LEFT, TOP, RIGHT, BOTTOM = 130, 60, 30, 70  # margins
INK, GRID, DOT, OUTSIDE, LINE = "#1f2328", "#d8dee4", "#2f6fb3", "#b9c4d0", "#c4432b"


def draw(points: list[Point], calibration: Calibration, title: str) -> torch.Tensor:
    """Sparsity against threshold * keys (logarithmic) as an IMAGE [1, height, width, 3] in [0, 1].

    Points that the fit left out are grey, and cut off a decade below those that it kept. The text
    keeps to what Pillow's own font has, which is neither λ nor a raised 2.
    """
    image = Image.new("RGB", SIZE, "white")
    pen = ImageDraw.Draw(image)
    font, small = ImageFont.load_default(20), ImageFont.load_default(15)
    seen = calibration.notes.get("observed_sparsity", (0, 1))
    kept = [math.log10(p.factor) for p in points if seen[0] <= p.sparsity <= seen[1]]
    kept += [math.log10(calibration.factor(None, s)) for s in (0.1, 0.9)]
    low, high = math.floor(min(kept)) - 1, math.ceil(max(kept))
    width, height = SIZE[0] - LEFT - RIGHT, SIZE[1] - TOP - BOTTOM

    def place(sparsity: float, log: float) -> tuple[float, float]:
        y = TOP + height * (1 - (log - low) / max(high - low, 1))
        return LEFT + width * sparsity, y

    for tenth in range(0, 11, 2):
        x, _ = place(tenth / 10, low)
        pen.line([(x, TOP), (x, TOP + height)], fill=GRID)
        pen.text((x, TOP + height + 8), f"{tenth * 10}%", fill=INK, font=small, anchor="mt")
    for power in range(low, high + 1, max(1, (high - low) // 8)):
        _, y = place(0, power)
        pen.line([(LEFT, y), (LEFT + width, y)], fill=GRID)
        pen.text((LEFT - 8, y), f"1e{power}", fill=INK, font=small, anchor="rm")
    for point in points:
        if not 10**low <= point.factor <= 10**high:
            continue
        x, y = place(point.sparsity, math.log10(point.factor))
        colour = DOT if seen[0] <= point.sparsity <= seen[1] else OUTSIDE
        pen.ellipse([x - 2, y - 2, x + 2, y + 2], fill=colour)
    curve = [place(s / 100, math.log10(calibration.factor(None, s / 100))) for s in range(10, 91)]
    pen.line(curve, fill=LINE, width=3)
    pen.text((LEFT, 18), title, fill=INK, font=font)
    pen.text((LEFT + width / 2, SIZE[1] - 14), "skipped tiles", fill=INK, font=small, anchor="mb")
    pen.text((8, TOP - 10), "threshold x keys", fill=INK, font=small, anchor="lb")
    return torch.from_numpy(numpy.asarray(image).copy()).float().div(255).unsqueeze(0)
