"""CONDITIONING made from random numbers, or from the trained embeddings of assets/."""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from comfy_api.latest import io
from safetensors.torch import load_file

ASSETS = Path(__file__).resolve().parents[3] / "assets"
TRAINED = json.loads((ASSETS / "tiny_wan21.json").read_text())


def extra_conditioning(kind, latent, generator):
    """What a Wan variant takes beside text, shaped for latent [batch, channels, frames, height, width]."""
    batch, channels, frames, height, width = latent.shape

    def random(*shape):
        return torch.randn(shape, generator=generator)

    match kind:
        case "wan_camera":
            return {"camera_conditions": random(1, 24, frames, height * 8, width * 8)}
        case "wan_s2v":  # 25 layers of a speech encoder, 4 audio frames to a latent frame
            return {"audio_embed": random(1, 25, 1024, frames * 4)}
        case "wan_humo":  # windows of 8 audio frames, 5 layers of a speech encoder
            return {"audio_embed": random(1, frames, 8, 5, 1280)}
        case "wan_animate":
            return {
                "face_video_pixels": random(1, 3, 1, 512, 512).clamp(-1, 1),
                "pose_video_latent": random(1, channels, max(frames - 1, 1), height, width),
            }
        case _:
            return {}


class TestConditioning(io.ComfyNode):
    """Random embeddings, with everything that one of the tiny models may want beside them."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TestConditioning",
            category="testing",
            inputs=[
                io.Int.Input("tokens", default=24, min=1, max=4096),
                io.Int.Input("width", default=4096, min=1, max=16384),
                io.Int.Input("seed", default=0, min=0, max=2**31),
                io.Int.Input("pad", default=0, min=0, tooltip="last tokens masked out; 0: no attention_mask"),
                io.Int.Input("byt5_tokens", default=0, min=0, tooltip="HunyuanVideo 1.5's glyph embeddings"),
                io.Int.Input("pooled_width", default=0, min=0, tooltip="width of pooled_output; 0: none"),
                io.Int.Input("image_tokens", default=0, min=0, tooltip="CLIP vision tokens; 0: none"),
                io.Int.Input("image_width", default=1280, min=1),
                io.Combo.Input("extra", options=["none", "wan_camera", "wan_s2v", "wan_humo", "wan_animate"], default="none"),
                io.Latent.Input("latent", optional=True, tooltip="gives the sizes of extra"),
            ],
            outputs=[io.Conditioning.Output()],
        )  # fmt: skip

    @classmethod
    def execute(cls, tokens, width, seed, pad, byt5_tokens, pooled_width, image_tokens, image_width, extra, latent=None):
        generator = torch.Generator().manual_seed(seed)
        embeddings = torch.randn((1, tokens, width), generator=generator)
        options = {"pooled_output": None}
        if pooled_width:
            options["pooled_output"] = torch.randn((1, pooled_width), generator=generator)
        if pad:
            options["attention_mask"] = (torch.arange(tokens) < tokens - pad).to(torch.int64).unsqueeze(0)
        if byt5_tokens:
            options["conditioning_byt5small"] = torch.randn((1, byt5_tokens, 1472), generator=generator)
        if image_tokens:
            image = torch.randn((1, image_tokens, image_width), generator=generator)
            options["clip_vision_output"] = SimpleNamespace(penultimate_hidden_states=image, last_hidden_state=image)
        if latent is not None:
            options.update(extra_conditioning(extra, latent["samples"], generator))
        return io.NodeOutput([[embeddings, options]])


class TestTrainedConditioning(io.ComfyNode):
    """Positive and negative CONDITIONING for the trained tiny Wan of assets/."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TestTrainedConditioning",
            category="testing",
            inputs=[io.Combo.Input(name, options=TRAINED[name]) for name in ("count", "colour", "shape")],
            outputs=[io.Conditioning.Output("positive"), io.Conditioning.Output("negative")],
        )

    @classmethod
    def execute(cls, count, colour, shape):
        table = load_file(ASSETS / "tiny_wan21_conditioning.safetensors")
        chosen = {"count": count, "colour": colour, "shape": shape}
        parts = [table["common"]] + [table[name][TRAINED[name].index(value)] for name, value in chosen.items()]
        positive = torch.cat([part.float() for part in parts]).unsqueeze(0)
        negative = table["null"].float().unsqueeze(0)
        return io.NodeOutput([[positive, {}]], [[negative, {}]])
