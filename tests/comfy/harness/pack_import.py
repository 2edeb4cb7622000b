"""Import the pack in this process the way ComfyUI does: from its folder, under a name that is not the folder's."""

import importlib.util
import sys

from . import launch, location

PACK_NAME = "pack_under_test"


def enable_comfyui():
    """Make `import comfy...` and ComfyUI's own `import nodes` work here, on the CPU where there is no GPU."""
    root = str(location.comfyui_path())
    if sys.path[0] != root:
        # First, or `import nodes` would find the pack's folder of that name.
        sys.path.insert(0, root)
        launch.allow_torchvision_beside_cpu_torch()
    import comfy.cli_args
    import torch
    import utils.extra_config  # noqa: F401  as main.py does: nodes.py puts comfy/ first, which has a utils.py

    comfy.cli_args.args.cpu = not torch.cuda.is_available()


def import_pack(name=PACK_NAME):
    """The pack as a package called `name`; its parts are `sys.modules[name + ".nodes.hook"]` and so on.

    Imported once per name: two names are two separate copies of everything in the pack.
    """
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, location.ROOT / "__init__.py", submodule_search_locations=[str(location.ROOT)]
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
