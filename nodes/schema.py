"""The pack's category, wire types, and a Schema that later ComfyUI versions know more of."""

from __future__ import annotations

import dataclasses

from comfy_api.latest import io

from ..trtllm_core.specs import BACKEND_NAMES

CATEGORY = "TRTLLM Attention"
BACKENDS = ("auto", *BACKEND_NAMES)

Quant = io.Custom("TRTLLM_QUANT")
SkipSoftmaxType = io.Custom("TRTLLM_SKIP_SOFTMAX")
GateType = io.Custom("TRTLLM_GATE")
IgnoreType = io.Custom("TRTLLM_IGNORE")
RolesType = io.Custom("TRTLLM_ROLES")
CalibrationType = io.Custom("TRTLLM_CALIBRATION")
CalibrationRunType = io.Custom("TRTLLM_CALIBRATION_RUN")
StatsType = io.Custom("TRTLLM_STATS")
# what a combo widget's socket takes; an output that lists options fits no combo in ComfyUI 0.3
BackendType = io.Custom("COMBO")

_KNOWN = {f.name for f in dataclasses.fields(io.Schema)}


def schema(node_id: str, display_name: str, description: str, search_aliases=(), **fields) -> io.Schema:
    """An io.Schema in this pack's category; fields the installed ComfyUI does not know are left out."""
    fields.update(
        node_id=node_id,
        display_name=display_name,
        description=description,
        category=CATEGORY,
        search_aliases=list(search_aliases),
    )
    return io.Schema(**{name: value for name, value in fields.items() if name in _KNOWN})


def backend_input(tooltip: str) -> io.Combo.Input:
    """The backend choice; a saved name that this machine lacks still loads."""
    return io.Combo.Input("backend", options=list(BACKENDS), default="auto", tooltip=tooltip)
