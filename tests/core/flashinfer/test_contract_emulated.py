"""Run contract.py once per FlashInfer version, each in a process of its own.

The kernels are emulated; what is real is FlashInfer's Python and everything of ours above it. See one
version's tests by name with
    PYTHONPATH=.cache/flashinfer/0.7.4:.cache/flashinfer/needs python -m pytest tests/core/flashinfer/contract.py
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = 100  # fewer than this were not the contract

_spec = importlib.util.spec_from_file_location("flashinfer_versions", HERE / "versions.py")
versions = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(versions)


@pytest.mark.slow
@pytest.mark.parametrize("version", versions.VERSIONS)
def test_contract_emulated_with_flashinfer(version):
    if not versions.installed(version):
        if os.environ.get("FLASHINFER_CONTRACT") != "required":
            pytest.skip(f"flashinfer {version} is not in .cache (python tests/core/flashinfer/versions.py)")
        versions.install(version)
    environment = {**os.environ, "PYTHONPATH": versions.path(version), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "contract.py")]
    done = subprocess.run(
        command, cwd=HERE.parents[2], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = int(re.search(r"(\d+) passed", done.stdout).group(1))
    assert passed >= TESTS and "skipped" not in done.stdout, done.stdout[-2000:]
