"""Every shipped configuration compiles for its GPU, fits its shared memory and does not spill. Needs no GPU."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

triton = pytest.importorskip("triton")

# KiB of shared memory that a block may use
SHARED = {"80": 163, "86": 99, "89": 99, "90": 227, "100": 227, "120": 99}
NEWER = tuple(map(int, triton.__version__.split(".")[:2])) > (3, 6)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
def test_shipped_configurations(capability):
    script = pathlib.Path(__file__).with_name("compile_report.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script, capability], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) > 16
    for report in reports:
        assert report["shared"] <= SHARED[capability] * 1024, report
        # Compilers later than 3.6 keep the column numbers of the last tile's mask on the stack, read in that tile only
        assert report["stack"] <= (128 if NEWER and capability == "90" else 0), report
