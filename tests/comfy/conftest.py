"""Fixtures for tests against the real ComfyUI.

`comfy_server`: the session's server, with the pack and the test pack. `new_server`: makes further
ones, with other arguments or packs. `pack`: the pack imported in this process. Tests that use one
of them are marked `comfy`, and skipped where there is no ComfyUI.
"""

import importlib
import os
import sys

import pytest
from harness import location, pack_import
from harness.fixtures import new_server, tiny_models  # noqa: F401

COMFY_FIXTURES = {"comfy_server", "new_server", "pack", "submodule", "comfyui"}


def pytest_collection_modifyitems(items):
    """Mark and, where ComfyUI is missing, skip the tests that use it."""
    reason = location.why_unavailable()
    for item in items:
        if COMFY_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.comfy)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def comfy_server(new_server):  # noqa: F811
    """The server that tests share. Its attention is PyTorch's SDPA, so that dense results can be compared bit for bit."""
    return new_server(args=["--use-pytorch-cross-attention"])


@pytest.fixture(scope="session")
def comfyui():
    """ComfyUI's modules importable in this process."""
    if os.path.abspath(location.comfyui_python()) != os.path.abspath(sys.executable):
        pytest.skip("COMFYUI_PYTHON is another interpreter: run pytest with it for the tests in this process")
    pack_import.enable_comfyui()


@pytest.fixture(scope="session")
def pack(comfyui):
    """The pack's root package, imported in this process under a made-up name."""
    return pack_import.import_pack()


@pytest.fixture
def submodule(pack):
    """submodule("nodes.hook.run"): a module of the pack imported in this process."""
    return lambda path: importlib.import_module(f"{pack.__name__}.{path}")
