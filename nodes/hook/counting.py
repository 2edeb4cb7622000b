"""A run that counts, for a calibration, the tiles that trial thresholds would skip."""

from __future__ import annotations

from ...trtllm_core.backends import AttentionCall
from ...trtllm_core.calibration_counts import CalibrationCounts
from ...trtllm_core.device import Device
from ...trtllm_core.gate import TimestepGate
from ...trtllm_core.layer_names import LayerPatterns
from ...trtllm_core.skip_rule import SkipRule
from ..status import show
from ..wires import RoleSettings, StatsHolder
from .run import PatchRun


class CountingRun(PatchRun):
    """Dense attention that counts each self-attention call before it is computed.

    Layers that `ignore` names and steps that `gate` keeps dense are left out. What was counted in a run that is cancelled stays; the next run adds to it.
    """

    def __init__(
        self,
        device: Device,
        rule: SkipRule,
        ignore: tuple[str, ...] = (),
        gate: TimestepGate = TimestepGate(),
        node_id: str | None = None,
    ):
        super().__init__(
            RoleSettings(),
            {},
            device,
            token_order=rule.token_order,
            holder=StatsHolder(),
            count_tiles=False,
        )
        self.counts = CalibrationCounts(rule)
        self.gate = gate
        self.dense_layers = LayerPatterns(ignore)
        self.grids: set[tuple[int, int, int]] = set()
        self.steps: list[int] = []
        self.unfinished = 0
        self._counted: dict[str, bool] = {}
        self._node_id = node_id
        self._shown_step = -1

    def start(self, sigmas) -> None:
        super().start(sigmas)
        self.counts.start_run()
        self.steps.append(len(self.clock.schedule) - 1)
        self._shown_step = -1

    def finish(self, completed: bool) -> None:
        if self.stats is not None and self.clock.step < len(self.clock.schedule) - 2:
            self.unfinished += 1
        super().finish(completed)
        self.counts.fetch()
        self._show(f"{self.summary()}; run it through Save Calibration")

    def observe(self, site, call: AttentionCall) -> None:
        if site.role != "self" or self.stats is None or self.gate.is_dense(self.clock.timestep):
            return
        counted = self._counted.get(site.layer)
        if counted is None:
            counted = self._counted[site.layer] = not self.dense_layers.selects(site.layer)
        if not counted:
            return
        query, key = call.query, call.key
        length = key.shape[1]
        if call.mask is not None:
            lengths = self.masks.host_key_lengths(call.mask, length)
            if lengths is None or len(set(lengths)) > 1:
                self.say(f"{site.layer}: calls with this mask are not counted for the calibration")
                return
            length = lengths[0]
        order = self.token_order(query, key)
        if order is not None and length >= order.end:  # else padding would move, as in Plan.run
            query, key = order.apply(query), order.apply(key)
        # of self-attention: the padding is the same at the end of both
        query, key = query[:, :length], key[:, :length]
        self.counts.count(site.layer, query, key, call.scale)
        if self.clock.step != self._shown_step:
            self._note_step()

    def _note_step(self) -> None:
        self._shown_step = self.clock.step
        if self.clock.grid is not None:
            self.grids.add(self.clock.grid)
        last = len(self.clock.schedule) - 1
        self._show(f"counting, run {self.counts.runs}, step {self.clock.step + 1} of {last}")

    def _show(self, text: str) -> None:
        show(self._node_id, text)

    def summary(self) -> str:
        """What was counted, in one line."""
        counts = self.counts
        text = f"{counts.calls} calls of {len(counts.layers)} layers in {counts.runs} runs counted"
        if self.unfinished:
            text += f" ({self.unfinished} cut short)"
        return text
