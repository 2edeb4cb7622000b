"""The pack in the real server, linked under a folder name that is no identifier."""

from harness.fixtures import PACK_FOLDER

NODES = {
    "TRTLLMAttentionPatch", "TRTLLMSageQuant", "TRTLLMSkipSoftmax", "TRTLLMTimestepGate", "TRTLLMLayerIgnoreList",
}  # fmt: skip


def test_nodes_are_listed(comfy_server):
    listed = {name for name in comfy_server.object_info if name.startswith("TRTLLM")}
    assert NODES <= listed
    assert {comfy_server.object_info[name]["category"] for name in listed} == {"TRTLLM Attention"}
    assert not [line for line in comfy_server.log().splitlines() if "IMPORT FAILED" in line and PACK_FOLDER in line]


def test_every_input_has_a_tooltip(comfy_server):
    bare = [
        f"{node}.{name}"
        for node, info in comfy_server.object_info.items()
        if node.startswith("TRTLLM")
        for group in ("required", "optional")
        for name, spec in info["input"].get(group, {}).items()
        if not (len(spec) > 1 and spec[1].get("tooltip"))
    ]
    assert not bare


def test_imported_in_process_it_leaves_comfyuis_own_nodes_alone(pack):
    import nodes

    assert pack.WEB_DIRECTORY and "KSampler" in nodes.NODE_CLASS_MAPPINGS
