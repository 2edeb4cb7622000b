"""The attention of other libraries, as far as they are installed, behind one signature for the benchmarks.

A peer is a name and a function of q, k, v [1, tokens, heads, 128] in bf16 to an output of q's shape. What a library
needs inside a call (quantization, a transposed view) is inside; FlashAttention-3 in FP8 alone gets its inputs
quantized beforehand, which flatters it. pip install fa3-fwd sageattention comfy-kitchen.
"""

import importlib
import importlib.metadata

import torch


def flash_attention_3():
    """flash_attn_func of FlashAttention-3 with its output alone, or None if it is not installed."""
    for module in ("flash_attn_interface", "fa3_fwd_interface"):
        try:
            function = importlib.import_module(module).flash_attn_func
        except ImportError:
            continue

        def run(query, key, value, **options):
            result = function(query, key, value, **options)
            return result[0] if isinstance(result, tuple) else result

        return run
    return None


def peers(query, key, value):
    """(name, function without arguments) of every installed peer on these tensors; FlashAttention-3 first."""
    run = flash_attention_3()
    if run is not None:
        yield "FlashAttention-3 bf16", lambda: run(query, key, value)
    heads_first = [tensor.transpose(1, 2) for tensor in (query, key, value)]

    def cudnn():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)

    yield "PyTorch, cuDNN", cudnn
    if run is not None:
        yield "FlashAttention-3 fp8, quantization not included", _flash_fp8(run, query, key, value)
    sage = _imported("sageattention")
    if sage is not None:
        version = importlib.metadata.version("sageattention")
        own_key = key.clone()  # version 1 subtracts K's mean in place
        yield f"SageAttention {version}", lambda: sage.sageattn(query, own_key, value, tensor_layout="NHD")
    kitchen = _imported("comfy_kitchen")
    if kitchen is not None:
        version = importlib.metadata.version("comfy-kitchen")
        int8 = importlib.import_module("comfy_kitchen.sage_attention").int8_attention
        yield f"comfy-kitchen {version} int8_attention", lambda: int8(*heads_first).transpose(1, 2)
        for tau in (0.5, 1.3):
            yield (
                f"comfy-kitchen {version} sol_attn, tau {tau}",
                lambda tau=tau: kitchen.sol_attn(query, key, value, tau=tau),
            )


def _imported(module):
    try:
        return importlib.import_module(module)
    except (ImportError, OSError):  # absent, or built for another torch or CUDA
        return None


def _flash_fp8(run, *tensors):
    """FlashAttention-3 on E4M3 tensors with one scale each."""
    steps = [tensor.abs().amax().float() / 448 for tensor in tensors]
    small = [(tensor / step).to(torch.float8_e4m3fn) for tensor, step in zip(tensors, steps)]
    heads = tensors[0].shape[2]
    scales = {f"{n}_descale": step.reshape(1, 1).expand(1, heads) for n, step in zip("qkv", steps)}
    return lambda: run(*small, **scales)
