"""The list of nodes ComfyUI is given."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .attention_config import TRTLLMAttentionConfig
from .attention_patch import TRTLLMAttentionPatch
from .calibration import TRTLLMCalibrate, TRTLLMLoadCalibration, TRTLLMSaveCalibration
from .attention_role import TRTLLMAttentionRole
from .layer_ignore import TRTLLMLayerIgnoreList
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
]


class TRTLLMAttentionExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES
