"""What a device says about itself, and that asking imports nothing."""

import subprocess
import sys

import pytest
import torch

from trtllm_core import __main__ as report
from trtllm_core import device as device_module
from trtllm_core.backends import BACKEND_NAMES
from trtllm_core.device import Device, at_least

HEAVY = ("triton", "flash_attn", "flashinfer", "sageattention", "sageattn3", "kernels")


@pytest.mark.parametrize(
    "capability, family",
    [
        ((10, 0), "datacenter Blackwell"),
        ((10, 3), "datacenter Blackwell"),
        ((12, 0), "workstation Blackwell"),
        ((12, 1), "workstation Blackwell"),
        ((9, 0), "Hopper"),
        ((8, 9), "Ada"),
        ((8, 0), "Ampere"),
        ((8, 6), "Ampere"),
        ((8, 7), "Ampere"),
        ((7, 5), None),
        ((11, 0), None),
        (None, None),
    ],
)
def test_family(capability, family):
    assert Device(capability=capability).family == family


def test_other_vendors_have_no_family():
    assert Device("rocm", (9, 0)).family is None


@pytest.mark.parametrize(
    "version, minimum, enough",
    [
        ("0.6.16rc1", "0.6.16rc1", True),
        ("0.6.16", "0.6.16rc1", True),
        ("0.6.16rc1", "0.6.16", False),
        ("0.6.18.post1", "0.6.18", True),
        ("0.6.9", "0.6.16", False),
        ("0.10.0", "0.6.16", True),
        ("4.0.0b9", "4.0.0b18", False),
        ("4.0.0b18", "4.0.0b18", True),
        ("2.8.3+cu128torch2.9", "2.8.3", True),
        ("unknown", "0.1", False),
    ],
)
def test_versions_compare_by_pep_440(version, minimum, enough):
    assert at_least(version, minimum) is enough


def test_a_device_is_plain_data():
    device = Device(capability=(9, 0), name="NVIDIA H200", packages={"flash-attn": "2.8.3"})
    assert device.label == "NVIDIA H200 (sm_90)" and device.has("flash-attn", "2.8")
    broken = device.with_broken("flash-attn", "OSError: libcudart")
    assert not broken.has("flash-attn") and device.has("flash-attn")
    assert hash(device) and device == Device(
        capability=(9, 0), name="NVIDIA H200", packages={"flash-attn": "2.8.3"}
    )


def test_the_current_device_is_asked_once():
    device = Device.current("cpu")
    assert device is Device.current(torch.device("cpu"))
    assert (device.type, device.capability, device.label) == ("cpu", None, "the CPU")


def test_packages_are_found_without_importing_them(tmp_path, monkeypatch):
    """A module, a part of a package that must not be imported, a stray folder, no metadata."""
    (tmp_path / "sageattention").mkdir()
    (tmp_path / "sageattention" / "__init__.py").write_text("raise OSError('imported')")
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "kernels").mkdir()
    info = tmp_path / "flash_attn_4-4.0.0b18.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0b18\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = device_module.installed.__wrapped__()
    assert found["sageattention"] == "unknown"
    assert found["flash-attn-4"] == "4.0.0b18"
    assert "kernels" not in found and "flash-attn" not in found


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def test_importing_and_asking_imports_no_library():
    """Neither the package, nor the device, nor the requirements of every backend."""
    code = f"""
import sys, torch
before = set(sys.modules)
import trtllm_core.config, trtllm_core.selector
from trtllm_core import backends, device
device.Device.current("cpu")
for name in backends.BACKEND_NAMES:
    backends.reasons(name, backends.Request(), device.Device(capability=(9, 0)))
new = set(sys.modules) - before
print(sorted(m for m in new if m.split(".")[0] in {HEAVY!r}))
"""
    finished = run_python(code)
    assert finished.stdout.strip() == "[]", finished.stderr


def test_case_18_the_package_lists_every_backend_where_no_library_can_be_imported():
    code = f"""
import importlib.abc, sys
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY!r}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
from trtllm_core.__main__ import lines
from trtllm_core.device import Device
print("\\n".join(lines(Device.current("cpu"))))
"""
    finished = run_python(code)
    assert finished.returncode == 0, finished.stderr
    assert all(name in finished.stdout for name in BACKEND_NAMES)


def test_python_m_trtllm_core_prints_the_table():
    finished = subprocess.run(
        [sys.executable, "-m", "trtllm_core", "cpu"], capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
    assert all(name in finished.stdout for name in BACKEND_NAMES)
    assert "nothing lossy   TORCH_SDPA" in finished.stdout


def test_the_table_gives_every_reason_and_survives_what_does_not_load(monkeypatch):
    packages = {"sageattention": "2.2.0", "triton": "3.6.0"}
    device = Device(capability=(9, 0), name="NVIDIA H200", cudnn=91002, packages=packages)
    text = "\n".join(report.lines(device))
    assert "device    NVIDIA H200 (sm_90), Hopper" in text
    assert "TRTLLM_ATTN       no: it needs sm_100/sm_103" in text
    assert "SAGE_ATTN         no: it failed to load: sageattention cannot be imported" in text
    assert "CUDNN_ATTN        can run" in text
