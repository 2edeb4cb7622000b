"""The demo, shortened."""

import importlib.util

import pytest
from harness import location


def load_demo():
    spec = importlib.util.spec_from_file_location("demo_script", location.ROOT / "scripts" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_demo_writes_its_picture_and_report(comfy_server, tmp_path):
    from PIL import Image

    decibels = load_demo().compare(comfy_server, tmp_path, steps=2)
    assert 10 < decibels < 100
    with Image.open(tmp_path / "demo.png") as picture:
        assert picture.width > 8 * 100 and len(picture.getcolors(2**24)) > 1000
    report = (tmp_path / "report.md").read_text()
    assert comfy_server.system["comfyui_version"] in report and "2 steps" in report


@pytest.mark.gpu
def test_the_kernels_keep_the_picture_of_the_trained_model(tmp_path, monkeypatch):
    """The trained model's V holds what made-up ones do not, such as text tokens a hundred times larger than the others."""
    demo = load_demo()
    monkeypatch.setattr(demo, "OUTPUT", tmp_path / "demo")
    monkeypatch.setattr(demo, "WORKSPACE", tmp_path / "workspace")
    assert demo.main() > 40
