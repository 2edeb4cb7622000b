"""What the frontend asks the server while a graph is edited: a model file's layers, and a schedule.

A file's architecture is read from its safetensors header alone, and built by ComfyUI's own code on
the meta device: no weight is loaded.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import sys
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

import comfy.model_detection
import comfy.model_sampling
import comfy.samplers
import comfy.utils
import folder_paths
import torch
from aiohttp import web

from ..trtllm_core.layer_names import LayerPatterns
from .hook.layers import find_layers
from .layer_ignore import parse_patterns
from .timestep_gate import schedule_of

log = logging.getLogger("trtllm_attention")

FOLDERS = ("diffusion_models", "checkpoints")
PLAIN_NAME = "trtllm-attention"
MOST_STEPS = 10000
MOST_LAYERS = 2000
LONGEST_HEADER = 100_000_000  # bytes; safetensors' own limit


@dataclass(frozen=True)
class Architecture:
    """A model without weights. layers: names, none for an unknown family."""

    layers: tuple[str, ...]
    sampling: torch.nn.Module


def add_routes() -> None:
    """Add the routes to ComfyUI's server; does nothing outside of one."""
    # not imported: where ComfyUI has not done so there is no server, and importing it changes sys.path
    module = sys.modules.get("server")
    server = getattr(getattr(module, "PromptServer", None), "instance", None)
    if server is None:
        return
    for path, answer in (("layers", layers_answer), ("schedule", schedule_answer)):
        server.routes.post(f"/trtllm_attention/{path}")(_handler(answer))
    _serve_under_a_plain_name()


def _serve_under_a_plain_name() -> None:
    """Let web/ be found where the pack's folder is called "name (1)" or the like.

    ComfyUI serves a pack's web folder under the pack's own name, and its router never matches one
    that has to be quoted.
    """
    import nodes

    folder = Path(__file__).parents[1].name
    if urllib.parse.quote(folder) != folder and folder in nodes.EXTENSION_WEB_DIRS:
        nodes.EXTENSION_WEB_DIRS[PLAIN_NAME] = nodes.EXTENSION_WEB_DIRS.pop(folder)


def _handler(answer):
    async def handle(request):
        try:
            asked = await request.json()
            # reading a header takes milliseconds, on a network drive longer: not in the server's loop
            return web.json_response(await asyncio.to_thread(answer, asked))
        except (json.JSONDecodeError, TypeError, ValueError, KeyError, AttributeError) as error:
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=400)

    return handle


def layers_answer(asked: dict) -> dict:
    """Which layers the patterns match.

    asked: patterns, the text of the node; and file, {folder, name}, or layers, names from a run.
    Gives layers, and matches: for each pattern, the indices of its layers.
    """
    names = list(map(str, asked.get("layers") or ()))[:MOST_LAYERS]
    if not names:
        architecture = architecture_of(asked.get("file"))
        names = list(architecture.layers) if architecture else []
    matches = []
    for pattern in parse_patterns(asked["patterns"]):
        selector = LayerPatterns([pattern])
        selected = [index for index, name in enumerate(names) if selector.selects(name)]
        matches.append({"pattern": pattern, "layers": selected})
    return {"layers": names, "matches": matches}


def schedule_answer(asked: dict) -> dict:
    """The normalized timesteps that a sampler would call a model file at; none where not known.

    asked: file, steps, scheduler, denoise and shift (None: the model's own).
    """
    architecture = architecture_of(asked.get("file"))
    steps, scheduler, denoise = int(asked["steps"]), asked["scheduler"], float(asked["denoise"])
    if architecture is None or not 1 <= steps <= MOST_STEPS or not 0 <= denoise <= 1:
        return {"timesteps": []}
    if scheduler not in comfy.samplers.SCHEDULER_NAMES:
        return {"timesteps": []}
    sampling = architecture.sampling
    if asked.get("shift") is not None:
        sampling = _shifted(sampling, float(asked["shift"]))
    times = schedule_of(sampling, steps, scheduler, denoise) if sampling is not None else None
    return {"timesteps": [round(t, 5) for t in times or () if t is not None]}


def _shifted(sampling, shift: float):
    """The sampling of the stock ModelSamplingSD3 node for a flow model, else None."""
    flow = comfy.model_sampling.ModelSamplingDiscreteFlow
    if not isinstance(sampling, flow) or shift <= 0:
        return None
    shifted = type(sampling)()
    shifted.set_parameters(shift=shift, multiplier=sampling.multiplier)
    return shifted


def architecture_of(file: dict | None) -> Architecture | None:
    """The architecture of a file of FOLDERS, or None where it cannot be told."""
    if not file or file.get("folder") not in FOLDERS:
        return None
    path = folder_paths.get_full_path(file["folder"], str(file.get("name")))
    if path is None or not path.endswith((".safetensors", ".sft")):
        return None
    return _read(path, os.stat(path).st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _read(path: str, modified: int) -> Architecture | None:
    try:
        state = _without_weights(path)
        prefix = comfy.model_detection.unet_prefix_from_state_dict(state)
        inner = comfy.utils.state_dict_prefix_replace(state, {prefix: ""}, filter_keys=True)
        config = comfy.model_detection.model_config_from_unet(inner or state, "")
        if config is None:
            return None
        config.set_inference_dtype(torch.float16, None)
        model = config.get_model(inner or state, "", device="meta")
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
        # detection that needs a weight's values, or a file that is none: the first run will tell
        log.debug("layers of %s are not known before it is loaded: %s", path, error)
        return None
    names = tuple(layer.name for layer in find_layers(model.diffusion_model))
    return Architecture(names, model.model_sampling)


def _without_weights(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file on the meta device; reads its header and nothing else."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > LONGEST_HEADER:
            raise ValueError("not a safetensors file")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    # the dtype says nothing about the architecture
    return {name: torch.empty(entry["shape"], device="meta") for name, entry in header.items()}
