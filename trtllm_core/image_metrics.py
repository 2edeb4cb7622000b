"""How far two batches of frames are apart: PSNR and SSIM, frame by frame.

Frames are [channels, height, width]; everything is computed in float64.
"""

from __future__ import annotations

import torch

WINDOW = 11  # pixels, square
SIGMA = 1.5  # of the Gaussian window
K1, K2 = 0.01, 0.03


def psnr(a: torch.Tensor, b: torch.Tensor, peak: float = 1.0) -> float:
    """Peak signal-to-noise ratio in dB: 10 log10(peak^2 / mean squared error); inf if equal."""
    return psnr_of_error(mean_squared_error(a, b), peak)


def psnr_of_error(error: float, peak: float = 1.0) -> float:
    """PSNR in dB of a mean squared error."""
    if error == 0:
        return float("inf")
    return float(10 * torch.log10(torch.tensor(peak**2 / error, dtype=torch.float64)))


def mean_squared_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).square().mean())


def ssim(a: torch.Tensor, b: torch.Tensor, peak: float = 1.0) -> float | None:
    """Mean structural similarity of Wang, Bovik, Sheikh and Simoncelli (2004), in [-1, 1].

    An 11x11 Gaussian window of standard deviation 1.5 wherever it fits in the frame, K1 = 0.01 and
    K2 = 0.03, each channel by itself, the mean over windows and channels. None for a frame smaller
    than the window.
    """
    if min(a.shape[-2:]) < WINDOW:
        return None
    a, b = a.double(), b.double()
    mean_a, mean_b = _blur(a), _blur(b)
    variance_a = _blur(a * a) - mean_a**2
    variance_b = _blur(b * b) - mean_b**2
    covariance = _blur(a * b) - mean_a * mean_b
    c1, c2 = (K1 * peak) ** 2, (K2 * peak) ** 2
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    structure = (2 * covariance + c2) / (variance_a + variance_b + c2)
    return float((luminance * structure).mean())


def _blur(x: torch.Tensor) -> torch.Tensor:
    """The Gaussian-weighted mean of every whole window of x [..., H, W]: [..., H - 10, W - 10]."""
    offsets = torch.arange(WINDOW, dtype=torch.float64) - WINDOW // 2
    weights = torch.exp(-(offsets**2) / (2 * SIGMA**2))
    weights = (weights / weights.sum()).tolist()
    for axis in (-1, -2):
        size = x.shape[axis] - WINDOW + 1
        blurred = weights[0] * x.narrow(axis, 0, size)
        for start, weight in enumerate(weights[1:], 1):
            blurred.add_(x.narrow(axis, start, size), alpha=weight)
        x = blurred
    return x
