"""Run a ComfyUI checkout: python launch.py COMFYUI_PATH [arguments of ComfyUI's main.py].

Does what `python main.py` does, with two additions. It ends when the process that started it ends,
however that ends. And PyPI's torchvision imports beside a CPU build of torch: its compiled
operators are linked to CUDA and cannot load there, and its Python side then fails on fake kernels
for operators that were never declared.
"""

import ctypes
import importlib.abc
import importlib.metadata
import os
import runpy
import signal
import sys


class DeclareTorchvisionOperators(importlib.abc.MetaPathFinder):
    """Declares torchvision's two operators that have fake kernels, when torchvision is first imported."""

    def __init__(self):
        self.library = None

    def find_spec(self, name, path, target=None):
        """Never finds anything: being asked for torchvision is the moment to act."""
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


def allow_torchvision_beside_cpu_torch():
    """Install the finder where torch is a CPU build and torchvision is not. Does not import torch."""
    try:
        builds = [importlib.metadata.version(package) for package in ("torch", "torchvision")]
    except importlib.metadata.PackageNotFoundError:
        return
    if builds[0].endswith("+cpu") and "+" not in builds[1]:
        sys.meta_path.insert(0, DeclareTorchvisionOperators())


def end_with_parent():
    """Ask Linux for SIGTERM when the parent is gone: a killed test run leaves no server behind."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def main():
    """Run main.py of the checkout named first on the command line, as if it had been started itself."""
    root = os.path.abspath(sys.argv[1])
    end_with_parent()
    allow_torchvision_beside_cpu_torch()
    sys.argv = [os.path.join(root, "main.py"), *sys.argv[2:]]
    sys.path[0] = root
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
