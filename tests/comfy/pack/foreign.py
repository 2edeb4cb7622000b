"""Patches as other packs make them, to see that ours lives beside them."""

import torch
from comfy_api.latest import io

COUNTS = {}


class TestForeignOverride(io.ComfyNode):
    """An attention override that doubles nothing and counts: what other packs install.

    keyword: a keyword argument to add to every call, as a later ComfyUI might.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TestForeignOverride",
            category="testing",
            inputs=[io.Model.Input("model"), io.String.Input("tag"), io.String.Input("keyword", default="")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, tag, keyword=""):
        model = model.clone()
        COUNTS[tag] = 0

        @torch.compiler.disable
        def override(function, *args, **keywords):
            COUNTS[tag] += 1
            return function(*args, **keywords)

        model.model_options["transformer_options"]["optimized_attention_override"] = override
        if keyword:
            _add_keyword(model, keyword)
        return io.NodeOutput(model)


def _add_keyword(model, keyword):
    """Every Wan attention module calls attention with one keyword more, while this model samples."""
    import comfy.ldm.wan.model as wan
    from comfy.patcher_extension import WrappersMP

    def outer_sample(executor, *args, **keywords):
        stock = wan.optimized_attention

        def with_keyword(*call_args, **call_keywords):
            call_keywords[keyword] = None
            return stock(*call_args, **call_keywords)

        wan.optimized_attention = with_keyword
        try:
            return executor(*args, **keywords)
        finally:
            wan.optimized_attention = stock

    model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "test_foreign_keyword", outer_sample)


class TestForeignReport(io.ComfyNode):
    """How often each foreign override was called."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TestForeignReport",
            category="testing",
            is_output_node=True,
            not_idempotent=True,
            inputs=[io.Latent.Input("samples"), io.String.Input("tag")],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, samples, tag):
        return io.NodeOutput(samples, ui={"count": [COUNTS.pop(tag, 0)]})


def module_forward(network, name):
    return network.get_submodule(name).__dict__["forward"]


class TestForwards(io.ComfyNode):
    """Which modules have a forward of their own, i.e. are patched, once the samples are there."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TestForwards",
            category="testing",
            is_output_node=True,
            not_idempotent=True,
            inputs=[io.Model.Input("model"), io.Latent.Input("samples")],
            outputs=[],
        )

    @classmethod
    def execute(cls, model, samples):
        network = model.model.diffusion_model
        patched = [name for name, module in network.named_modules() if "forward" in module.__dict__]
        kept = [name for name in patched if hasattr(module_forward(network, name), "trtllm_original")]
        return io.NodeOutput(ui={"patched": kept})


class TestForeignForward(io.ComfyNode):
    """Replaces every attention module's forward, as packs with model code of their own do."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TestForeignForward",
            category="testing",
            inputs=[io.Model.Input("model")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model):
        model = model.clone()
        network = model.get_model_object("diffusion_model")
        for name, module in network.named_modules():
            if name.endswith(("self_attn", "cross_attn")):
                project = module.o
                model.add_object_patch(
                    f"diffusion_model.{name}.forward", lambda x, *args, project=project, **keywords: project(x)
                )
        return io.NodeOutput(model)
