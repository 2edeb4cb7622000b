"""Is anything of a run alive after it? Weak references to the storages of a run, asked later."""

import gc

import torch
from comfy.patcher_extension import WrappersMP
from comfy_api.latest import io
from torch.multiprocessing.reductions import StorageWeakRef

WATCHED = []


def watch(tensor):
    """Hold a weak reference to the memory of a tensor: views and copies of the object do not hide it."""
    if isinstance(tensor, torch.Tensor):
        WATCHED.append(StorageWeakRef(tensor.untyped_storage()))


class TestWatchStorages(io.ComfyNode):
    """Watches the output of every Linear of the model (queries, keys, values among them) while it samples."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TestWatchStorages",
            category="testing",
            inputs=[io.Model.Input("model")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model):
        model = model.clone()
        network = model.get_model_object("diffusion_model")

        def outer_sample(executor, *args, **keywords):
            WATCHED.clear()
            linears = [module for module in network.modules() if isinstance(module, torch.nn.Linear)]
            hooks = [linear.register_forward_hook(lambda module, inputs, output: watch(output)) for linear in linears]
            try:
                return executor(*args, **keywords)
            finally:
                for hook in hooks:
                    hook.remove()

        model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "test_watch_storages", outer_sample)
        return io.NodeOutput(model)


class TestMemoryReport(io.ComfyNode):
    """In a prompt of its own, after the watched one: how many storages were watched, and how many live."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="TestMemoryReport",
            category="testing",
            is_output_node=True,
            not_idempotent=True,
            inputs=[],
            outputs=[],
        )

    @classmethod
    def execute(cls):
        gc.collect()
        alive = sum(not reference.expired() for reference in WATCHED)
        return io.NodeOutput(ui={"watched": [len(WATCHED)], "alive": [alive]})
