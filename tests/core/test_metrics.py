"""PSNR and SSIM against formulas written out with loops, on odd sizes."""

import math

import numpy
import pytest
import torch
from trtllm_core.image_metrics import psnr, ssim


def frames(channels, height, width, noise, seed=0):
    """A smooth random frame and a noisy copy, float64."""
    generator = numpy.random.default_rng(seed)
    coarse = generator.random((channels, height // 4 + 2, width // 4 + 2))
    smooth = numpy.kron(coarse, numpy.ones((1, 4, 4)))[:, :height, :width]
    return smooth, smooth + noise * generator.standard_normal(smooth.shape)


def ssim_by_windows(a, b, peak):
    """The definition: 2-D weights, every window by itself, two-pass moments."""
    grid = numpy.arange(11) - 5
    weights = numpy.exp(-(grid[:, None] ** 2 + grid[None, :] ** 2) / (2 * 1.5**2))
    weights /= weights.sum()
    c1, c2 = (0.01 * peak) ** 2, (0.03 * peak) ** 2
    values = []
    for x, y in zip(a, b):
        for top in range(x.shape[0] - 10):
            for left in range(x.shape[1] - 10):
                u, v = x[top : top + 11, left : left + 11], y[top : top + 11, left : left + 11]
                mean_u, mean_v = (weights * u).sum(), (weights * v).sum()
                variance_u = (weights * (u - mean_u) ** 2).sum()
                variance_v = (weights * (v - mean_v) ** 2).sum()
                covariance = (weights * (u - mean_u) * (v - mean_v)).sum()
                values.append(
                    (2 * mean_u * mean_v + c1) * (2 * covariance + c2)
                    / ((mean_u**2 + mean_v**2 + c1) * (variance_u + variance_v + c2))
                )  # fmt: skip
    return sum(values) / len(values)


@pytest.mark.parametrize("shape", [(3, 11, 11), (1, 12, 31), (3, 37, 23)])
@pytest.mark.parametrize("noise", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("peak", [1.0, 7.5])
def test_ssim_is_its_definition(shape, noise, peak):
    a, b = frames(*shape, noise)
    assert ssim(torch.from_numpy(a), torch.from_numpy(b), peak) == pytest.approx(ssim_by_windows(a, b, peak), abs=1e-12)


def test_ssim_agrees_with_scikit_image():
    metrics = pytest.importorskip("skimage.metrics")
    a, b = frames(3, 61, 83, 0.2)
    options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 1.0, "channel_axis": 0}
    expected = metrics.structural_similarity(a, b, **options)
    assert ssim(torch.from_numpy(a), torch.from_numpy(b)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("peak", [1.0, 255.0])
def test_psnr_is_its_definition(peak):
    a, b = frames(3, 9, 7, 0.3)
    error = sum((x - y) ** 2 for x, y in zip(a.ravel(), b.ravel())) / a.size
    expected = 20 * math.log10(peak) - 10 * math.log10(error)
    assert psnr(torch.from_numpy(a), torch.from_numpy(b), peak) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equal_frames(dtype):
    x = torch.rand(3, 20, 20).to(dtype)
    assert psnr(x, x.clone()) == math.inf
    assert ssim(x, x.clone()) == 1.0


def test_a_constant_frame_has_no_division_by_zero():
    x = torch.zeros(1, 16, 16)
    assert ssim(x, x) == 1.0
    assert 0 < ssim(x, x + 0.5) < 0.01


def test_a_frame_smaller_than_the_window_has_no_ssim():
    assert ssim(torch.rand(3, 10, 64), torch.rand(3, 10, 64)) is None
