"""Where a model's attention is called: module path -> layer name and roles.

A family is a table of module paths. Modules whose `forward` calls attention are found by path, so
that lengths, call counts and tensor contents never have to be guessed from.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

UNKNOWN_ROLE = "unknown"


@dataclass(frozen=True)
class Layer:
    """One module whose forward calls attention.

    path: module path below `diffusion_model`, whose forward is wrapped. name: the layer's name in
    patterns and reports. roles: one per attention call of one forward, in call order.
    """

    path: str
    name: str
    roles: tuple[str, ...]
    head_dim: int | None


@dataclass(frozen=True)
class Site:
    """A kind of layer: a regular expression of its path, its roles, and where attention is named."""

    path: str
    roles: Callable[[object], tuple[str, ...]]
    name_suffix: str = ""


@dataclass(frozen=True)
class Family:
    """A model family: the Python package of its classes and the sites of its attention calls.

    extra_tokens_lead: whether tokens that are not video come before the video in self-attention.
    mask_free: whether the DiT blocks never pass a mask.
    """

    name: str
    package: str
    sites: tuple[Site, ...]
    extra_tokens_lead: Callable[[object], bool] = field(default=lambda model: True)
    mask_free: bool = False


def _always(*roles: str) -> Callable[[object], tuple[str, ...]]:
    return lambda module: roles


def _wan_cross(module) -> tuple[str, ...]:
    # the image half of an I2V layer is computed first, in every version
    return ("wan.image_cross", "cross") if hasattr(module, "k_img") else ("cross",)


def _text_leads_in_hunyuan(model) -> bool:
    # up to ComfyUI 0.3 blocks are built with video first and say so
    blocks = getattr(model, "double_blocks", None) or [None]
    return not getattr(blocks[0], "flipped_img_txt", False)


FAMILIES = (
    Family(
        "wan",
        "comfy.ldm.wan",
        (
            Site(r"(vace_)?blocks\.\d+\.self_attn", _always("self")),
            Site(r"(vace_)?blocks\.\d+\.cross_attn", _wan_cross),
            Site(r"audio_injector\.injector\.\d+", _always("wan.audio_cross")),
            Site(
                r"blocks\.\d+\.audio_cross_attn_wrapper\.audio_cross_attn",
                _always("wan.audio_cross"),
            ),
        ),
        # a reference frame is put in front, in-context and motion latents behind: the first is common
        extra_tokens_lead=lambda model: getattr(model, "ref_conv", None) is not None,
        mask_free=True,
    ),
    Family(
        "hunyuan_video",
        "comfy.ldm.hunyuan_video",
        (
            Site(r"double_blocks\.\d+", _always("self")),
            Site(r"single_blocks\.\d+", _always("self")),
            Site(
                r"txt_in\.individual_token_refiner\.blocks\.\d+",
                _always("hunyuan_video.token_refiner"),
                name_suffix=".self_attn",
            ),
        ),
        extra_tokens_lead=_text_leads_in_hunyuan,
    ),
)

ROLE_CATEGORIES = {
    "wan.image_cross": "cross",
    "wan.audio_cross": "cross",
    "hunyuan_video.token_refiner": "self",
}


def family_of(diffusion_model) -> Family | None:
    """The family whose package defines the model's class or one of its bases, or None."""
    for cls in type(diffusion_model).__mro__:
        for family in FAMILIES:
            if (cls.__module__ + ".").startswith(family.package + "."):
                return family
    return None


def find_layers(diffusion_model) -> tuple[Layer, ...]:
    """Every known attention layer of the model, in module order; empty for an unknown family."""
    family = family_of(diffusion_model)
    if family is None:
        return ()
    sites = [(re.compile(site.path), site) for site in family.sites]
    found = []
    for path, module in diffusion_model.named_modules():
        for pattern, site in sites:
            if pattern.fullmatch(path):
                name = path + site.name_suffix
                found.append(Layer(path, name, site.roles(module), head_dim(module)))
    return tuple(found)


def head_dim(module) -> int | None:
    """The head size of an attention module or block, or None where it does not say."""
    if isinstance(getattr(module, "head_dim", None), int):
        return module.head_dim
    heads = getattr(module, "num_heads", None) or getattr(module, "heads", None)
    width = getattr(module, "hidden_size", None) or getattr(module, "dim", None)
    if width is None and hasattr(module, "norm1"):
        width = module.norm1.normalized_shape[-1]
    if isinstance(heads, int) and isinstance(width, int) and heads:
        return width // heads
    return None
