"""Skips what this machine cannot run, and says why."""

import pytest


def pytest_collection_modifyitems(items):
    """Skip tests marked gpu where torch sees no CUDA device."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
