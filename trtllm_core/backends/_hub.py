"""FlashAttention builds from the Hugging Face Hub, through the `kernels` library."""

from __future__ import annotations

from . import Package, Unavailable, import_names
from ._flash import FlashLibrary, by_cache

KERNELS = Package("kernels", "pip install kernels==0.14.1", "0.14")


def load_from_hub(backend: str, repository: str, version: int, name: str) -> FlashLibrary:
    """The kernel `repository` at `version`; the first use on a machine downloads it."""
    (get_kernel,) = import_names(backend, "kernels", "get_kernel")
    try:
        module = get_kernel(repository, version=version)
        dense, cached = module.flash_attn_func, module.flash_attn_with_kvcache
    except Exception as error:  # the download and the kernel's own code may raise anything
        reason = (
            f"{repository} version {version} could not be loaded: {type(error).__name__}: {error}"
        )
        raise Unavailable(
            backend, (reason + " (its first use downloads it from huggingface.co)",)
        ) from error
    return FlashLibrary(name, dense, by_cache(cached))
