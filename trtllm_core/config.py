"""vLLM-Omni's attention configuration: which spec each role gets, read and written.

    AttentionConfig.parse('{"default": {"backend": "FLASH_ATTN"}}')
    AttentionConfig.parse({"per_role": {"cross": {"backend": "TORCH_SDPA"}}})
    AttentionConfig.parse(["--diffusion-attention-backend", "SAGE_ATTN"])
    AttentionConfig.parse("vllm serve MODEL --omni --diffusion-attention-config '{...}'")

Priority, as there: --diffusion-attention-config, then --diffusion-attention-backend, then the
variable DIFFUSION_ATTENTION_BACKEND, then the platform's default.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from .config_flags import (
    BACKEND_FLAG,
    BACKEND_VARIABLE,
    CONFIG_FLAG,
    LEGACY,
    SPEC_KEYS,
    Written,
    read_flags,
    read_text,
    written_by_variables,
)
from .specs import AttentionSpec, AttnQuantSpec, SkipSoftmaxSpec, nearest

log = logging.getLogger("trtllm_attention")

PLATFORM_DEFAULT = "platform default"
CATEGORIES = ("self", "cross")
LEGACY_BACKEND = "trtllm-gen"


@dataclass(frozen=True)
class AttentionConfig:
    """The specs of a model's attention roles.

    default: for every role without its own; None, or a spec that asks nothing, is the platform's.
    per_role: role or category -> the whole spec of that role; nothing is inherited from default.
    """

    default: AttentionSpec | None = None
    per_role: Mapping[str, AttentionSpec] = field(default_factory=dict, hash=False)

    def __post_init__(self):
        object.__setattr__(self, "per_role", dict(self.per_role))
        if self.default == AttentionSpec():
            object.__setattr__(self, "default", None)
        for name, spec in (("default", self.default), *self.per_role.items()):
            if spec is not None and not isinstance(spec, AttentionSpec):
                raise ValueError(f"{name} must be an AttentionSpec, not {type(spec).__name__}")
        for role in self.per_role:
            _check_role(role)

    @classmethod
    def parse(
        cls,
        source: str | Mapping | Sequence[str] | AttentionConfig | None,
        environment: Mapping[str, str] | None = None,
    ) -> AttentionConfig:
        """Read JSON text, a mapping of the same shape, a list of flags, or a pasted command.

        environment: variables that count (see `environment`), lowest in priority; None for none.
        Raises ValueError naming the key, the value and what is allowed.
        """
        if isinstance(source, AttentionConfig):
            written = Written(tree=json.loads(source.to_json()))
        elif source is None:
            written = Written()
        elif isinstance(source, str):
            written = read_text(source)
        elif isinstance(source, Mapping):
            written = Written(tree=dict(source))
        elif isinstance(source, Sequence):
            written = read_flags(source)
        else:
            raise ValueError(f"cannot read an attention config from {type(source).__name__}")
        variables = {**written_by_variables(environment or {}), **written.variables}
        return _config(written, variables)

    def resolve(self, role: str, category: str | None = None) -> tuple[AttentionSpec | None, str]:
        """The spec of `role` and the setting it comes from: exact, category, default, platform."""
        for name in (role, category):
            if name in self.per_role:
                return self.per_role[name], f"attention_config.per_role.{name}"
        if self.default is not None:
            return self.default, "attention_config.default"
        return None, PLATFORM_DEFAULT

    def to_json(self, indent: int | None = None) -> str:
        """The JSON that `parse` reads back to an equal config, and vLLM-Omni reads too."""
        tree: dict[str, object] = {}
        if self.default is not None:
            tree["default"] = _spec_tree(self.default)
        if self.per_role:
            tree["per_role"] = {role: _spec_tree(spec) for role, spec in self.per_role.items()}
        return json.dumps(tree, indent=indent)


def environment() -> dict[str, str]:
    """The process's own attention variables, for `AttentionConfig.parse(..., environment())`."""
    return written_by_variables(os.environ)


def _config(written: Written, variables: Mapping[str, str]) -> AttentionConfig:
    tree = _object(written.tree, "attention_config", ("default", "per_role"))
    default = _object(tree.get("default"), "attention_config.default", SPEC_KEYS)
    backend = default.get("backend")
    if written.backend is not None:
        if backend is not None:
            raise ValueError(
                f"{BACKEND_FLAG} {written.backend} and {CONFIG_FLAG}.default.backend {backend} set "
                "the same thing: remove one"
            )
        backend = written.backend
    if backend is None:
        backend = variables.get(BACKEND_VARIABLE)
    default = _with_legacy({**default, "backend": backend}, written, variables)
    per_role = _object(tree.get("per_role"), "attention_config.per_role", None)
    config = AttentionConfig(
        default=_spec(default, "attention_config.default"),
        per_role={
            role: _spec(spec, f"attention_config.per_role.{role}")
            for role, spec in per_role.items()
            if _check_role(role)
        },
    )
    _check_degrees(written.degrees, config)
    return config


def _with_legacy(default: dict, written: Written, variables: Mapping[str, str]) -> dict:
    """`default` with the older trtllm-gen spelling translated, which is said in one line.

    A flag that contradicts another setting is an error; a variable gives way, and that is said.
    """
    backend = default["backend"]
    given = {}
    for flag, (variable, key) in LEGACY.items():
        block = "quant" if key == "sage" else "skip_softmax"
        if flag in written.legacy:
            _refuse_legacy(flag, block, default)
            given[key] = (flag, written.legacy[flag])
        elif variable in variables:
            if backend in (LEGACY_BACKEND, "TRTLLM_ATTN") and default.get(block) is None:
                given[key] = (variable, variables[variable])
            else:
                log.warning("%s is ignored: other settings take precedence", variable)
    if not given and backend != LEGACY_BACKEND:
        return default
    default = {**default, "backend": "TRTLLM_ATTN"}
    if "sage" in given and _boolean(*given["sage"]):
        default["quant"] = {"dtype_qk": "fp8_e4m3"}
    skip = {key: _float(*given[key]) for key in given if key != "sage"}
    if "target_sparsity" in skip:
        default["skip_softmax"] = skip
    elif skip:
        log.warning(
            "%s has no effect without a target sparsity", given["disabled_until_timestep"][0]
        )
    new_form = json.dumps({"default": {k: v for k, v in default.items() if v is not None}})
    log.warning(
        "trtllm-gen is an older spelling; the same settings now: %s '%s'", CONFIG_FLAG, new_form
    )
    return default


def _refuse_legacy(flag: str, block: str, default: Mapping) -> None:
    backend = default["backend"]
    if backend not in (LEGACY_BACKEND, "TRTLLM_ATTN"):
        raise ValueError(
            f"{flag} belongs to the backend {LEGACY_BACKEND!r} (now TRTLLM_ATTN), and the backend "
            f"is {backend!r}"
        )
    if default.get(block) is not None:
        raise ValueError(f"{flag} and {CONFIG_FLAG}.default.{block} set the same thing: remove one")


def _boolean(name: str, text: str) -> bool:
    values = {"1": True, "true": True, "on": True, "yes": True}
    values |= {"0": False, "false": False, "off": False, "no": False}
    if text.lower() not in values:
        raise ValueError(f"{name}={text!r} must be 1 or 0")
    return values[text.lower()]


def _float(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} must be a number in [0, 1]") from None


def _check_degrees(degrees: Mapping[str, int], config: AttentionConfig) -> None:
    """vLLM-Omni's own rules for sequence parallelism; nothing of it exists on one GPU."""
    specs = [spec for spec in (config.default, *config.per_role.values()) if spec is not None]
    if degrees.get("--ring", 1) > 1 and any(spec.skip_softmax for spec in specs):
        raise ValueError(
            f"--ring {degrees['--ring']} bypasses the attention backend and cannot be combined "
            "with skip_softmax (use --ring 1)"
        )
    gather = degrees.get("--allgather-degree", 1)
    if gather > 1 and any(spec.backend == "TRTLLM_ATTN" for spec in specs):
        raise ValueError(
            f"--allgather-degree {gather} cannot be combined with TRTLLM_ATTN "
            "(use --allgather-degree 1)"
        )


def _check_role(role: object) -> bool:
    """Role names with a dot are a model's own; without one only the categories exist."""
    if not isinstance(role, str) or not role.strip("."):
        raise ValueError(f"attention_config.per_role: {role!r} is not a role name")
    if "." not in role and role not in CATEGORIES:
        raise ValueError(
            f"attention_config.per_role has no role category {role!r}{nearest(role, CATEGORIES)} "
            "(categories: self, cross; a model's own roles hold a dot, like wan.image_cross)"
        )
    return True


def _object(value: object, path: str, known: Sequence[str] | None) -> dict:
    """`value` as a dict with none but `known` keys; None is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        example = '{"backend": "TORCH_SDPA"}' if known == SPEC_KEYS else "{…}"
        raise ValueError(f"{path}={value!r} must be an object such as {example}")
    for key in value:
        if known is not None and key not in known:
            raise ValueError(
                f"{path} has no key {key!r} (known: {', '.join(known)}){nearest(key, known)}"
            )
    return dict(value)


def _spec(value: object, path: str) -> AttentionSpec:
    if isinstance(value, AttentionSpec):
        return value
    tree = _object(value, path, SPEC_KEYS)
    backend = tree.get("backend")
    if isinstance(backend, str) and backend.lower() == "auto":
        backend = None
    if backend == LEGACY_BACKEND:
        backend = "TRTLLM_ATTN"
        log.warning("%s.backend: trtllm-gen is an older spelling of TRTLLM_ATTN", path)
    quant = _block(AttnQuantSpec, tree.get("quant"), path, "quant")
    skip_softmax = _block(SkipSoftmaxSpec, tree.get("skip_softmax"), path, "skip_softmax")
    try:
        return AttentionSpec(backend, quant, skip_softmax)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _block(kind: type, value: object, path: str, key: str):
    if value is None or isinstance(value, kind):
        return value
    tree = _object(value, f"{path}.{key}", tuple(f.name for f in fields(kind)))
    try:
        return kind(**{name: given for name, given in tree.items() if given is not None})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _spec_tree(spec: AttentionSpec) -> dict:
    tree: dict[str, object] = {"backend": spec.backend or "auto"}
    for key in ("quant", "skip_softmax"):
        block = getattr(spec, key)
        if block is not None:
            values = {f.name: getattr(block, f.name) for f in fields(block)}
            tree[key] = {name: value for name, value in values.items() if value is not None}
    return tree
