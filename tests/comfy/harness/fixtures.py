"""Fixtures that the tests with and without a browser share."""

import subprocess

import pytest

from . import location
from .graphs import SAMPLING
from .server import ComfyServer

# What a user's disk may call the folder: neither a Python identifier nor the project's name.
PACK_FOLDER = "trtllm attention-main (1)"


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
