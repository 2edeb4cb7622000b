"""The picture of a run: tiles skipped by layer and step, the gate, and what each role cost."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy
import torch
from PIL import Image, ImageDraw, ImageFont

from ..trtllm_core.stats import RunStats
from .report_summary import RoleTotals, by_role, dense_steps, duration, operations

WIDTH = 1280
LEFT, RIGHT, TOP = 240, 110, 96  # margins of the heat map
PLOT = WIDTH - LEFT - RIGHT
INK, QUIET, PAPER, RULE = "#1f2328", "#59636e", "#ffffff", "#d8dee4"
NO_CALL, DENSE, UNCOUNTED, GATE = "#f1f3f5", "#bcc2c9", "#d9c3e6", "#d1242f"
# share of skipped tiles -> colour
SCALE = ((0.0, (255, 243, 191)), (0.25, (161, 215, 155)), (0.5, (53, 162, 159)), (0.75, (37, 98, 150)), (1.0, (32, 26, 78)))
ROW_HEIGHTS = (4, 26)
MAP_HEIGHT = 720  # of all rows together, within ROW_HEIGHTS
HEADER = 30
BAR = 30
SPARSE_BAR, SAVED_BAR = "#35a29f", "#e6f4f1"


@dataclass(frozen=True)
class Group:
    """The rows of one role: a row per layer if any of its calls skipped, else one for all."""

    totals: RoleTotals
    rows: tuple[tuple[str, ...], ...]
    dense_steps: int | None
    cutoff: float


def draw(run: RunStats, title: str, subtitle: str, cutoffs: dict[str, float]) -> torch.Tensor:
    """`run` as an IMAGE [1, height, 1280, 3] in [0, 1].

    cutoffs: role -> disabled_until_timestep of its gate, 0 for none.
    """
    roles = by_role(run)
    groups = [_group(totals, cutoffs.get(totals.role, 0.0)) for totals in roles]
    steps = max([run.steps, *(site.step + 1 for site in run.sites.values())])
    rows = sum(len(group.rows) for group in groups)
    row_height = min(max(MAP_HEIGHT / max(rows, 1), ROW_HEIGHTS[0]), ROW_HEIGHTS[1])
    map_height = sum(HEADER + round(len(group.rows) * row_height) for group in groups)
    image = Image.new("RGB", (WIDTH, TOP + map_height + 150 + BAR * (len(roles) + 1)), PAPER)
    pen = ImageDraw.Draw(image)
    _text(pen, (24, 20), title, 24)
    _text(pen, (24, 52), _wrap(subtitle, WIDTH - 48, 15), 15, QUIET)
    if not roles:
        _text(pen, (24, TOP + 20), "no attention call was made through the patch", 18, QUIET)
        return _as_tensor(image)
    y = TOP
    for group in groups:
        y = _draw_group(image, pen, group, steps, y, row_height)
    _draw_steps(pen, run, steps, y)
    _draw_scale(pen, TOP + HEADER)
    _draw_legend(pen, y + 66)
    _draw_bars(pen, roles, y + 112)
    return _as_tensor(image)


def _group(totals: RoleTotals, cutoff: float) -> Group:
    layers = [(layer,) for layer in totals.layers] if totals.sparse_calls else [tuple(totals.layers)]
    return Group(totals, tuple(layers), dense_steps(totals.sites, cutoff), cutoff)


def _draw_group(image, pen, group: Group, steps: int, top: int, row_height: float) -> int:
    """Draw a role's header, rows and gate; returns where the next group starts."""
    totals = group.totals
    note = f"{len(totals.layers)} layers" if len(totals.layers) > 1 else "1 layer"
    if totals.sparsity is not None:
        note += f", {totals.sparsity:.1%} of the tiles of its sparse calls skipped"
    elif totals.sparse_calls:
        note += ", skipped tiles not counted"
    else:
        note += ", dense in every step"
    _text(pen, (LEFT, top + HEADER - 6), f"{totals.role}: {note}", 16, anchor="ls")
    top += HEADER
    height = round(len(group.rows) * row_height)
    cells = _cells(group, min(steps, PLOT), steps)
    image.paste(_cell_picture(cells, height), (LEFT, top))
    _draw_cell_lines(pen, cells, top, height)
    _draw_row_labels(pen, group.rows, top, row_height)
    if group.dense_steps is not None:
        _draw_gate(pen, group, steps, top, height)
    return top + height


def _cells(group: Group, columns: int, steps: int) -> numpy.ndarray:
    """Per row and column: the skipped share, or -1 no call, -2 dense, -3 sparse but not counted."""
    row_of = {layer: index for index, row in enumerate(group.rows) for layer in row}
    shape = (len(group.rows), columns)
    skipped, total = numpy.zeros(shape), numpy.zeros(shape)
    value = numpy.full(shape, -1.0)
    for site in group.totals.sites:
        at = row_of[site.layer], site.step * columns // steps
        if not site.sparse_calls:
            value[at] = -2.0 if value[at] == -1.0 else value[at]
            continue
        value[at] = -3.0
        if site.skipped_tiles is not None:
            skipped[at] += site.skipped_tiles
            total[at] += site.total_tiles
    counted = total > 0
    value[counted] = skipped[counted] / total[counted]
    return value


def _cell_picture(cells: numpy.ndarray, height: int) -> Image.Image:
    shares, colours = zip(*SCALE)
    pixels = numpy.stack([numpy.interp(cells, shares, channel) for channel in zip(*colours)], axis=-1)
    for code, colour in ((-1, NO_CALL), (-2, DENSE), (-3, UNCOUNTED)):
        pixels[cells == code] = Image.new("RGB", (1, 1), colour).getpixel((0, 0))
    rows = numpy.arange(height) * cells.shape[0] // height
    columns = numpy.arange(PLOT) * cells.shape[1] // PLOT
    return Image.fromarray(pixels.astype(numpy.uint8)[rows][:, columns])


def _draw_cell_lines(pen, cells: numpy.ndarray, top: int, height: int) -> None:
    """Gaps between cells and the share in each, as far as there is room for them."""
    rows, columns = cells.shape
    cell_width, cell_height = PLOT / columns, height / rows
    if cell_width >= 7:
        for column in range(1, columns):
            x = LEFT + -(-column * PLOT // columns)
            pen.line([(x, top), (x, top + height)], fill=PAPER)
    if cell_height >= 7:
        for row in range(1, rows):
            y = top + -(-row * height // rows)
            pen.line([(LEFT, y), (LEFT + PLOT, y)], fill=PAPER)
    if cell_width < 38 or cell_height < 17:
        return
    for (row, column), value in numpy.ndenumerate(cells):
        if value < 0:
            continue
        ink = "white" if value > 0.45 else INK
        middle = LEFT + (column + 0.5) * cell_width, top + (row + 0.5) * cell_height
        _text(pen, middle, f"{value:.0%}", 13, ink, "mm")


def _draw_row_labels(pen, rows, top: int, row_height: float) -> None:
    every = _every(18 / row_height)
    for index, row in enumerate(rows):
        if index % every == 0:
            label = row[0] if len(row) == 1 else f"all {len(row)} layers"
            middle = top + (index + 0.5) * row_height
            _text(pen, (LEFT - 10, middle), _elide(label, LEFT - 30, 14), 14, anchor="rm")


def _draw_gate(pen, group: Group, steps: int, top: int, height: int) -> None:
    x = LEFT + round(group.dense_steps * PLOT / steps)
    pen.line([(x, top), (x, top + height)], fill=GATE, width=3)
    words = f"gate t = {group.cutoff:g}: {group.dense_steps} of {steps} steps dense"
    _text(pen, (LEFT + PLOT, top - 6), words, 15, GATE, "rs")


def _draw_steps(pen, run: RunStats, steps: int, y: int) -> None:
    """Step numbers, from 1, with the normalized timestep of each below."""
    times = {site.step: site.timestep for site in run.sites.values()}
    every = _every(steps / 20)
    for label in range(1, steps + 1):
        last = label == steps
        if label % every and label != 1 and not last or steps - every / 2 < label < steps:
            continue
        x = LEFT + (label - 0.5) * PLOT / steps
        pen.line([(x, y + 2), (x, y + 7)], fill=QUIET)
        _text(pen, (x, y + 10), str(label), 14, anchor="mt")
        if times.get(label - 1) is not None:
            _text(pen, (x, y + 28), f"{times[label - 1]:.2f}", 13, QUIET, "mt")
    _text(pen, (LEFT - 24, y + 10), "step", 14, anchor="rt")
    _text(pen, (LEFT - 24, y + 28), "normalized timestep t", 13, QUIET, "rt")


def _draw_scale(pen, top: int) -> None:
    """The colour bar of skipped shares, right of the map."""
    x, height = LEFT + PLOT + 24, 160
    shares, colours = zip(*SCALE)
    for offset in range(height):
        share = 1 - offset / (height - 1)
        colour = tuple(round(float(numpy.interp(share, shares, channel))) for channel in zip(*colours))
        pen.line([(x, top + offset), (x + 16, top + offset)], fill=colour)
    for share in (0, 0.5, 1):
        _text(pen, (x + 24, top + (1 - share) * (height - 1)), f"{share:.0%}", 13, anchor="lm")
    _text(pen, (x, top - 12), "skipped", 13, QUIET, "ls")


def _draw_legend(pen, y: int) -> None:
    x = LEFT
    for colour, words in ((DENSE, "dense"), (UNCOUNTED, "skips, not counted"), (NO_CALL, "no call")):
        pen.rectangle([x, y, x + 15, y + 15], fill=colour, outline=QUIET)
        _text(pen, (x + 23, y + 8), words, 14, anchor="lm")
        x += 60 + round(_font(14).getlength(words))


def _draw_bars(pen, roles: list[RoleTotals], y: int) -> None:
    """A bar per role: its time where every role's is known, else its estimated work."""
    timed = all(totals.seconds is not None for totals in roles)
    if timed:
        heading = "Time in attention by role"
        parts = [((totals.dense_seconds or 0, DENSE), (totals.sparse_seconds or 0, SPARSE_BAR)) for totals in roles]
        legend = ((DENSE, "dense calls"), (SPARSE_BAR, "calls that skip"))
    else:
        heading = "Estimated work by role (calls were not timed)"
        parts = [_work_parts(totals) for totals in roles]
        legend = ((DENSE, "dense calls"), (SPARSE_BAR, "calls that skip"), (SAVED_BAR, "saved"))
    _text(pen, (24, y + 8), heading, 16, anchor="lm")
    x = LEFT + PLOT
    for colour, words in reversed(legend):
        x -= round(_font(14).getlength(words)) + 44
        pen.rectangle([x, y, x + 15, y + 15], fill=colour, outline=QUIET)
        _text(pen, (x + 23, y + 8), words, 14, anchor="lm")
    whole = sum(amount for part in parts for amount, _ in part)
    longest = max(sum(amount for amount, _ in part) for part in parts)
    for index, (totals, part) in enumerate(zip(roles, parts)):
        top = y + BAR + index * BAR
        amount = sum(amount for amount, _ in part)
        _text(pen, (LEFT - 10, top + 10), _elide(totals.role, LEFT - 30, 14), 14, anchor="rm")
        x = float(LEFT)
        for value, colour in part:
            width = value / (longest or 1) * (PLOT - 250)
            if width >= 1:
                pen.rectangle([x, top, x + width, top + 20], fill=colour, outline=QUIET)
            x += width
        share = amount / whole if whole else 0
        quantity = duration(amount) if timed else operations(amount)
        _text(pen, (x + 10, top + 10), f"{quantity}, {share:.0%}; {totals.calls:,} calls", 14, anchor="lm")


def _work_parts(totals: RoleTotals):
    saved = totals.saved_work
    sparse = totals.sparse_work - saved
    return (totals.work - totals.sparse_work, DENSE), (sparse, SPARSE_BAR), (saved, SAVED_BAR)


def _every(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50, ... that is at least `least`."""
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power >= least:
                return digit * power
        power *= 10


def _elide(words: str, width: int, size: int) -> str:
    """`words`, cut at the front to `width` pixels: the end of a layer's name tells it apart."""
    if _font(size).getlength(words) <= width:
        return words
    while _font(size).getlength("..." + words) > width:
        words = words[1:]
    return "..." + words


def _wrap(words: str, width: int, size: int) -> str:
    """`words` broken at its commas into lines of at most `width` pixels."""
    lines = [""]
    for part in words.split(", "):
        longer = f"{lines[-1]}, {part}" if lines[-1] else part
        if _font(size).getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return "\n".join(lines)


def _text(pen, at, words: str, size: int, fill=INK, anchor="la") -> None:
    pen.text(at, words, fill=fill, font=_font(size), anchor=anchor)


@functools.cache
def _font(size: int):
    return ImageFont.load_default(size)


def _as_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(numpy.asarray(image).copy()).float().div(255).unsqueeze(0)
