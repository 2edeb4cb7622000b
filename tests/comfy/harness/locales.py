"""The English texts of the nodes, as ComfyUI's frontend looks them up: taken from the schemas."""

import re


SYNTAX = re.compile(r"[@{}|]")  # of the frontend's messages: "a | b" is a singular and a plural there


def node_defs(object_info) -> dict:
    """What locales/en/nodeDefs.json must hold for the pack's nodes of a server's object_info."""
    return {name: _escaped(_node(info)) for name, info in sorted(object_info.items()) if name.startswith("TRTLLM")}


def _escaped(value):
    if isinstance(value, dict):
        return {key: _escaped(inner) for key, inner in value.items()}
    return SYNTAX.sub(lambda match: "{'" + match[0] + "'}", value)


def _node(info):
    inputs = {}
    for name, kind in {**(info["input"].get("required") or {}), **(info["input"].get("optional") or {})}.items():
        options = kind[1] if len(kind) > 1 else {}
        inputs[name] = {"name": options.get("display_name") or name, "tooltip": options.get("tooltip") or ""}
    tooltips = info.get("output_tooltips") or []
    outputs = {}
    for index, name in enumerate(info["output_name"]):
        outputs[str(index)] = {"name": name}
        if index < len(tooltips) and tooltips[index]:
            outputs[str(index)]["tooltip"] = tooltips[index]
    return {
        "display_name": info["display_name"],
        "description": info["description"],
        "inputs": inputs,
        "outputs": outputs,
    }
