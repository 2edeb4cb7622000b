"""Masks: which are nothing but padding at the end, and how lengths and masks combine."""

from __future__ import annotations

import torch


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
