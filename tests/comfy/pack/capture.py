"""A model's own self-attention inputs, written to a file."""

from pathlib import Path

import folder_paths
import torch
from comfy.patcher_extension import WrappersMP
from comfy_api.latest import io
from safetensors.torch import save_file


class TestCaptureAttention(io.ComfyNode):
    """Saves q, k and v of every self-attention call at the scheduled sigmas nearest to the given ones.

    Writes output/NAME.safetensors with tensors "STEP.CALL.q" and so on, [tokens, heads, head_dim], of the last row of
    the batch, which is the prompt's where guidance batches both.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TestCaptureAttention",
            category="testing",
            inputs=[
                io.Model.Input("model"),
                io.String.Input("name"),
                io.String.Input("sigmas", default="0.95,0.8,0.5,0.2"),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, name, sigmas):
        model = model.clone()
        wanted = torch.tensor([float(s) for s in sigmas.split(",")])
        found = {}

        def override(function, *args, **keywords):
            options = keywords["transformer_options"]
            schedule = options["sample_sigmas"][:-1].cpu()
            step = int((schedule - options["sigmas"][0].cpu()).abs().argmin())
            chosen = {int((schedule - sigma).abs().argmin()) for sigma in wanted}
            if step in chosen and args[0].shape[1] == args[1].shape[1]:
                call = sum(key.startswith(f"{step}.") for key in found) // 3
                for letter, tensor in zip("qkv", args):
                    heads = keywords["heads"]
                    found[f"{step}.{call}.{letter}"] = tensor[-1].reshape(tensor.shape[1], heads, -1).cpu().clone()
            return function(*args, **keywords)

        def outer_sample(executor, *args, **keywords):
            found.clear()
            out = executor(*args, **keywords)
            save_file(found, Path(folder_paths.get_output_directory()) / f"{name}.safetensors")
            found.clear()
            return out

        model.model_options["transformer_options"]["optimized_attention_override"] = override
        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "test_capture", outer_sample)
        return io.NodeOutput(model)
