"""What an installation of the pack does to the user's packages, and what the registry is told (case 21)."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("package", ["torch", "torchvision", "torchaudio", "triton", "flashinfer"])
def test_requirements_do_not_name_what_would_replace_torch(package):
    required = (ROOT / "requirements.txt").read_text().splitlines() + PROJECT["project"]["dependencies"]
    assert not [line for line in required if line.startswith(package)]


def test_installing_the_requirements_beside_torch_installs_nothing():
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "-r", ROOT / "requirements.txt"]
    result = subprocess.run(pip, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Would install" not in result.stdout


def test_both_lists_of_requirements_agree():
    listed = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert sorted(listed) == sorted(PROJECT["project"]["dependencies"])


def test_the_registry_finds_what_it_asks_for():
    project, comfy = PROJECT["project"], PROJECT["tool"]["comfy"]
    assert "comfyui" not in project["name"].lower()
    assert project["urls"]["Repository"] and comfy["PublisherId"] and comfy["DisplayName"]
    assert comfy["requires-comfyui"] == ">=0.3.75"
