"""The words of a run's report, as Markdown."""

from __future__ import annotations

import torch
from comfyui_version import __version__ as comfyui_version

from ..trtllm_core.device import Device
from ..trtllm_core.specs import AttentionSpec
from ..trtllm_core.stats import RunStats, SiteStats
from .report_summary import RoleTotals, by_role, dense_steps, duration, operations
from .status import current_prompt
from .wires import RoleSettings, StatsHolder

FEW = 5  # layers named at either end
TITLE = "TRTLLM attention report"
NO_PATCH = "No statistics are wired: the patch is bypassed, or its stats output is not linked."
REPLACED = (
    "A later Attention Patch or Calibrate on the same model took this patch's place: it was not in effect since."
)
EARLIER_PROMPT = (
    "**The patched model was not sampled in this prompt; this is its last run.** Where the sampler's result came "
    "from the cache, that is the run that made it."
)
NO_RUN = (
    "No run yet: the patched model was not sampled before this report. Wire the Attention Patch's "
    "MODEL into a sampler, and that sampler's LATENT into samples."
)
NEVER_CALLED = (
    "The patch was never called: the model's attention does not go through ComfyUI's "
    "optimized_attention, or a node after the Attention Patch replaced it."
)
NOT_RECORDED = (
    "{} not recorded in this run: the Attention Patch ran before its stats output was linked. The next "
    "run records them; change the seed to make it sample again."
)
FORMULA = (
    "Work is 4 · batch · heads · queries · keys · head size operations a call. A skipped tile leaves "
    "out P·V, half of its share; Q·Kᵀ is always computed. So saved = ½ · Σ(work of sparse calls · "
    "their skipped share) / Σ(work of all calls), the exponentials that are left out not counted."
)


def report(stats: StatsHolder) -> str:
    """Everything known about the last run of `stats`."""
    run = stats.last
    if run is None:
        return "\n\n".join((f"# {TITLE}", *doubts(stats), NO_RUN, versions(stats))) + "\n"
    roles = by_role(run)
    parts = [f"# {TITLE}", *doubts(stats), f"**{summary(run)}**", versions(stats)]
    if roles:
        settings = {totals.role: stats.patch.settings_for(totals.role)[0] for totals in roles}
        parts += [_what_ran(roles, settings), _what_it_gave(roles, settings), _layers(roles)]
    parts += [_declined(run), _notes(run, roles, stats), _runs(stats)]
    return "\n\n".join(part for part in parts if part) + "\n"


def doubts(stats: StatsHolder) -> list[str]:
    """Why the last run may not be the one that made the samples."""
    if stats.last is not None and stats.last.prompt == current_prompt():
        return []
    earlier = [] if stats.last is None else [EARLIER_PROMPT]
    return [*earlier, REPLACED] if stats.replaced else earlier


def summary(run: RunStats | None) -> str:
    """The run in a sentence or two."""
    if run is None:
        return NO_RUN
    left = sum(run.declined.values())
    if not run.calls and not left:
        return NEVER_CALLED
    words = f"{run.calls:,} attention calls, {run.sparse_calls:,} of them with Skip-Softmax"
    if left:
        words += f"; {left:,} more left to ComfyUI"
    if run.sparsity is not None:
        saved = saved_share(by_role(run))
        words += f". {run.sparsity:.1%} of the counted tiles skipped, an estimated {saved:.1%} of all attention work saved"
    return f"{words}. {_reached(run)}."


def saved_share(roles: list[RoleTotals]) -> float:
    """Share of the operations of all calls that skipped tiles left out."""
    work = sum(totals.work for totals in roles)
    return sum(totals.saved_work for totals in roles) / work if work else 0.0


def cutoffs(stats: StatsHolder) -> dict[str, float]:
    """Role -> where its gate opens, 0 where it has none."""
    found = {}
    for totals in by_role(stats.last):
        skip = stats.patch.settings_for(totals.role)[0].spec.skip_softmax
        found[totals.role] = skip.disabled_until_timestep if skip else 0.0
    return found


def versions(stats: StatsHolder) -> str:
    """The device and everything whose version matters, in a line."""
    device = stats.patch.device if stats.patch else Device.current()
    parts = [device.label, f"torch {device.torch}"]
    if device.type == "cuda":
        parts.append(f"CUDA {torch.version.cuda}")
    if device.cudnn:
        parts.append(f"cuDNN {device.cudnn}")
    parts += [f"{name} {version}" for name, version in device.packages.items()]
    return ", ".join((*parts, f"ComfyUI {comfyui_version}"))


def asked(settings: RoleSettings) -> str:
    """What was asked of a role, in words."""
    spec: AttentionSpec = settings.spec
    parts = [spec.backend or "auto"]
    if spec.quant is not None:
        quant = spec.quant
        parts.append(f"quant {quant.dtype_qk or quant.dtype_vo}, blocks {quant.q_block_size} and {quant.k_block_size}")
    skip = spec.skip_softmax
    if skip is not None:
        if skip.threshold is not None:
            parts.append(f"λ = {skip.threshold:g}")
        else:
            parts.append(f"target sparsity {skip.target_sparsity:.0%}")
        if skip.disabled_until_timestep:
            parts.append(f"gate t = {skip.disabled_until_timestep:g}")
        if settings.ignore:
            parts.append(f"ignoring {', '.join(settings.ignore)}")
    return "; ".join(parts)


def _what_ran(roles: list[RoleTotals], settings: dict[str, RoleSettings]) -> str:
    rows = [
        (
            totals.role,
            asked(settings[totals.role]),
            ", ".join(f"{label} x {calls:,}" for label, calls in totals.backends.most_common()),
            len(totals.layers),
            f"{totals.calls:,}",
            f"{totals.sparse_calls:,}",
        )
        for totals in roles
    ]
    return "## What ran\n\n" + table(("role", "asked for", "ran", "layers", "calls", "sparse calls"), rows)


def _what_it_gave(roles: list[RoleTotals], settings: dict[str, RoleSettings]) -> str:
    header = (
        "role", "tiles of sparse calls", "skipped", "requested", "work", "saved", "time", "a dense call", "a sparse call",
    )  # fmt: skip
    rows = []
    for totals in roles:
        skip = settings[totals.role].spec.skip_softmax
        target = skip.target_sparsity if skip else None
        known = totals.sparsity is not None
        rows.append(
            (
                totals.role,
                f"{totals.total_tiles:,}" if known else "-",
                f"{totals.sparsity:.1%}" if known else "-",
                f"{target:.0%}" if target is not None else "-",
                operations(totals.work),
                f"{totals.saved_work / totals.work:.1%}" if known and totals.work else "-",
                *(
                    "-" if value is None else duration(value)
                    for value in (totals.seconds, totals.dense_call_seconds, totals.sparse_call_seconds)
                ),
            )
        )
    return "## What it gave\n\n" + table(header, rows) + f"\n\n{FORMULA}"


def _layers(roles: list[RoleTotals]) -> str:
    """The layers that skip least and most: what an ignore list is made from."""
    lines = []
    for totals in roles:
        sites: dict[str, list[SiteStats]] = {}
        for site in totals.sites:
            sites.setdefault(site.layer, []).append(site)
        counted = {layer: RoleTotals(totals.role, found).sparsity for layer, found in sites.items()}
        shares = {layer: share for layer, share in counted.items() if share is not None}
        ordered = sorted(shares, key=shares.get)
        picked = [("least to most", ordered)]
        if len(ordered) > 2 * FEW:
            picked = [("least", ordered[:FEW]), ("most", ordered[: -FEW - 1 : -1])]
        for word, names in picked if any(shares.values()) else ():
            found = ", ".join(f"{name} {shares[name]:.1%}" for name in names)
            lines.append(f"- {totals.role}, {word}: {found}")
    return "## Skipped by layer\n\n" + "\n".join(lines) if lines else ""


def _declined(run: RunStats) -> str:
    if not run.declined:
        return ""
    rows = [(reason.replace("\n", " "), f"{calls:,}") for reason, calls in run.declined.most_common()]
    return "## Left to ComfyUI's attention\n\n" + table(("reason", "calls"), rows)


def _notes(run: RunStats, roles: list[RoleTotals], stats: StatsHolder) -> str:
    lines = []
    if roles and run.times is None:
        missing = "Times were" if run.count_tiles else "Skipped tiles and times were"
        lines.append(NOT_RECORDED.format(missing))
    for totals in roles:
        lines += _role_notes(run, totals, stats.patch.settings_for(totals.role)[0])
    if any(totals.seconds is not None for totals in roles):
        where = "clock time" if stats.patch.device.type == "cpu" else "GPU time between two events"
        lines.append(
            f"Times are {where} around each call, quantization and token reordering included, calls "
            "left to ComfyUI not; a dense or sparse call's is the median over layers and steps."
        )
    return "## Notes\n\n" + "\n".join(f"- {line}" for line in lines) if lines else ""


def _role_notes(run: RunStats, totals: RoleTotals, settings: RoleSettings) -> list[str]:
    lines = []
    skip = settings.spec.skip_softmax
    if skip is not None and not totals.sparse_calls:
        steps = {site.step for site in totals.sites}
        dense = dense_steps(totals.sites, skip.disabled_until_timestep)
        if dense == len(steps):
            why = "the gate kept every step dense"
        elif dense is None and skip.disabled_until_timestep:
            why = "the timestep is not known for this kind of schedule, and a gate waits for it"
        else:
            why = "all of its layers are ignored"
        lines.append(f"{totals.role}: Skip-Softmax was asked for and no call used it: {why}.")
    uncounted = [s for s in totals.sites if s.sparse_calls and s.skipped_tiles is None]
    if uncounted and run.count_tiles:
        names = ", ".join(sorted({name for site in uncounted for name in site.backends}))
        lines.append(f"{totals.role}: {names} cannot count skipped tiles.")
    if totals.one_time_seconds:
        lines.append(
            f"{totals.role}: {duration(totals.one_time_seconds)} of its time are beyond calls times "
            "their median, as when kernels are compiled on first use."
        )
    return lines


def _runs(stats: StatsHolder) -> str:
    """The runs before the last, where there were any."""
    if len(stats.runs) < 2:
        return ""
    rows = []
    for index, run in enumerate(stats.runs):
        share = "-" if run.sparsity is None else f"{run.sparsity:.1%}"
        name = "this one" if run is stats.last else str(index - len(stats.runs) + 1)
        rows.append((name, _reached(run), f"{run.calls:,}", f"{run.sparse_calls:,}", share))
    header = ("run", "steps", "calls", "sparse calls", "skipped")
    return "## Runs of this patch\n\n" + table(header, rows)


def _reached(run: RunStats) -> str:
    reached = max((site.step + 1 for site in run.sites.values()), default=0)
    if not reached:
        return f"{run.steps} steps"
    if reached < run.steps and not run.completed:
        return f"Ended at step {reached} of {run.steps}: cancelled, failed or stopped early"
    return f"{run.steps} steps"


def table(header: tuple, rows: list[tuple]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
