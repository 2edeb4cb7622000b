"""Masks: which are nothing but padding at the end, and how lengths and masks combine."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

MASK_BACKENDS = ("TORCH_SDPA", "CUDNN_ATTN")  # two that honour any mask, for advice


def as_4d(mask: torch.Tensor) -> torch.Tensor:
    """ComfyUI's masks as [B or 1, H or 1, Lq or 1, Lk].

    2-D is [Lq, Lk], 3-D is [B, Lq, Lk], 4-D is [B, H, Lq, Lk].
    """
    if mask.ndim == 2:
        return mask[None, None]
    if mask.ndim == 3:
        return mask[:, None]
    if mask.ndim == 4:
        return mask
    raise ValueError(f"a mask has 2, 3 or 4 dimensions, not {mask.ndim}: {tuple(mask.shape)}")


def with_lengths(
    mask: torch.Tensor | None, key_lengths: torch.Tensor | None, key_length: int
) -> torch.Tensor | None:
    """`mask` that also hides the keys from `key_lengths` [B] on; no device sync.

    mask: None or broadcastable to [B, H, Lq, Lk], boolean or additive. Returns None, or a mask.
    """
    if key_lengths is None:
        return mask
    position = torch.arange(key_length, device=key_lengths.device)
    is_key = (position < key_lengths[:, None])[:, None, None]  # [B, 1, 1, Lk]
    if mask is None:
        return is_key
    if mask.dtype == torch.bool:
        return mask & is_key
    return torch.where(is_key, mask, float("-inf"))


def suffix_lengths(mask: torch.Tensor, key_length: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """If `mask` may be read as "keys from here on are padding": the lengths, and whether it is so.

    Returns (int32 [B or 1], bool scalar), both on the mask's device, or None when the shape already
    rules it out. No device sync.
    """
    mask = as_4d(mask)
    if mask.shape[-1] != key_length or not (mask.dtype == torch.bool or mask.is_floating_point()):
        return None
    for dim in (1, 2):
        if mask.stride(dim) == 0:  # expanded: one row says it all
            mask = mask.narrow(dim, 0, 1)
    if mask.dtype == torch.bool:
        attends, understood = mask, None
    else:
        # both -inf and the most negative finite value are in use for "hidden"
        attends = mask == 0
        understood = attends | (mask <= torch.finfo(mask.dtype).min)
    row = attends[:, :1, :1]  # [B, 1, 1, Lk]
    lengths = row.sum(-1, dtype=torch.int32)  # [B, 1, 1]
    position = torch.arange(key_length, device=mask.device)
    is_suffix = (row == (position < lengths[..., None])).all() & (attends == row).all()
    # a row without any key means something else to every backend
    is_suffix = is_suffix & (lengths > 0).all()
    if understood is not None:
        is_suffix = is_suffix & understood.all()
    return lengths.flatten(), is_suffix


class MaskReader:
    """Reads each mask once: one device sync per mask, none per call. Owned by a run.

    A mask is known by its storage and view, so that a view made anew for every call is not read
    again; a mask that is gone is forgotten. Masks changed in place are read again, except under
    inference_mode, where nothing tells.
    """

    def __init__(self):
        self._known: dict[tuple, tuple[StorageWeakRef, object]] = {}

    def key_lengths(self, mask: torch.Tensor, key_length: int) -> torch.Tensor | None:
        """int32 lengths [B or 1] if `mask` (2-D, 3-D or 4-D) only hides a padded suffix, else None."""
        return self._once(mask, key_length, _read_lengths)[0]

    def host_key_lengths(self, mask: torch.Tensor, key_length: int) -> tuple[int, ...] | None:
        """The same lengths as Python numbers."""
        return self._once(mask, key_length, _read_lengths)[1]

    def is_boolean(self, mask: torch.Tensor) -> bool:
        """Whether `mask` only hides or shows, whatever its dtype."""
        return mask.dtype == torch.bool or self._once(mask, None, _only_hides)

    def _once(self, mask: torch.Tensor, key_length: int | None, read):
        """read(mask, key_length), remembered for this view of this storage."""
        storage = StorageWeakRef(mask.untyped_storage())
        version = 0 if mask.is_inference() else mask._version
        view = (mask.storage_offset(), mask.dtype, tuple(mask.shape), mask.stride())
        key = (storage.cdata, version, view, key_length)
        known = self._known.get(key)
        if known is None:
            known = storage, read(mask, key_length)
            # the weak reference pins the address, so a dead entry can never be taken for a new mask; a
            # copy, because several GPUs' threads may read masks at once
            living = {k: other for k, other in self._known.copy().items() if not other[0].expired()}
            self._known = {**living, key: known}
        return known[1]

    def clear(self) -> None:
        self._known.clear()


def _read_lengths(mask: torch.Tensor, key_length: int) -> tuple:
    """(int32 lengths on the mask's device, the same as Python numbers), or (None, None)."""
    found = suffix_lengths(mask, key_length)
    if found is None or not bool(found[1]):
        return None, None
    return found[0], tuple(found[0].tolist())


def _only_hides(mask: torch.Tensor, _) -> bool:
    return bool(((mask == 0) | (mask <= torch.finfo(mask.dtype).min)).all())


def mask_refusal(backend: str, layer: str, mask: torch.Tensor) -> str:
    """Why `backend` does not run this call, and what would."""
    able = " or ".join(name for name in MASK_BACKENDS if name != backend)
    return (
        f"{layer}: {backend} cannot honour this mask of shape {tuple(mask.shape)} ({mask.dtype}), "
        f"which does more than cut off a padded end; choose {able} for this role"
    )
