"""TRTLLM Attention: attention backends, SAGE quantization and Skip-Softmax for ComfyUI's video models.

ComfyUI calls `comfy_entrypoint`. Importing this package imports nothing else, so that it never
breaks, or slows, a ComfyUI that does not use it.
"""

WEB_DIRECTORY = "./web"  # js/ is loaded by the frontend, docs/ are the help pages


async def comfy_entrypoint():
    """The extension with every node, as ComfyUI's V3 interface asks for it."""
    import logging

    try:
        from .nodes.extension import TRTLLMAttentionExtension
    except Exception:
        # ComfyUI prints one line without the cause: print it whole
        logging.getLogger("trtllm_attention").exception("TRTLLM Attention cannot be loaded")
        raise
    return TRTLLMAttentionExtension()


__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
