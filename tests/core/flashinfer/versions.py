"""The FlashInfer versions that the contract is tested against, installed beside torch into .cache/.

    python tests/core/flashinfer/versions.py    install what is missing (PyPI), 500 MB

Only FlashInfer's Python is wanted: its dependencies would replace torch, and its CUDA sources go.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

VERSIONS = ("0.6.16", "0.6.18.post1", "0.7.4")  # the oldest with SAGE, one between, the newest on 2026-11-29
NEEDS = ("apache-tvm-ffi==0.1.12", "click", "einops", "numpy", "nvidia-ml-py", "packaging", "requests")
NEEDS += ("tabulate", "tqdm", "urllib3", "idna", "certifi", "charset-normalizer")
CACHE = Path(__file__).resolve().parents[3] / ".cache" / "flashinfer"


def installed(version: str) -> bool:
    return (CACHE / version / "done").exists() and (CACHE / "needs" / "done").exists()


def install(version: str) -> None:
    """Raises CalledProcessError where pip does not reach the packages."""
    _install(CACHE / "needs", _missing())
    _install(CACHE / version, [f"flashinfer-python=={version}"])


def path(version: str) -> str:
    """What goes to PYTHONPATH."""
    return os.pathsep.join(str(CACHE / name) for name in (version, "needs"))


def _missing() -> list[str]:
    """Those of NEEDS that this environment lacks, so that none of its own is hidden."""
    from importlib.metadata import PackageNotFoundError, distribution

    missing = []
    for need in NEEDS:
        try:
            distribution(need.partition("==")[0])
        except PackageNotFoundError:
            missing.append(need)
    return missing


def _install(folder: Path, packages: list[str]) -> None:
    if (folder / "done").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if packages:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, *packages], check=True, timeout=900)
    shutil.rmtree(folder / "flashinfer" / "data", ignore_errors=True)
    (folder / "done").touch()


if __name__ == "__main__":
    for each in VERSIONS:
        install(each)
        print(f"flashinfer {each}: {CACHE / each}")
