"""Latents as rough RGB, by the same factors as ComfyUI's live preview."""

from __future__ import annotations

import comfy.latent_formats
import torch

# A LATENT does not say whose it is: the first format here of its channels and dimensions is taken.
FORMATS = ("Wan21", "Wan22", "HunyuanVideo15", "Mochi", "LTXV", "SDXL", "Flux", "Cosmos1CV8x8x8")


def to_rgb(samples: torch.Tensor) -> tuple[torch.Tensor, str] | None:
    """[B, C, (T,) H, W] as [B, 3, (T,) H, W], about [0, 1], and the format's name; None if unknown."""
    for name in FORMATS:
        latent_format = _format(name)
        if latent_format is None or latent_format.latent_rgb_factors is None:
            continue
        dimensions = getattr(latent_format, "latent_dimensions", 2)
        if samples.shape[1] != latent_format.latent_channels or samples.ndim != dimensions + 2:
            continue
        factors = torch.tensor(latent_format.latent_rgb_factors, dtype=torch.float32).T
        bias = latent_format.latent_rgb_factors_bias
        bias = None if bias is None else torch.tensor(bias, dtype=torch.float32)
        latent = latent_format.process_in(samples.float())
        rgb = torch.nn.functional.linear(latent.movedim(1, -1), factors, bias)
        return (rgb.movedim(-1, 1) + 1) / 2, name
    return None


def to_grey(samples: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The mean over channels, three times, scaled so that `reference`'s lies in [0, 1]."""
    mean = reference.float().mean(1)
    low, span = mean.min(), (mean.max() - mean.min()).clamp(min=1e-12)
    grey = (samples.float().mean(1, keepdim=True) - low) / span
    return grey.repeat_interleave(3, dim=1)


def _format(name: str):
    found = getattr(comfy.latent_formats, name, None)
    found = None if found is None else found()
    return None if getattr(found, "latent_rgb_factors_reshape", None) is not None else found
