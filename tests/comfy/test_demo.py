"""The demo, shortened."""

import importlib.util

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
