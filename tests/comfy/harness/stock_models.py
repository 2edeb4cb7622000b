"""Files with the names of ComfyUI's own templates, so that workflows find what they name.

    python stock_models.py COMFYUI_PATH MODELS_DIR

Diffusion models are safetensors files with the real header and no data (sparse, a few hundred
kilobytes on disk): enough for whoever reads the architecture. The others are empty.
"""

import json
import os
import sys
from pathlib import Path

SIZES = {
    "1.3B": {"dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 30},
    "14B": {"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40},
}

# file -> (kind of tiny_models, sizes that replace its own)
DIFFUSION_MODELS = {
    "wan2.1_t2v_1.3B_fp16.safetensors": ("wan_t2v", SIZES["1.3B"]),
    "wan2.1_t2v_14B_fp8_scaled.safetensors": ("wan_t2v", SIZES["14B"]),
    "wan2.1_i2v_480p_14B_fp16.safetensors": ("wan_i2v", SIZES["14B"]),
    "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors": ("wan_t2v", SIZES["14B"]),
    "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors": ("wan_t2v", SIZES["14B"]),
    "hunyuanvideo1.5_720p_t2v_fp16.safetensors": (
        "hunyuan_15",
        {"hidden_size": 2048, "num_heads": 16, "depth": 54, "depth_single_blocks": 0},
    ),
}
EMPTY = [
    "text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors",
    "text_encoders/qwen_2.5_vl_7b_fp8_scaled.safetensors",
    "text_encoders/byt5_small_glyphxl_fp16.safetensors",
    "clip_vision/clip_vision_h.safetensors",
    "vae/wan_2.1_vae.safetensors",
    "vae/hunyuanvideo15_vae_fp16.safetensors",
]


def write_header(path, shapes):
    """A safetensors file of float16 tensors of these shapes; its data is a hole."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def main():
    """The command line of the module's docstring."""
    comfyui, folder = sys.argv[1], Path(sys.argv[2])
    sys.argv = sys.argv[:1]
    here = Path(__file__).parent
    sys.path[:1] = [comfyui, str(here)]
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    import tiny_models

    for name in EMPTY:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (folder / "diffusion_models").mkdir(parents=True, exist_ok=True)
    for name, (kind, sizes) in DIFFUSION_MODELS.items():
        path = folder / "diffusion_models" / name
        if path.exists():
            continue
        module = tiny_models.build_empty(kind, sizes)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        write_header(partial, {key: value.shape for key, value in module.state_dict().items()})
        partial.replace(path)


if __name__ == "__main__":
    main()
