"""Tiny random checkpoints that ComfyUI's own Load Diffusion Model detects and loads.

    python tiny_models.py COMFYUI_PATH OUTPUT_DIR KIND...

Each model is built from ComfyUI's own class, so names and shapes are those of the installed
version; only the sizes are ours: 2 heads of 128, 2 blocks. What a class fixes stays as large as it
is (HuMo's audio projection alone is 39 M parameters), so files run from 5 to 95 MB; they are
written once per ComfyUI version and never committed.
"""

import os
import sys
import zlib
from pathlib import Path

DIM, HEADS = 256, 2

WAN = {"dim": DIM, "num_heads": HEADS, "ffn_dim": 512, "num_layers": 2, "in_dim": 16, "out_dim": 16}
HUNYUAN = {
    "hidden_size": DIM, "num_heads": HEADS, "depth": 2, "depth_single_blocks": 2, "mlp_ratio": 4.0, "theta": 256,
    "axes_dim": [16, 56, 56], "qkv_bias": True, "meanflow": False,
}  # fmt: skip
HUNYUAN_10 = {
    "in_channels": 16, "out_channels": 16, "patch_size": [1, 2, 2], "vec_in_dim": 768, "context_in_dim": 4096,
    "guidance_embed": True, "byt5": False, "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False,
}  # fmt: skip
HUNYUAN_15 = {
    "in_channels": 65, "out_channels": 32, "patch_size": [1, 1, 1], "vec_in_dim": None, "context_in_dim": 3584,
    "guidance_embed": False, "byt5": True, "use_cond_type_embedding": True, "vision_in_dim": 1152, "meanflow_sum": True,
}  # fmt: skip

# kind -> (module under comfy.ldm, class, arguments)
KINDS = {
    "wan_t2v": ("wan.model", "WanModel", {**WAN, "model_type": "t2v"}),
    "wan_i2v": ("wan.model", "WanModel", {**WAN, "model_type": "i2v", "in_dim": 36}),
    "wan_vace": ("wan.model", "VaceWanModel", {**WAN, "vace_layers": 2, "vace_in_dim": 96}),
    "wan_camera": ("wan.model", "CameraWanModel", {**WAN, "model_type": "camera", "in_dim": 32}),
    "wan_s2v": ("wan.model", "WanModel_S2V", WAN),
    "wan_humo": ("wan.model", "HumoWanModel", WAN),
    # one face block for every five blocks
    "wan_animate": ("wan.model_animate", "AnimateWanModel", {**WAN, "num_layers": 5, "in_dim": 36}),
    "hunyuan_10": ("hunyuan_video.model", "HunyuanVideo", {**HUNYUAN, **HUNYUAN_10}),
    "hunyuan_15": ("hunyuan_video.model", "HunyuanVideo", {**HUNYUAN, **HUNYUAN_15}),
}


def build_empty(kind, sizes=None, device="meta"):
    """The module of a kind without weights; `sizes` replaces arguments. Needs ComfyUI on sys.path."""
    import importlib

    import comfy.ops
    import torch

    module_name, class_name, arguments = KINDS[kind]
    module = importlib.import_module("comfy.ldm." + module_name)
    if class_name == "HunyuanVideo" and "meanflow_sum" not in module.HunyuanVideoParams.__annotations__:
        arguments = {name: value for name, value in arguments.items() if name != "meanflow_sum"}
    return getattr(module, class_name)(
        **{**arguments, **(sizes or {})}, device=device, dtype=torch.float32, operations=comfy.ops.disable_weight_init
    )


def build(kind):
    """The module of a kind with random weights, float32, on the CPU. Needs ComfyUI on sys.path."""
    import torch

    model = build_empty(kind, device="cpu")
    generator = torch.Generator().manual_seed(zlib.crc32(kind.encode()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "casual_audio_encoder.weights":  # S2V divides by their sum
                parameter.fill_(1)
            elif parameter.ndim == 1:
                parameter.fill_(0 if name.endswith("bias") else 1)
            else:
                fan_in = parameter[0].numel()
                scale = 0.1 if "modulation" in name and "lin" not in name else fan_in**-0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def write(kind, folder):
    """Write one kind as bfloat16 to folder/KIND.safetensors unless it is there."""
    import torch
    from safetensors.torch import save_file

    path = Path(folder) / f"{kind}.safetensors"
    if not path.exists():
        state = {name: value.to(torch.bfloat16).contiguous() for name, value in build(kind).state_dict().items()}
        partial = path.with_suffix(f".{os.getpid()}.partial")
        save_file(state, partial)
        partial.replace(path)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def main():
    """The command line of the module's docstring."""
    comfyui, folder, kinds = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    sys.argv = sys.argv[:1]
    sys.path[0] = comfyui  # in place of this folder
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    folder.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        write(kind, folder)


if __name__ == "__main__":
    main()
