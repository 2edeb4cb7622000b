"""What importing the pack does to its host: nothing."""

import os
import subprocess
import sys

from harness import location

SNAPSHOT = """
import asyncio, sys
sys.path.insert(0, {harness!r})
from harness import pack_import
pack_import.enable_comfyui()
import comfy.cli_args, comfy.samplers, comfy.sd, comfy.model_patcher, comfy.ldm.wan.model
import comfy.ldm.hunyuan_video.model, comfy_api.latest, logging, torch

def snapshot():
    modules = {{n: m for n, m in sys.modules.items() if n.split(".")[0] in ("comfy", "comfy_api", "comfy_execution")}}
    found = {{(n, a): id(v) for n, m in modules.items() for a, v in vars(m).items()}}
    for name, module in modules.items():
        for cls in [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == name]:
            found.update({{(name, cls.__name__, a): id(v) for a, v in vars(cls).items() if not a.startswith("__")}})
    found["args"] = repr(sorted(vars(comfy.cli_args.args).items(), key=str))
    found["torch"] = (torch.get_default_dtype(), torch.backends.cuda.flash_sdp_enabled(), torch.is_grad_enabled())
    found["log"] = (logging.getLogger().level, len(logging.getLogger().handlers))
    found["path"] = list(sys.path)
    return found

before = snapshot()
loaded = set(sys.modules)
extension = asyncio.run(pack_import.import_pack().comfy_entrypoint())
nodes = asyncio.run(extension.get_node_list())
for node in nodes:
    node.define_schema()
after = snapshot()
changed = [key for key in before if after.get(key) != before[key]]
assert not changed, changed
heavy = [m for m in ("triton", "flashinfer", "sageattention", "matplotlib") if m in sys.modules and m not in loaded]
print("NODES", len(nodes), "HEAVY", heavy)
"""


def test_case_02_importing_the_pack_changes_nothing(comfy_server):
    code = SNAPSHOT.format(harness=str(location.ROOT / "tests" / "comfy"))
    environment = {**os.environ, "COMFYUI_PATH": str(location.comfyui_path())}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [location.comfyui_python(), "-c", code], capture_output=True, text=True, cwd=location.comfyui_path(), env=environment
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "NODES" in done.stdout and "HEAVY []" in done.stdout, done.stdout


def test_the_pack_imports_without_comfyui():
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("odd name", {str(location.ROOT / "__init__.py")!r},
    submodule_search_locations=[{str(location.ROOT)!r}])
module = importlib.util.module_from_spec(spec)
sys.modules["odd name"] = module
spec.loader.exec_module(module)
assert "torch" not in sys.modules and module.WEB_DIRECTORY
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_core_never_imports_comfyui():
    core = location.ROOT / "trtllm_core"
    for file in core.rglob("*.py"):
        for line in file.read_text().splitlines():
            words = line.split()
            assert words[:1] not in (["import"], ["from"]) or not words[1].split(".")[0].startswith("comfy"), (file, line)


def test_every_node_is_listed_with_its_id_and_tooltips(comfy_server):
    ids = {name for name in comfy_server.object_info if name.startswith("TRTLLM")}
    assert ids >= {
        "TRTLLMAttentionPatch", "TRTLLMSkipSoftmax", "TRTLLMSageQuant", "TRTLLMTimestepGate",
        "TRTLLMLayerIgnoreList", "TRTLLMAttentionRole", "TRTLLMAttentionConfig",
    }  # fmt: skip
    for name in ids:
        info = comfy_server.object_info[name]
        assert info["category"] == "TRTLLM Attention" and info["description"]
        for group in ("required", "optional"):
            for key, value in info["input"].get(group, {}).items():
                assert value[1].get("tooltip"), f"{name}.{key} has no tooltip"
