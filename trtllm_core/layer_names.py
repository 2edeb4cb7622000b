"""One attention layer, many names: ComfyUI's module paths and Diffusers' names of the same layers.

Calibrated checkpoints and vLLM-Omni's configurations use Diffusers' names, ComfyUI's users see
ComfyUI's, and either may carry a component prefix. Patterns match all of them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

COMPONENTS = ("transformer", "transformer_2")

# ComfyUI's module path of a layer, then the other names of the same layer. `{n}` stands for a
# number. ComfyUI paths are those of the module whose forward makes the attention call. Rows of
# one name are families that ComfyUI and Diffusers name alike. Append to extend.
LAYER_NAMES = [
    # Wan, VACE; the second name is Cosmos Predict2's, whose modules ComfyUI names like Wan's
    ("blocks.{n}.self_attn", "blocks.{n}.attn1", "transformer_blocks.{n}.attn1"),
    ("blocks.{n}.cross_attn", "blocks.{n}.attn2", "transformer_blocks.{n}.attn2"),
    ("vace_blocks.{n}.self_attn", "vace_blocks.{n}.attn1"),
    ("vace_blocks.{n}.cross_attn", "vace_blocks.{n}.attn2"),
    ("face_adapter.fuser_blocks.{n}", "face_adapter.{n}"),
    # HunyuanVideo 1.0 and 1.5, Flux, Chroma: one joint attention call per block
    ("double_blocks.{n}", "transformer_blocks.{n}", "transformer_blocks.{n}.attn"),
    ("single_blocks.{n}", "single_transformer_blocks.{n}", "single_transformer_blocks.{n}.attn"),
    (
        "txt_in.individual_token_refiner.blocks.{n}",
        "txt_in.individual_token_refiner.blocks.{n}.self_attn",
        "context_embedder.token_refiner.refiner_blocks.{n}",
        "context_embedder.token_refiner.refiner_blocks.{n}.attn",
    ),
    (
        "txt_in.individual_token_refiner.blocks.{n}.self_attn",
        "context_embedder.token_refiner.refiner_blocks.{n}",
        "context_embedder.token_refiner.refiner_blocks.{n}.attn",
    ),
    # Cosmos Predict1
    ("blocks.block{n}.blocks.0.block.attn", "transformer_blocks.{n}.attn1"),
    ("blocks.block{n}.blocks.1.block.attn", "transformer_blocks.{n}.attn2"),
    # Qwen-Image; LTX-Video and LTX-2
    ("transformer_blocks.{n}.attn",),
    ("transformer_blocks.{n}.attn1",),
    ("transformer_blocks.{n}.attn2",),
]

_PREFIX = re.compile(rf"^(?:diffusion_model|{'|'.join(COMPONENTS)})\.")


def aliases(layer: str, component: str | None = None) -> tuple[str, ...]:
    """Every name of one layer: its own first, then Diffusers', then all of them with a prefix.

    layer: a module path, with or without `diffusion_model.` or a component's prefix. component:
    which of COMPONENTS the model is; None, unknown, gives the names in each of them.
    """
    return _aliases(layer, component, tuple(LAYER_NAMES))


@functools.lru_cache(maxsize=4096)
def _aliases(layer: str, component: str | None, table: tuple) -> tuple[str, ...]:
    bare = _PREFIX.sub("", layer)
    names = [bare, *_other_names(bare, table)]
    prefixes = ("", "diffusion_model.", *(f"{c}." for c in COMPONENTS if component in (None, c)))
    every = [layer, *(prefix + name for prefix in prefixes for name in names)]
    return tuple(dict.fromkeys(every))


def _other_names(layer: str, table: tuple) -> list[str]:
    """Names of `layer` in the rows whose ComfyUI name it is; if there are none, in any row."""
    return _in_rows(layer, table, slice(0, 1)) or _in_rows(layer, table, slice(1, None))


def _in_rows(layer: str, table: tuple, columns: slice) -> list[str]:
    found = []
    for row in table:
        for name in row[columns]:
            match = re.fullmatch(re.escape(name).replace(r"\{n\}", r"(\d+)"), layer)
            if match:
                found += [other.replace("{n}", match[1]) for other in row]
    return found


def names_elsewhere(layer: str) -> tuple[str, ...]:
    """What other programs call a ComfyUI layer; empty for patterns and layers not in the table."""
    bare = _PREFIX.sub("", layer)
    names = _in_rows(bare, tuple(LAYER_NAMES), slice(0, 1))
    return tuple(name for name in dict.fromkeys(names) if name != bare)


def matches(pattern: str, layer: str, component: str | None = None) -> bool:
    """Whether the shell-style `pattern` (`*`, `?`, `[...]`; case counts) names `layer`.

    As in vLLM-Omni, a pattern also covers what is inside the module that it names: `blocks.0`
    selects `blocks.0.attn1`.
    """
    names = aliases(layer, component)
    return any(fnmatchcase(name, p) for p in (pattern, f"{pattern}.*") for name in names)


class LayerPatterns:
    """A list of patterns: which layers it selects, and which patterns select none.

    patterns: strings as `matches` takes them; surrounding blanks and empty entries are dropped.
    """

    def __init__(self, patterns: Iterable[str], component: str | None = None):
        self.patterns = tuple(p for p in (pattern.strip() for pattern in patterns) if p)
        self.component = component

    def selects(self, layer: str) -> bool:
        return any(matches(pattern, layer, self.component) for pattern in self.patterns)

    def unmatched(self, layers: Iterable[str]) -> tuple[str, ...]:
        """The patterns that select none of `layers`; the user should hear of them."""
        layers = tuple(layers)
        return tuple(
            p for p in self.patterns if not any(matches(p, x, self.component) for x in layers)
        )
