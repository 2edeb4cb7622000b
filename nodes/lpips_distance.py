"""LPIPS, where the lpips package and its weights are on this machine; nothing is ever downloaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch

Distance = Callable[[torch.Tensor, torch.Tensor], float]


def load(device: torch.device) -> tuple[Distance | None, str]:
    """A function of two frames [3, H, W] in [0, 1], or None and the reason why there is none."""
    if importlib.util.find_spec("lpips") is None:
        return None, "the lpips package is not installed"
    try:
        import lpips
        from torchvision.models import AlexNet_Weights
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        return None, f"the lpips package cannot be imported: {type(error).__name__}: {error}"
    name = Path(AlexNet_Weights.IMAGENET1K_V1.url).name
    weights = Path(torch.hub.get_dir(), "checkpoints", name)
    if not weights.is_file():
        return None, f"its AlexNet weights are not on this machine: {name} belongs in {weights.parent}"
    network = lpips.LPIPS(net="alex", verbose=False).to(device).eval()

    def distance(a: torch.Tensor, b: torch.Tensor) -> float:
        with torch.no_grad():
            pair = (x.float().to(device).unsqueeze(0) * 2 - 1 for x in (a, b))
            return float(network(*pair))

    return distance, "AlexNet"
