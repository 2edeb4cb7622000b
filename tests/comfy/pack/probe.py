"""Which attention calls reach ComfyUI's own functions: an override that records and passes on.

Placed anywhere between loader and sampler, it is the override that a per-layer override chains to,
so it sees exactly the calls that the pack under test did not compute itself.
"""

from collections import defaultdict

import torch
from comfy_api.latest import io

CALLS = defaultdict(list)  # tag -> calls since the last TestProbeReport


def describe(function, args, keywords):
    """A call as JSON: shapes, dtype, mask and what the caller said about itself."""
    query, key = args[0], args[1]
    mask = keywords.get("mask")
    options = keywords.get("transformer_options") or {}
    sigmas = options.get("sigmas")
    return {
        "function": function.__name__,
        "query": list(query.shape),
        "key": list(key.shape),
        "dtype": str(query.dtype).removeprefix("torch."),
        "heads": keywords.get("heads", args[3] if len(args) > 3 else None),
        "mask": None if mask is None else list(mask.shape),
        "sigma": None if sigmas is None else float(sigmas.flatten()[0]),
        "block": [options.get("block_type"), options.get("block_index")],
        "keywords": sorted(keywords),
    }


class TestProbe(io.ComfyNode):
    """Records the calls of a model under a tag; TestProbeReport returns them."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TestProbe",
            category="testing",
            inputs=[io.Model.Input("model"), io.String.Input("tag", default="probe")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, tag):
        model = model.clone()
        options = model.model_options["transformer_options"]
        previous = options.get("optimized_attention_override")

        @torch.compiler.disable
        def probe(function, *args, **keywords):
            CALLS[tag].append(describe(function, args, keywords))
            if previous is None:
                return function(*args, **keywords)
            return previous(function, *args, **keywords)

        options["optimized_attention_override"] = probe
        return io.NodeOutput(model)


class TestProbeReport(io.ComfyNode):
    """Passes samples through, after the sampler, and gives the recorded calls as ui output "calls"."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TestProbeReport",
            category="testing",
            is_output_node=True,
            not_idempotent=True,  # reads what other nodes recorded: never from the cache
            inputs=[io.Latent.Input("samples"), io.String.Input("tag", default="probe")],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, samples, tag):
        return io.NodeOutput(samples, ui={"calls": CALLS.pop(tag, [])})
