"""The list of nodes ComfyUI is given."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .attention_config import TRTLLMAttentionConfig
from .attention_patch import TRTLLMAttentionPatch
from .calibration import TRTLLMCalibrate, TRTLLMLoadCalibration, TRTLLMSaveCalibration
from .attention_role import TRTLLMAttentionRole
from .compare import TRTLLMCompare
from .layer_ignore import TRTLLMLayerIgnoreList
from .report import TRTLLMAttentionReport
from .routes import add_routes
from .sage_quant import TRTLLMSageQuant
from .skip_softmax import TRTLLMSkipSoftmax
from .timestep_gate import TRTLLMTimestepGate

NODES = [
    TRTLLMAttentionPatch,
    TRTLLMSkipSoftmax,
    TRTLLMSageQuant,
    TRTLLMTimestepGate,
    TRTLLMLayerIgnoreList,
    TRTLLMLoadCalibration,
    TRTLLMCalibrate,
    TRTLLMSaveCalibration,
    TRTLLMAttentionRole,
    TRTLLMAttentionConfig,
    TRTLLMAttentionReport,
    TRTLLMCompare,
]


class TRTLLMAttentionExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        add_routes()  # on_load would be the place, but ComfyUI 0.3 never calls it
        return NODES
