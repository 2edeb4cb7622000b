"""The state of one patched model: settings by layer, the clock, and what a sampling run holds.

One `PatchRun` is made per Patch node. Everything that belongs to a run (time, counters, token
orders, what is known of masks) is dropped when the run ends, also when it is cancelled.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from ...trtllm_core.api import Plan, Refused, plan
from ...trtllm_core.backends import Unavailable
from ...trtllm_core.config import AttentionConfig
from ...trtllm_core.device import Device
from ...trtllm_core.layer_names import LayerPatterns
from ...trtllm_core.masks import MaskReader, mask_refusal
from ...trtllm_core.selector import announce
from ...trtllm_core.stats import RunStats
from ...trtllm_core.token_order import TokenOrders
from ..status import current_prompt, is_watched
from ..wires import RoleSettings, StatsHolder
from .clock import Clock
from .layers import ROLE_CATEGORIES
from .progress import Progress

log = logging.getLogger("trtllm_attention")


class PatchRun:
    """Settings and state shared by every attention call of one patched model.

    default: settings of every role not in `by_role`. device: where the model computes.
    token_order: "cubes" or "sequential". count_tiles: whether anybody will read tile counts and
    times. progress: where the run is shown while it goes on.
    """

    def __init__(
        self,
        default: RoleSettings,
        by_role: dict[str, RoleSettings],
        device: Device,
        *,
        token_order: str,
        holder: StatsHolder,
        count_tiles: bool,
        progress: Progress | None = None,
    ):
        self.default = default
        self.by_role = by_role
        self.config = AttentionConfig(
            default=default.spec, per_role={role: s.spec for role, s in by_role.items()}
        )
        self.device = device
        self.cubes = token_order == "cubes"
        self.kv_order = "own_first" if self.cubes else "sequential"
        self.holder = holder
        holder.patch = self
        self.count_tiles = count_tiles
        self.progress = progress
        self.clock = Clock()
        self.stats: RunStats | None = None
        self.masks = MaskReader()
        self.orders = TokenOrders()
        self.extra_tokens_lead = True
        self.mask_free = False
        self.sites: list = []
        self._said: set[str] = set()
        # of all layers: a package that cannot be imported is not tried again for each of them
        self._plans: dict[tuple, Plan] = {}
        self._broken: set[tuple] = set()
        self._tick = threading.Lock()  # models on several GPUs are called from a thread each

    def __deepcopy__(self, memo):
        return self

    def settings_for(self, role: str) -> tuple[RoleSettings, str]:
        """The settings of `role` and where they come from: exact, category, then default."""
        category = ROLE_CATEGORIES.get(role)
        _, source = self.config.resolve(role, category)
        for name in (role, category):
            if name in self.by_role:
                return self.by_role[name], source
        return self.default, source

    def ignores(self, settings: RoleSettings, layer: str) -> bool:
        """Whether Skip-Softmax leaves `layer` dense: the node's list or the calibration's."""
        if settings.spec.skip_softmax is None:
            return False
        listed = LayerPatterns(settings.ignore).selects(layer)
        return listed or (settings.calibration is not None and settings.calibration.ignores(layer))

    def has_calibration_for(self, role: str) -> bool:
        """Whether `role` either needs no calibrated curve or has one."""
        settings, _ = self.settings_for(role)
        skip = settings.spec.skip_softmax
        return skip is None or skip.target_sparsity is None or settings.calibration is not None

    def plan_role(
        self,
        role: str,
        head_dim: int | None,
        dtype: torch.dtype | None,
        gqa: bool = False,
        mask: str = "none",
        device: Device | None = None,
    ) -> Plan:
        """The plan of `role`, on the run's device if none is given; raises `Unavailable` with every reason."""
        device = device or self.device
        key = (role, head_dim, dtype, gqa, mask, device)
        if key in self._plans:
            return self._plans[key]
        settings, source = self.settings_for(role)
        decided = plan(
            settings.spec,
            device,
            role=role,
            source=source,
            head_dim=head_dim,
            dtype=dtype,
            gqa=gqa,
            mask=mask,
            mask_free=self.mask_free,
        )
        announce(decided.active.selection, role)
        self._plans[key] = decided
        return decided

    def plan_call(self, site, where, head_dim, dtype, gqa, mask_kind, mask) -> tuple[Plan | None, str]:
        """The plan for calls of this shape at `site`; None and a reason to leave them to ComfyUI.

        where: the torch.device of the call, another GPU than the run's where the model is on several.

        Raises Refused when the backend was chosen by name for this very role and a mask is what it
        cannot honour: ComfyUI's attention would not be what was asked for.
        """
        try:
            decided = self.plan_role(site.role, head_dim, dtype, gqa, mask_kind, self._device_at(where))
        except Unavailable as error:
            explicit = site.settings.spec.backend
            if mask_kind != "none" and explicit and self._chosen_for(site.role):
                raise Refused(mask_refusal(explicit, site.layer, mask)) from error
            return None, str(error)
        if _identity(decided) in self._broken:
            return None, f"{decided.active.backend} failed"
        return decided, ""

    def _device_at(self, where: torch.device) -> Device:
        return self.device if where.type != "cuda" or where.index == self.device.index else Device.current(where)

    def mask_kind(self, mask: torch.Tensor) -> str:
        """"padding" if `mask` only cuts a padded suffix, else "any"; looked at once per mask."""
        lengths = self.masks.key_lengths(mask, mask.shape[-1])
        return "any" if lengths is None else "padding"

    def _chosen_for(self, role: str) -> bool:
        # a text refiner that only inherits the default's backend is not what the user meant by it
        return role in self.by_role or role in ("self", "cross")

    def token_order(self, query: torch.Tensor, key: torch.Tensor):
        """The cube order of a self-attention call over the current grid, or None."""
        grid = self.clock.grid
        length = query.shape[1]
        if not self.cubes or grid is None or key.shape[1] != length:
            return None
        extra = length - grid[0] * grid[1] * grid[2]
        if extra < 0:
            return None
        lead = extra if self.extra_tokens_lead else 0
        return self.orders.get(grid, lead=lead, tail=extra - lead, device=query.device)

    def start(self, sigmas) -> None:
        """Begin a sampling run."""
        self.holder.replaced = False
        self.clock.start(sigmas)
        reported = self.count_tiles or self.holder.wanted
        shown = self.progress is not None and is_watched()
        self.stats = RunStats(reported or shown, len(self.clock.schedule) - 1, time_calls=reported)
        if self.progress is not None:
            self.progress.start(self.stats)

    def tick(self, model_sampling, sigma) -> None:
        """A model call at `sigma` begins."""
        with self._tick:
            self._advance(model_sampling, sigma)

    def _advance(self, model_sampling, sigma) -> None:
        self.clock.tick(model_sampling, sigma)
        if self.clock.timestep is None and self._has_gate():
            self.say(
                "the timestep gate cannot tell the time of this model's noise schedule: every step "
                "stays dense"
            )
        if self.progress is not None and self.stats is not None:
            self.progress.tick(self.clock)

    def _has_gate(self) -> bool:
        skips = (s.spec.skip_softmax for s in (self.default, *self.by_role.values()))
        return any(skip is not None and skip.disabled_until_timestep > 0 for skip in skips)

    def finish(self, completed: bool) -> None:
        """End the run: read the counters once and let every tensor of it go.

        completed: False where it was cancelled or failed.
        """
        stats, self.stats = self.stats, None
        self.clock.reset()
        self.masks.clear()
        self.orders.clear()
        if stats is None:
            return
        stats.finish()
        stats.completed, stats.prompt = completed, current_prompt()
        self.holder.add(stats)
        if self.progress is not None:
            self.progress.finish()
        if not stats.calls and not stats.declined:
            self.say(
                "the patch was never called in this run: the model's attention does not go "
                "through ComfyUI's optimized_attention, or another patch replaced it"
            )
        elif self.default.spec.skip_softmax is not None and not stats.sparse_calls:
            self.say(
                "Skip-Softmax was not in effect in this run: no call was past the timestep gate in a "
                "layer that is not ignored"
            )

    def observe(self, site, call) -> None:
        """Told of every call before it is computed. For subclasses that count; must not wait."""

    def declined(self, site, reason: str, decline: Callable):
        """Leave a call to ComfyUI, counted, and said once per reason."""
        self.say(f"{site.layer} ({site.role}): left to ComfyUI, {reason}")
        if self.stats is not None:
            self.stats.decline(reason)
        return decline()

    def failed(self, decided: Plan, call, error: Exception) -> str:
        """A kernel raised in mid-run: say so once, and use it no more. Returns the reason to count.

        Does not raise `error` itself: a frame that holds the exception it raised is a cycle, which keeps
        everything the model was computing.
        """
        self._broken.add(_identity(decided))
        for known in self.sites:
            known.forget_plans()
        backend = (decided.dense if call.threshold is None else decided.active).backend
        self.say(f"{backend} failed and is not used again: {type(error).__name__}: {error}")
        return f"{backend} failed"

    def say(self, text: str) -> None:
        """Log a warning once."""
        if text not in self._said:
            self._said.add(text)
            log.warning(text)


def _identity(decided: Plan) -> tuple:
    return decided.active.backend, decided.dense.backend, decided.spec
