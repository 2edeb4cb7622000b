"""Layer Ignore List: layers that Skip-Softmax leaves dense."""

from __future__ import annotations

from comfy_api.latest import io

from ..trtllm_core.layer_names import LayerPatterns
from .hook.layers import find_layers
from .schema import IgnoreType, schema
from .wires import IgnoreList


class TRTLLMLayerIgnoreList(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            "TRTLLMLayerIgnoreList",
            "Layer Ignore List",
            "Layers that Skip-Softmax leaves dense, by name; SAGE quantization, if wired, stays on there. "
            "ComfyUI's module paths and Diffusers' names both work, "
            "with * ? and [] as wildcards.",
            search_aliases=("ignore layers", "skip layers", "layer filter"),
            inputs=[
                io.String.Input(
                    "patterns",
                    default="",
                    multiline=True,
                    tooltip="One pattern a line or separated by commas, such as blocks.0.self_attn, "
                    "blocks.*.cross_attn or transformer.blocks.1.attn1.",
                ),
                io.Model.Input(
                    "model", optional=True, tooltip="The model, to check the patterns against."
                ),
            ],
            outputs=[IgnoreType.Output(display_name="ignore")],
        )

    @classmethod
    def execute(cls, patterns, model=None) -> io.NodeOutput:
        chosen = parse_patterns(patterns)
        if model is None:
            return io.NodeOutput(IgnoreList(chosen))
        names = [layer.name for layer in find_layers(model.get_model_object("diffusion_model"))]
        selector = LayerPatterns(chosen)
        ignored = [name for name in names if selector.selects(name)]
        text = f"{len(ignored)} of {len(names)} layers stay dense"
        return io.NodeOutput(
            IgnoreList(chosen), ui={"text": [text], "layers": names, "ignored": ignored}
        )


def parse_patterns(text: str) -> tuple[str, ...]:
    """Patterns from lines or commas, blanks and lines that start with # left out."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    parts = (part.strip() for line in lines for part in line.split(","))
    return tuple(part for part in parts if part)
