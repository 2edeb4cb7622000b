"""The written forms of an attention configuration: flags, pasted commands, variables, JSON text.

Everything ends up in one `Written`: a tree with the shape of the JSON, and the settings that only
exist outside it. What the tree means is `config`'s business.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .specs import nearest

CONFIG_FLAG = "--diffusion-attention-config"
BACKEND_FLAG = "--diffusion-attention-backend"
BACKEND_VARIABLE = "DIFFUSION_ATTENTION_BACKEND"

# The older trtllm-gen spelling: flag, variable, and the key of the JSON it stands for.
LEGACY = {
    "--trtllm-gen-sage": ("TRTLLM_GEN_SAGE", "sage"),
    "--trtllm-gen-target-sparsity": ("TRTLLM_GEN_TARGET_SPARSITY", "target_sparsity"),
    "--trtllm-gen-disabled-until-timestep": (
        "TRTLLM_GEN_DISABLED_UNTIL_TIMESTEP",
        "disabled_until_timestep",
    ),
}
VARIABLES = (BACKEND_VARIABLE, *(variable for variable, _ in LEGACY.values()))
# Sequence parallelism: no meaning on one GPU, but two combinations are documented errors.
DEGREES = ("--usp", "--ring", "--allgather-degree")
FLAGS = (CONFIG_FLAG, BACKEND_FLAG, *LEGACY, *DEGREES)
COMMANDS = ("vllm", "vllm-omni", "python", "python3", "export", "set", "env")

SPEC_KEYS = ("backend", "quant", "skip_softmax")
BLOCKS = ("quant", "skip_softmax")


@dataclass
class Written:
    """What was written. tree: the JSON's shape; backend: the global shorthand, as written."""

    tree: dict = field(default_factory=dict)
    backend: str | None = None
    legacy: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    degrees: dict[str, int] = field(default_factory=dict)


def read_json(text: str, origin: str) -> dict:
    """The JSON object in `text`; ValueError says where it goes wrong and names `origin`."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        hint = "" if '"' in text else " (in a shell, JSON belongs in single quotes)"
        near = text[max(0, error.pos - 20) : error.pos + 20].replace("\n", " ")
        raise ValueError(
            f"{origin} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
            f", near {near!r}{hint}"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"{origin} must be a JSON object, not {type(value).__name__}")
    return value


def read_text(text: str) -> Written:
    """JSON, flags, or a command line pasted from a shell, whichever `text` is."""
    text = text.strip().removeprefix("\ufeff")
    if text.startswith(("{", "[")) or text in ("null", "true", "false"):
        return Written(tree=read_json(text, "attention_config"))
    # a shell joins lines at a backslash; copied documentation may have a comment behind it
    joined = re.sub(r"\\[ \t]*(#[^\n]*)?(\r?\n|$)", " ", text)
    try:
        tokens = shlex.split(joined, comments=True)
    except ValueError as error:
        raise ValueError(
            f"the attention settings cannot be split like a shell does: {error}"
        ) from None
    if len(tokens) == 1 and tokens[0].startswith("{"):
        return Written(tree=read_json(tokens[0], "attention_config"))
    return read_flags(tokens)


def read_flags(tokens: Iterable[str]) -> Written:
    """Flags, with or without the command they belong to; a command's other flags are ignored."""
    written = Written()
    tokens = [token for token in tokens if token != "$"]
    has_command = False
    rest = iter(range(len(tokens)))
    for index in rest:
        token = tokens[index]
        variable, is_assignment, value = token.partition("=")
        if is_assignment and variable in VARIABLES:
            _once(written.variables, variable, value)
            has_command = True
        elif token.startswith("--"):
            if _read_flag(written, tokens, index, has_command):
                next(rest, None)
        elif token.rpartition("/")[2] in COMMANDS:
            has_command = True
        elif not has_command:
            raise ValueError(
                f"{token!r} is neither JSON nor a flag{nearest(token, FLAGS)} (a backend is set by "
                f"{BACKEND_FLAG} NAME)"
            )
    return written


def written_by_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of `environment`'s entries that are ours; an empty one counts as not set."""
    return {name: environment[name] for name in VARIABLES if environment.get(name)}


def _read_flag(written: Written, tokens: list[str], index: int, has_command: bool) -> bool:
    """Take the flag at `index` into `written`; whether it used the next token as its value."""
    name, has_value, value = tokens[index].partition("=")
    head, _, path = name.partition(".")
    head = "--" + head[2:].replace("_", "-")
    if head not in FLAGS:
        _refuse_unknown(head, has_command)
        return False
    takes_next = not has_value
    if head == "--trtllm-gen-sage" and takes_next:
        value, takes_next = "1", False
    if takes_next:
        if index + 1 >= len(tokens) or tokens[index + 1].startswith("--"):
            raise ValueError(f"{name} needs a value")
        value = tokens[index + 1]
    if path and head != CONFIG_FLAG:
        raise ValueError(f"{name}: only {CONFIG_FLAG} takes a dotted path")
    if head == CONFIG_FLAG:
        tree = _at_path(name, path, value) if path else read_json(value, CONFIG_FLAG)
        _merge(written.tree, tree, "attention_config")
    elif head == BACKEND_FLAG:
        if written.backend is not None:
            raise ValueError(f"{BACKEND_FLAG} is given twice: {written.backend!r} and {value!r}")
        written.backend = value
    elif head in LEGACY:
        _once(written.legacy, head, value)
    else:
        if not value.isdigit() or int(value) < 1:
            raise ValueError(f"{head}={value!r} must be a whole number, at least 1")
        _once(written.degrees, head, int(value))
    return takes_next


def _refuse_unknown(flag: str, has_command: bool) -> None:
    """Raise for a flag that is, or was meant to be, one of ours."""
    ours = flag.startswith(("--diffusion-attention", "--trtllm-gen"))
    close = difflib.get_close_matches(flag, FLAGS[: -len(DEGREES)], n=1, cutoff=0.85)
    if ours or close or not has_command:
        known = ", ".join(FLAGS)
        raise ValueError(f"unknown flag {flag!r} (known: {known}){nearest(flag, FLAGS)}")


def _at_path(flag: str, path: str, value: str) -> dict:
    """The tree in which the dotted `path` holds `value`. A role's name may hold dots itself."""
    parts = path.split(".")
    top = parts[0].replace("-", "_")
    if top not in ("default", "per_role"):
        raise ValueError(f"{flag}: no key {parts[0]!r}{nearest(parts[0], ('default', 'per_role'))}")
    role, keys = _split_role(parts[1:])
    if not keys and not value.startswith("{"):
        wrong = parts[-1]
        raise ValueError(
            f"{flag}={value!r}: the path must end in a key (backend, quant.… or skip_softmax.…) or "
            f"the value be a JSON object{nearest(wrong, SPEC_KEYS)}"
        )
    if keys == ["backend"]:
        tree: object = value
    else:
        tree = read_json(value, flag) if value.startswith("{") else _scalar(value)
    if top == "default":
        if role:
            raise ValueError(f"{flag}: no key {role!r} in default{nearest(role, SPEC_KEYS)}")
        keys = [top, *keys]
    elif role:
        keys = [top, role, *keys]
    elif keys:
        raise ValueError(f"{flag}: a role is missing after per_role")
    else:
        keys = [top]
    for key in reversed(keys):
        tree = {key: tree}
    return tree


def _split_role(parts: list[str]) -> tuple[str, list[str]]:
    """(role, keys below it), read from the right because a role may hold dots."""
    if len(parts) >= 2 and parts[-2] in BLOCKS:
        return ".".join(parts[:-2]), parts[-2:]
    if parts and parts[-1] in SPEC_KEYS:
        return ".".join(parts[:-1]), parts[-1:]
    return ".".join(parts), []


def _scalar(text: str) -> object:
    """A number, null, true or false as JSON reads it; anything else is a string."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _merge(into: dict, tree: Mapping, path: str) -> None:
    for key, value in tree.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value, f"{path}.{key}")
        elif key in into:
            raise ValueError(f"{path}.{key} is given twice: {into[key]!r} and {value!r}")
        else:
            into[key] = value


def _once(into: dict, name: str, value) -> None:
    if name in into:
        raise ValueError(f"{name} is given twice: {into[name]!r} and {value!r}")
    into[name] = value


def _unique(pairs: list[tuple[str, object]]) -> dict:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the JSON holds the key {key!r} twice: {result[key]!r} and {value!r}")
        result[key] = value
    return result
