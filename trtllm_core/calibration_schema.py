"""Where calibrated curves are found, and the JSON they are written in.

ModelOpt stores a curve under `sparse_attention_config` in a transformer's `config.json`. Four shapes
of that block are in circulation; all of them are read here, and TensorRT-LLM's is written.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .layer_names import COMPONENTS, names_elsewhere

FORMULA = "a * exp(b * target_sparsity)"
ALGORITHMS = ("skip_softmax", "softmax_skip")
BLOCK = "sparse_attention_config"
OUR_NOTES = "trtllm_attention"  # inside BLOCK; other readers ignore it
ALTERNATIVE = "Without a calibration set skip_softmax.threshold instead (try 0.01)."

_LARGEST_HEADER = 100_000_000  # bytes; safetensors' own limit


@dataclass(frozen=True)
class Curve:
    """What one `sparse_attention_config` says: coefficients, layers that stay dense, and notes."""

    a: float
    b: float
    ignore: tuple[str, ...] = ()
    notes: dict = field(default_factory=dict)


def read(source: str | os.PathLike | Mapping) -> dict[str | None, Curve]:
    """The curves in a source, by component.

    source: a mapping; a `.json` file; a `.safetensors` file with the block in its metadata; a folder
    with `transformer/config.json` (and `transformer_2/config.json`) or a `config.json`. A source
    that holds one curve without saying whose gives {None: curve}. Empty when no curve is found.
    Raises ValueError for anything malformed, and FileNotFoundError.
    """
    if isinstance(source, Mapping):
        return _only(parse(source, "the given mapping"))
    path = Path(source)
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise FileNotFoundError(f"no calibration at {path}. {ALTERNATIVE}")
    config = _metadata(path) if path.suffix == ".safetensors" else load_json(path)
    return _only(parse(config, str(path)))


def _read_folder(folder: Path) -> dict[str | None, Curve]:
    found = {}
    for component in COMPONENTS:
        file = folder / component / "config.json"
        curve = parse(load_json(file), str(file)) if file.exists() else None
        if curve is not None:
            found[component] = curve
    file = folder / "config.json"
    if not found and file.exists():
        return _only(parse(load_json(file), str(file)))
    return found


def _only(curve: Curve | None) -> dict[str | None, Curve]:
    return {} if curve is None else {None: curve}


def load_json(path: Path) -> Mapping:
    return _decode(path.read_bytes(), str(path))


def _decode(text: bytes | str, where: str) -> Mapping:
    try:
        config = json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except json.JSONDecodeError as error:
        position = f"line {error.lineno} column {error.colno}"
        raise ValueError(f"{where} is not valid JSON: {error.msg}: {position}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not a JSON file: byte {error.start} is not text") from error
    if not isinstance(config, Mapping):
        raise ValueError(f"{where} holds a {type(config).__name__}, not a JSON object")
    return config


def _metadata(path: Path) -> Mapping:
    """The config in a safetensors file's metadata: the block itself, or a whole config.json."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= min(_LARGEST_HEADER, path.stat().st_size - 8):
            raise ValueError(f"{path} is not a safetensors file, or is cut short")
        header = _decode(file.read(length), f"the header of {path}")
    metadata = header.get("__metadata__") or {}
    for key in (BLOCK, "config"):
        if key in metadata:
            config = _decode(metadata[key], f"metadata {key!r} of {path}")
            if key == BLOCK:
                return {BLOCK: config.get(BLOCK, config)}
            if BLOCK in config:
                return config
    return {}


def parse(config: Mapping, where: str) -> Curve | None:
    """The curve in a `config.json`'s content, or in the block itself; None if there is none."""
    if BLOCK in config:
        block, where = config[BLOCK], f"{where}: {BLOCK}"
    else:
        block = config if {"config_groups", "threshold_scale_factor"} & config.keys() else None
    if block is None:
        return None
    _must_be(block, Mapping, where)
    group, where = _group(block, where)
    factor = group.get("threshold_scale_factor")
    if factor is None:
        return None
    where = f"{where}.threshold_scale_factor"
    if isinstance(factor, (int, float)) and not isinstance(factor, bool):
        raise ValueError(
            f"{where}={factor!r} is one fixed factor, not a curve: "
            f"set skip_softmax.threshold to it divided by the number of keys"
        )
    _must_be(factor, Mapping, where)
    a, b = _coefficients(factor, where)
    return Curve(a, b, _ignore(group, where), _notes(block, group, where))


def _group(block: Mapping, where: str) -> tuple[Mapping, str]:
    groups = block.get("config_groups")
    if groups is None:
        return block, where
    where = f"{where}.config_groups"
    _must_be(groups, Mapping, where)
    skip_groups = []
    for name, group in groups.items():
        _must_be(group, Mapping, f"{where}.{name}")
        algorithm = group.get("algorithm")
        if algorithm in ALGORITHMS or (algorithm is None and "threshold_scale_factor" in group):
            skip_groups.append((group, f"{where}.{name}"))
    if len(skip_groups) > 1:
        names = " and ".join(name for _, name in skip_groups)
        raise ValueError(f"{names} both configure Skip-Softmax; one may")
    return skip_groups[0] if skip_groups else (block, where)


def _coefficients(factor: Mapping, where: str) -> tuple[float, float]:
    formula = factor.get("formula", FORMULA)
    if not isinstance(formula, str) or re.sub(r"\s", "", formula) != FORMULA.replace(" ", ""):
        raise ValueError(f"{where}.formula={formula!r} is not supported, only {FORMULA!r} is")
    for key in ("coefficients", "prefill"):
        if key in factor:
            values, where = factor[key], f"{where}.{key}"
            break
    else:
        values = factor
    _must_be(values, Mapping, where)
    missing = [name for name in ("a", "b") if name not in values]
    if missing:
        raise ValueError(f"{where} has no {' and no '.join(missing)}; it has {sorted(values)}")
    for name in ("a", "b"):
        check_coefficient(f"{where}.{name}", values[name])
    return float(values["a"]), float(values["b"])


def check_coefficient(key: str, value: object) -> None:
    """Raise unless `value` is a finite number above zero."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{key}={value!r} must be a finite number above 0")


def _ignore(group: Mapping, where: str) -> tuple[str, ...]:
    ignore = group.get("ignore") or ()
    if isinstance(ignore, str) or not all(isinstance(pattern, str) for pattern in ignore):
        raise ValueError(f"{where}: ignore={ignore!r} must be a list of layer patterns")
    return tuple(ignore)


def _notes(block: Mapping, group: Mapping, where: str) -> dict:
    """What is shown to the user but not applied, and what our own files add."""
    notes = {}
    for key in ("targets", "target_sparsity", "disabled_until_timestep", "initial_disabled_steps"):
        value = group.get(key, block.get(key))
        if value is not None:
            notes[key] = value
    producer = block.get("producer")
    if isinstance(producer, Mapping):
        producer = " ".join(str(producer[k]) for k in ("name", "version") if k in producer)
    if producer:
        notes["producer"] = str(producer)
    ours = block.get(OUR_NOTES, {})
    _must_be(ours, Mapping, f"{where}: {OUR_NOTES}")
    return {**notes, **ours}


def _must_be(value: object, kind: type, where: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{where} must be a JSON object, not {type(value).__name__}")


def to_block(curve: Curve, targets: tuple[str, ...] = ("Attention",)) -> dict:
    """`curve` as a `sparse_attention_config`, its ignored layers under Diffusers' names too."""
    ignore = [name for layer in curve.ignore for name in (layer, *names_elsewhere(layer))]
    group = {
        "algorithm": ALGORITHMS[0],
        "targets": list(targets),
        "threshold_scale_factor": {
            "formula": FORMULA,
            "coefficients": {"a": curve.a, "b": curve.b},
        },
    }
    if ignore:
        group["ignore"] = list(dict.fromkeys(ignore))
    return {
        "config_groups": {"group_0": group},
        "producer": {"name": "trtllm-attention"},
        OUR_NOTES: curve.notes,
    }


def write(path: str | os.PathLike, block: Mapping) -> None:
    """Write `block` into the JSON file at `path`, keeping what else an existing file holds.

    The file is replaced as a whole: a run that dies here leaves the old one.
    """
    path = Path(path)
    config = dict(load_json(path)) if path.exists() else {}
    config[BLOCK] = block
    text = json.dumps(config, indent=2, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
