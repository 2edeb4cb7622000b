"""The small trained Wan of assets/: how it is sampled, and its latents as pictures without a VAE."""

import json
import math

from .graphs import Graph, Node
from .location import ROOT

ASSETS = ROOT / "assets"
FILE = "tiny_wan21_t2v.safetensors"
SAMPLING = json.loads((ASSETS / "tiny_wan21.json").read_text())["sampling"]


def load(graph: Graph) -> Node:
    """Loader and the sampling shift that the model was trained for."""
    return graph.add("ModelSamplingSD3", model=graph.load(FILE), shift=SAMPLING["shift"])


def sample(graph: Graph, model, *, count="2", colour="red", shape="disc", seed=1, steps=None, grid=(8, 16, 16)) -> Node:
    """KSampler with trained conditioning on an empty latent; grid is (frames, height, width) in tokens."""
    frames, height, width = grid
    conditioning = graph.add("TestTrainedConditioning", count=count, colour=colour, shape=shape)
    latent = graph.latent("wan_t2v", width=16 * width, height=16 * height, length=4 * (frames - 1) + 1)
    return graph.add(
        "KSampler", model=model, positive=conditioning[0], negative=conditioning[1], latent_image=latent, seed=seed,
        steps=steps or SAMPLING["steps"], cfg=SAMPLING["cfg"], sampler_name=SAMPLING["sampler"],
        scheduler=SAMPLING["scheduler"], denoise=1.0,
    )  # fmt: skip


def to_rgb(latent):
    """Pictures [frames, height, width, 3] in 0..1 of the first video of a latent that ComfyUI saved."""
    import torch
    from safetensors.torch import load_file

    table = load_file(ASSETS / "tiny_wan21_conditioning.safetensors")
    rgb = torch.einsum("oc,cfhw->fhwo", table["rgb_matrix"], latent[0].float()) + table["rgb_offset"]
    return rgb.clamp(0, 1)


def psnr(picture, reference) -> float:
    """Peak signal-to-noise ratio in dB of pictures in 0..1; infinite where they are equal."""
    error = (picture.double() - reference.double()).square().mean().item()
    return math.inf if error == 0 else -10 * math.log10(error)
