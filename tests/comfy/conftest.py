"""Fixtures for tests against the real ComfyUI.

`comfy_server`: the session's server, with the pack and the test pack. `new_server`: makes further
ones, with other arguments or packs. `pack`: the pack imported in this process. Tests that use one
of them are marked `comfy`, and skipped where there is no ComfyUI.
"""

import subprocess

import pytest
from harness import location, pack_import
from harness.graphs import SAMPLING
from harness.server import ComfyServer

COMFY_FIXTURES = {"comfy_server", "new_server", "pack", "comfyui"}

# What a user's disk may call the folder: neither a Python identifier nor the project's name.
PACK_FOLDER = "trtllm attention-main (1)"


def pytest_collection_modifyitems(items):
    """Mark and, where ComfyUI is missing, skip the tests that use it."""
    reason = location.why_unavailable()
    for item in items:
        if COMFY_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.comfy)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def tiny_models():
    """The folder of tiny checkpoints for the installed version, written on first use."""
    folder = location.CACHE / "models" / location.comfyui_version()
    script = location.LAUNCHER.with_name("tiny_models.py")
    missing = [kind for kind in SAMPLING if not (folder / "diffusion_models" / f"{kind}.safetensors").exists()]
    if missing:
        subprocess.run(
            [location.comfyui_python(), script, location.comfyui_path(), folder / "diffusion_models", *missing],
            check=True,
        )
    trained = folder / "diffusion_models" / "tiny_wan21_t2v.safetensors"
    if not trained.exists():
        trained.symlink_to(location.ROOT / "assets" / trained.name)
    return folder


@pytest.fixture(scope="session")
def new_server(tmp_path_factory, tiny_models):
    """new_server(args=(), pack=True, **options): a started ComfyServer, stopped when the session ends."""
    started = []

    def make(args=(), pack=True, **options):
        packs = {"test_nodes": location.TEST_PACK, **({PACK_FOLDER: location.ROOT} if pack else {})}
        workspace = tmp_path_factory.mktemp("comfyui")
        server = ComfyServer(workspace, packs=packs, models=tiny_models, args=args, **options)
        started.append(server)
        return server.start()

    yield make
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def comfy_server(new_server):
    """The server that tests share. Its attention is PyTorch's SDPA, so that dense results can be compared bit for bit."""
    return new_server(args=["--use-pytorch-cross-attention"])


@pytest.fixture(scope="session")
def comfyui():
    """ComfyUI's modules importable in this process."""
    pack_import.enable_comfyui()


@pytest.fixture(scope="session")
def pack(comfyui):
    """The pack's root package, imported in this process under a made-up name."""
    return pack_import.import_pack()
