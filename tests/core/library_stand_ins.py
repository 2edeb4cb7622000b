"""Stand-ins for the attention libraries, and the float64 attention that judges what comes back.

They have the real functions' signatures (flash-attn 2.8, fa3-fwd 0.0.3, flash-attn-4 4.0.0b18,
sageattention 1.0.6 and 2.2, sageattn3, kernels 0.14) and their quirks: a keyword that does not
exist is a TypeError, a mask is swallowed, K is changed in place.
"""

import math
import sys
import types

import torch


def exact(query, key, value, scale, lengths=None, mask=None):
    """float64 attention over [B, L, H, D], key by key; rows without keys are zero."""
    q, k, v = (x.double().transpose(1, 2) for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if mask is not None:
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        else:
            scores = scores + mask.double()
    if lengths is not None:
        hidden = torch.arange(k.shape[2]) >= lengths[:, None, None, None]
        scores = scores.masked_fill(hidden, -math.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return ((weights / weights.sum(-1, keepdim=True)) @ v).transpose(1, 2)


def tensors(
    batch=2, query_length=9, key_length=13, heads=4, key_heads=4, dim=64, dtype=torch.bfloat16
):
    torch.manual_seed(0)
    query = torch.randn(batch, query_length, heads, dim)
    key, value = (torch.randn(batch, key_length, key_heads, dim) for _ in range(2))
    return tuple(x.to(dtype) for x in (query, key, value))


def close(actual, expected, dtype):
    """Within three times what rounding the exact result to `dtype` costs, at its worst element."""
    rounding = (expected.to(dtype).double() - expected).abs().max().item()
    assert (actual.double() - expected).abs().max().item() <= 3 * rounding + 1e-6


class Library:
    """Stand-ins put where the backends import from, and a record of what was called with what."""

    def __init__(self, monkeypatch):
        self.calls = []
        self._monkeypatch = monkeypatch

    def install(self, module, **names):
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules or end == len(parts):
                self._monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
        for name, value in names.items():
            setattr(sys.modules[module], name, value)

    def flash_attn_2(self):
        def flash_attn_func(
            q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
            softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
        ):  # fmt: skip
            self.calls.append("FA2")
            return exact(q, k, v, softmax_scale).to(q.dtype)

        self.install(
            "flash_attn.flash_attn_interface",
            flash_attn_func=flash_attn_func,
            flash_attn_with_kvcache=self.cached("FA2 cached"),
        )

    def cached(self, name):
        def flash_attn_with_kvcache(
            q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None,
            cache_seqlens=None, softmax_scale=None, causal=False, num_splits=0,
        ):  # fmt: skip
            assert k_cache.stride(-1) == 1 and v_cache.stride(-1) == 1
            assert cache_seqlens.dtype == torch.int32
            self.calls.append(name)
            return exact(q, k_cache, v_cache, softmax_scale, cache_seqlens).to(q.dtype)

        return flash_attn_with_kvcache

    def flash_attn_3(self, module):
        def flash_attn_func(
            q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
            v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
        ):  # fmt: skip
            self.calls.append(module)
            lse = torch.zeros(q.shape[0], q.shape[2], q.shape[1])
            return exact(q, k, v, softmax_scale).to(q.dtype), lse  # as its first releases did

        self.install(
            module,
            flash_attn_func=flash_attn_func,
            flash_attn_with_kvcache=self.cached(f"{module} cached"),
        )

    def flash_attn_4(self):
        def flash_attn_func(q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None):
            self.calls.append("FA4")
            return exact(q, k, v, softmax_scale).to(q.dtype), None

        def flash_attn_varlen_func(
            q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
            max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None,
            softmax_scale=None,
        ):  # fmt: skip
            self.calls.append("FA4 ragged")
            return exact(q, k, v, softmax_scale, seqused_k).to(q.dtype), None

        self.install(
            "flash_attn.cute",
            flash_attn_func=flash_attn_func,
            flash_attn_varlen_func=flash_attn_varlen_func,
        )

    def sage(self, version, **built):
        def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, **kwargs):
            assert tensor_layout == "NHD" and not kwargs and not is_causal
            assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
            self.calls.append(f"sage {version}")
            out = exact(q, k, v, sm_scale).to(q.dtype)
            if version.startswith("1"):
                k -= k.mean(dim=1, keepdim=True)
            return out

        self.install("sageattention", sageattn=sageattn)
        self.install("sageattention.core", **built)
        sys.modules["sageattention"].sageattn = sageattn

    def sage_3(self):
        def sageattn3_blackwell(
            q, k, v, attn_mask=None, is_causal=False, per_block_mean=True, **kwargs
        ):
            assert attn_mask is None and not kwargs
            self.calls.append("sage 3")
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = exact(q, k, v, q.shape[-1] ** -0.5).to(q.dtype).transpose(1, 2)
            k -= k.mean(dim=1, keepdim=True)
            return out

        self.install("sageattn3", sageattn3_blackwell=sageattn3_blackwell)

    def hub(self):
        def get_kernel(repo_id, revision=None, version=None, backend=None):
            self.calls.append((repo_id, version))
            self.flash_attn_3("hub_kernel")
            return sys.modules["hub_kernel"]

        self.install("kernels", get_kernel=get_kernel)
