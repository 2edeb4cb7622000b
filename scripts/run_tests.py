"""Run every test suite in a process of its own and end with one line of totals.

    python run_tests.py            all suites, with this interpreter
    python run_tests.py --gpu      the tests marked gpu
    python run_tests.py core ...   the suites named

Apart, because kernels run in Triton's interpreter only where it is switched on before the import,
and ComfyUI has top-level modules that are called like parts of the pack.
"""

import os
import subprocess
import sys
import time
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"

NO_GPU = ["-m", "not gpu"]
# name -> (arguments of pytest, environment)
SUITES = {
    "core": (["tests/core", *NO_GPU], {}),
    "kernels": (["tests/kernels", *NO_GPU], {"TRITON_INTERPRET": "1", "PYTHONPATH": str(CACHE / "triton-3.9.0")}),
    # Triton 3.6.0 came with torch 2.10: the kernels must compile there too.
    "kernels-triton-3.6.0": (["tests/kernels", "-k", "compile", *NO_GPU], {"PYTHONPATH": str(CACHE / "triton-3.6.0")}),
    "comfy": (["tests/comfy", *NO_GPU], {}),
    "browser": (["tests/browser", *NO_GPU], {}),
}
GPU_SUITES = {
    "gpu": (["tests/core", "tests/kernels", "-m", "gpu"], {}),
    "gpu-comfy": (["tests/comfy", "-m", "gpu"], {}),
}
NOTHING_COLLECTED = 5


def run(name, arguments, environment):
    """Run one suite. Returns (passed, failed, skipped); a suite that cannot report counts as failed."""
    report = CACHE / "reports" / f"{name}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    print(f"\n{name}: pytest {' '.join(arguments)}", flush=True)
    code = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "--durations=5", "--continue-on-collection-errors",
            f"--junitxml={report}", *arguments,
        ],
        cwd=ROOT, env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **environment}, stdin=subprocess.DEVNULL,
    ).returncode  # fmt: skip
    if code == NOTHING_COLLECTED:
        return 0, 0, 0
    if not report.exists():
        return 0, 1, 0
    suite = xml.etree.ElementTree.parse(report).getroot().find("testsuite")
    tests, failures, errors, skipped = (int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped"))
    failed = failures + errors
    if code != 0 and failed == 0:
        failed = 1
    return max(tests - failures - errors - skipped, 0), failed, skipped


def main():
    """Run what the command line names; exit 1 where a test failed or none ran."""
    names = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    suites = GPU_SUITES if "--gpu" in sys.argv[1:] else SUITES
    unknown = set(names) - set(suites)
    if unknown:
        raise SystemExit(f"no suite {', '.join(sorted(unknown))}; there are {', '.join(suites)}")
    totals, lines = [0, 0, 0], []
    for name, (arguments, environment) in suites.items():
        if names and name not in names:
            continue
        started = time.monotonic()
        counts = run(name, arguments, environment)
        totals = [total + count for total, count in zip(totals, counts)]
        lines.append(f"{name:22} {'%d passed, %d failed, %d skipped' % counts}, {time.monotonic() - started:.0f} s")
    print("\n" + "\n".join(lines))
    print("%d passed, %d failed, %d skipped" % tuple(totals), flush=True)
    sys.exit(1 if totals[1] or not totals[0] else 0)


if __name__ == "__main__":
    main()
