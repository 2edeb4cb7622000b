"""Every shipped Hopper configuration compiles for compute capability 9.0, fits, and does not spill. Needs no GPU."""

import json
import pathlib
import subprocess
import sys

import pytest

from trtllm_core.kernels.hopper import OLDEST_TRITON

triton = pytest.importorskip("triton")
if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST_TRITON:
    pytest.skip(f"Triton {triton.__version__} is too old for these kernels", allow_module_level=True)

SHARED_MEMORY = 227 * 1024  # of one block on compute capability 9.0
# loop invariants that the ragged tile and the epilogue read; with key lengths in 16 bits, clearing V's padding too
SPILLED_WORDS, SPILLED_WORDS_WHERE_V_IS_CLEARED = 16, 64


@pytest.mark.slow
def test_compiles_fits_and_does_not_spill():
    """In its own process: here Triton may be in its interpreter, which Gluon does not have."""
    script = pathlib.Path(__file__).with_name("compile_hopper.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 13
    for kernel in found:
        assert kernel["shared"] <= SHARED_MEMORY, kernel
        quantized = not kernel["case"].startswith("none")
        clears = kernel["case"].endswith("True") and not quantized
        assert kernel["spill_stores"] <= (SPILLED_WORDS_WHERE_V_IS_CLEARED if clears else SPILLED_WORDS), kernel
        assert ("HGMMA" in kernel["matrix"]) != quantized, kernel
        assert ("QGMMA" in kernel["matrix"]) == quantized, kernel
        assert ("IGMMA" in kernel["matrix"]) == kernel["case"].startswith("int8"), kernel
