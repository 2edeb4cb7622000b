"""Where ComfyUI, its interpreter and the generated files are."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CACHE = ROOT / ".cache"
TEST_PACK = ROOT / "tests" / "comfy" / "pack"
LAUNCHER = Path(__file__).with_name("launch.py")


def comfyui_path() -> Path:
    """The ComfyUI checkout: COMFYUI_PATH, else the one that scripts/setup.py unpacked."""
    return Path(os.environ.get("COMFYUI_PATH") or CACHE / "ComfyUI")


def comfyui_python() -> str:
    """The interpreter that runs it: COMFYUI_PYTHON, else this one."""
    return os.environ.get("COMFYUI_PYTHON") or sys.executable


def comfyui_version() -> str:
    """What the checkout calls itself, for example "0.3.75"."""
    return (comfyui_path() / "comfyui_version.py").read_text().split('"')[1]


def why_unavailable() -> str | None:
    """None where ComfyUI can be started, else the reason."""
    main = comfyui_path() / "main.py"
    return None if main.is_file() else f"no ComfyUI at {main.parent}: run `make test`, or set COMFYUI_PATH"
