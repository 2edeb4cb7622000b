"""A model's calibrated curve: from a requested sparsity to the threshold that gives it.

ModelOpt's model: λ * key_length = a * exp(b * sparsity). The coefficients come from a calibrated
checkpoint, from one of our own files, or from points counted in a dense run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from . import calibration_schema as schema
from .layer_names import COMPONENTS, LayerPatterns
from .skip_rule import SkipRule
from .specs import number, one_of

FEWEST_POINTS = 10
FEWEST_KEPT = 3
KEPT_SPARSITY = (0.10, 0.90)
LOWEST_R_SQUARED = 0.3  # high- and low-noise steps differ: 0.6 to 0.8 is usual on a small Wan
_LARGEST_LOG_FACTOR = math.log(2.0**127)  # kernels take λ as float32


class Point(NamedTuple):
    """One measurement: `factor` = λ * key_length skipped this share of the tiles."""

    sparsity: float
    factor: float


@dataclass(frozen=True)
class Calibration:
    """One component's curve.

    a, b: λ = a * exp(b * target_sparsity) / key_length. Both None: the checkpoint has no curve for
    this component, which stays dense; `notes["absent"]` says why.
    ignore: patterns of layers that stay dense.
    notes: shown, never applied: the checkpoint's target_sparsity and disabled_until_timestep, its
    producer, and for our files the model, shapes, steps, fit and skip rule (tile, kv_order,
    token_order). rule: the SkipRule that the curve holds for, ModelOpt's unless the notes say.
    components: every component that the source has a curve for.
    """

    a: float | None
    b: float | None
    ignore: tuple[str, ...] = ()
    notes: Mapping = field(default_factory=dict)
    component: str = COMPONENTS[0]
    components: tuple[str, ...] = (COMPONENTS[0],)

    def __post_init__(self):
        one_of("calibration component", self.component, COMPONENTS)
        if not self.is_absent:
            schema.check_coefficient("calibration a", self.a)
            schema.check_coefficient("calibration b", self.b)
        object.__setattr__(self, "_patterns", LayerPatterns(self.ignore, self.component))
        object.__setattr__(self, "rule", rule_of(self.notes))

    @classmethod
    def load(
        cls, source: str | os.PathLike | Mapping, component: str = COMPONENTS[0]
    ) -> Calibration:
        """The curve of `component` in a file, folder or mapping (see calibration_schema.read).

        A source with one curve that does not say whose it is gives that curve. A folder without a
        curve for transformer_2 gives an absent one, which keeps that expert dense. Raises
        ValueError or FileNotFoundError, which name what to use instead when nothing is found.
        """
        one_of("calibration component", component, COMPONENTS)
        curves = schema.read(source)
        shown = "the given mapping" if isinstance(source, Mapping) else str(source)
        components = tuple(name or component for name in curves)
        curve = curves.get(component) or curves.get(None)
        if curve is None and curves and component != COMPONENTS[0]:
            reason = f"{shown} has no curve for {component}: it stays dense"
            return cls(None, None, (), {"absent": reason}, component, components)
        if curve is None:
            only = f"; it has one for {' and '.join(components)}" if components else ""
            raise ValueError(
                f"{shown} has no Skip-Softmax calibration ({schema.BLOCK}) for {component}{only}. "
                f"{schema.ALTERNATIVE}"
            )
        return cls(curve.a, curve.b, curve.ignore, curve.notes, component, components)

    @classmethod
    def fit(
        cls,
        points: Iterable[tuple[float, float]],
        *,
        ignore: Iterable[str] = (),
        notes: Mapping | None = None,
        component: str = COMPONENTS[0],
        lowest_r_squared: float = LOWEST_R_SQUARED,
    ) -> Calibration:
        """ModelOpt's fit of (sparsity, factor) points: least squares on ln factor = ln a + b * sparsity.

        Points outside KEPT_SPARSITY are left out. Raises ValueError with the reason when there are
        fewer than FEWEST_POINTS points or FEWEST_KEPT kept ones, when b <= 0, or when the curve
        explains too little (R squared in log space). The notes gain the fit's figures.
        """
        points = [Point(float(x), float(y)) for x, y in points]
        if len(points) < FEWEST_POINTS:
            raise ValueError(
                f"{len(points)} points are too few for a calibration, {FEWEST_POINTS} are needed: "
                f"sample with the calibrating model first"
            )
        low, high = KEPT_SPARSITY
        kept = [p for p in points if low <= p.sparsity <= high and 0 < p.factor < math.inf]
        if len(kept) < FEWEST_KEPT:
            seen = [p.sparsity for p in points]
            raise ValueError(
                f"only {len(kept)} of {len(points)} points lie between {low:.0%} and {high:.0%} "
                f"sparsity, {FEWEST_KEPT} are needed; the run saw {min(seen):.0%} to {max(seen):.0%}: "
                f"sample larger or longer videos, a few tiles are skipped all or none"
            )
        log_a, b, r_squared = _least_squares([(p.sparsity, math.log(p.factor)) for p in kept])
        if not b > 0:
            raise ValueError(
                f"the fit gives b = {b:.4g}: sparsity does not rise with the threshold, "
                f"so these points are no calibration"
            )
        if r_squared < lowest_r_squared:
            raise ValueError(
                f"the fit explains too little (R squared {r_squared:.2f}, at least "
                f"{lowest_r_squared:g} is needed): calibrate on more similar shapes and prompts"
            )
        seen = [p.sparsity for p in kept]
        figures = {
            "r_squared": r_squared,
            "points": len(points),
            "points_kept": len(kept),
            "observed_sparsity": [min(seen), max(seen)],
        }
        notes = {**(notes or {}), **figures}
        return cls(math.exp(log_a), b, tuple(ignore), notes, component, (component,))

    @property
    def is_absent(self) -> bool:
        """Whether this component has no curve and stays dense."""
        return self.a is None and self.b is None

    def ignores(self, layer: str) -> bool:
        """Whether the checkpoint keeps `layer` (any of its names) dense; an absent curve, every one."""
        return self.is_absent or self._patterns.selects(layer)

    def unmatched(self, layers: Iterable[str]) -> tuple[str, ...]:
        """Ignore patterns that match none of a model's layers: a sign of another model's curve."""
        return self._patterns.unmatched(layers)

    def factor(self, layer: str | None, target_sparsity: float) -> float | None:
        """λ * key_length for a requested sparsity in [0, 1]; None keeps the layer dense."""
        number("target_sparsity", target_sparsity, 0, 1)
        if self.is_absent or (layer is not None and self._patterns.selects(layer)):
            return None
        if math.log(self.a) + self.b * target_sparsity > _LARGEST_LOG_FACTOR:
            raise ValueError(
                f"{self.a:g} * exp({self.b:g} * {target_sparsity:g}) overflows: "
                f"this curve cannot be right for target_sparsity={target_sparsity:g}"
            )
        return self.a * math.exp(self.b * target_sparsity)

    def threshold(self, target_sparsity: float, key_length: int) -> float | None:
        """λ for a requested sparsity at `key_length` keys; None stays dense."""
        factor = self.factor(None, target_sparsity)
        return None if factor is None else factor / key_length

    def warnings(
        self,
        target_sparsity: float,
        *,
        used: SkipRule | None = None,
        layers: Iterable[str] = (),
        model: str | None = None,
    ) -> tuple[str, ...]:
        """What a user should hear before a run with this curve, one sentence each.

        used: the rule that the run's kernel skips by. layers: the model's layer names. model: what
        our own files note as model; None is not compared.
        """
        if self.is_absent:
            return (self.notes["absent"],)
        found = []
        made_for = self.notes.get("model")
        if made_for and model and made_for != model:
            found.append(f"the calibration was made on {made_for}, this model is {model}")
        layers = tuple(layers)
        unmatched = self.unmatched(layers) if layers else ()
        if unmatched:
            found.append(
                f"{len(unmatched)} of the {len(self.ignore)} layers that the calibration ignores are "
                f"not in this model (such as {unmatched[0]}): is it another model's calibration?"
            )
        low, high = self.notes.get("observed_sparsity", KEPT_SPARSITY)
        if not low <= target_sparsity <= high:
            found.append(
                f"target_sparsity={target_sparsity:g} lies outside the {low:.0%} to {high:.0%} that "
                f"the calibration saw: the achieved sparsity may be far from it"
            )
        if used is not None and used != self.rule:
            found.append(
                f"the calibration was counted with {self.rule}, this run skips by {used}: "
                f"{_drift(self.rule, used)}"
            )
        return tuple(found)

    def save(self, path: str | os.PathLike, targets: tuple[str, ...] = ("Attention",)) -> None:
        """Write the curve as ModelOpt's JSON; an existing file keeps its other keys.

        Written into a checkpoint's `transformer/config.json` it calibrates that checkpoint for
        vLLM-Omni and TensorRT-LLM. Layers to ignore are added under Diffusers' names.
        """
        if self.is_absent:
            raise ValueError(f"there is no curve to save: {self.notes.get('absent', '')}")
        curve = schema.Curve(self.a, self.b, self.ignore, dict(self.notes))
        schema.write(path, schema.to_block(curve, targets))


def rule_of(notes: Mapping) -> SkipRule:
    """The rule that `notes` name; ModelOpt's where they name none."""
    given = {key: notes[key] for key in ("tile", "kv_order", "token_order") if key in notes}
    return SkipRule(**given)


def _drift(counted: SkipRule, used: SkipRule) -> str:
    before, now = _skips(counted), _skips(used)
    direction = "more" if now > before else "less" if now < before else "other"
    return (
        f"expect {direction} sparsity than requested (a small Wan at one threshold: {now:.0%} of the "
        f"tiles instead of {before:.0%})"
    )


def _skips(rule: SkipRule) -> float:
    """Share of tiles skipped at λ = 0.1: a trained small Wan, 8x16x16 tokens, mean of 20 steps."""
    small_tile = rule.tile[0] * rule.tile[1] < 128 * 128
    return _SKIPPED[rule.kv_order, rule.token_order][small_tile]


# by KV order and token order: (128x128 tiles, 128x64 or 64x128 tiles)
_SKIPPED = {
    ("sequential", "sequential"): (0.08, 0.19),
    ("own_first", "sequential"): (0.14, 0.27),
    ("sequential", "cubes"): (0.21, 0.24),
    ("own_first", "cubes"): (0.29, 0.34),
}


def _least_squares(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Intercept, slope and R squared of the line through (x, y) pairs; slope 0 if x is constant."""
    count = len(pairs)
    mean_x = math.fsum(x for x, _ in pairs) / count
    mean_y = math.fsum(y for _, y in pairs) / count
    spread_x = math.fsum((x - mean_x) ** 2 for x, _ in pairs)
    spread_y = math.fsum((y - mean_y) ** 2 for _, y in pairs)
    shared = math.fsum((x - mean_x) * (y - mean_y) for x, y in pairs)
    slope = shared / spread_x if spread_x > 0 else 0.0
    rest = math.fsum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in pairs)
    return mean_y - slope * mean_x, slope, 1 - rest / spread_y if spread_y > 0 else 0.0
