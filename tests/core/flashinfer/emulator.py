"""The compiled modules under FlashInfer's Python, emulated from the raw arguments they are handed.

Nothing here knows the adapters or the reference: memory is read as the CUDA sources read it (query
and output by shape, the rest by what the launcher passes on), lengths from the cumulative sums,
scales from where the kernels look for them. Every output starts as NaN.
"""

import contextlib
import functools
import math
import sys
import types
from pathlib import Path
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

INT32 = torch.int32
WAITS = {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.__bool__}
DEVICES = {(9, 0): 1, (10, 0): 2, (10, 3): 3, (12, 0): 4}  # FlashInfer caches properties by index


class PretendCuda(TorchFunctionMode):
    """CPU tensors that say they are on a GPU. `waits` counts what would wait for it."""

    def __init__(self, capability):
        self.device = torch.device("cuda", DEVICES[capability])
        self.waits = 0
        super().__init__()

    def __torch_function__(self, func, kinds, args=(), kwargs=None):
        if func == torch.Tensor.device.__get__:
            return self.device
        if func == torch.Tensor.is_cuda.__get__:
            return True
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        self.waits += func in WAITS or func is torch.tensor
        return func(*(_on_cpu(a) for a in args), **kwargs)


def _on_cpu(value):
    is_cuda = isinstance(value, torch.device) and value.type == "cuda"
    return torch.device("cpu") if is_cuda else value


class Recipe:
    """What FlashInfer's gen_*_module functions return: here it is always built, of `module`."""

    is_compiled = True
    jit_library_path = Path("emulated.so")
    sources = ()

    def __init__(self, module):
        self.module = module

    def build_and_load(self):
        return self.module

    def get_library_path(self):  # up to 0.6.18
        return self.jit_library_path

    def get_library_paths(self):
        return (self.jit_library_path,)


@contextlib.contextmanager
def emulated(capability, missing=()):
    """FlashInfer on a GPU of `capability` whose compiled modules are the ones below.

    missing: (dtype, q block, k block) of SAGE kernels that are not there. Yields PretendCuda.
    """
    import flashinfer.prefill as prefill
    from flashinfer.quantization import packbits

    packing = sys.modules[packbits.__module__]  # the function hides its module

    properties = types.SimpleNamespace(
        major=capability[0], minor=capability[1], multi_processor_count=132, name="emulated"
    )
    trtllm = TrtllmGen(capability, set(missing))
    for cached in (prefill.get_trtllm_gen_fmha_module, prefill.get_trtllm_fmha_v2_module):
        cached.cache_clear()
    prefill.get_single_prefill_module.cache_clear()
    packing.get_quantization_module.cache_clear()
    patches = (
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: properties),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: capability),
        mock.patch.object(torch.version, "cuda", "13.0"),
        mock.patch.object(prefill, "gen_trtllm_gen_fmha_module", lambda: Recipe(trtllm)),
        mock.patch.object(prefill, "setup_cubin_loader", lambda path: None),
        mock.patch.object(prefill, "gen_fmha_v2_module", lambda *key: Recipe(FmhaV2(*key))),
        mock.patch.object(prefill, "gen_single_prefill_module", lambda *key: Recipe(Prefill(*key))),
        mock.patch.object(packing, "gen_quantization_module", lambda: Recipe(Packing())),
    )
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield stack.enter_context(PretendCuda(capability))


def compiled(function):
    """Mark the boundary to C++: nothing behind it is seen by PretendCuda."""

    @functools.wraps(function)
    def call(*args):
        with torch._C.DisableTorchFunction():
            return function(*args)

    return call


def by_shape(tensor):
    """`tensor`'s memory read with the strides its shape implies, as code does that is given no strides."""
    strides = [math.prod(tensor.shape[i + 1 :]) for i in range(tensor.ndim)]
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())


def integers(tensor, size):
    assert tensor.dtype == INT32 and tensor.shape == (size,), (tensor.dtype, tensor.shape)
    return tensor.tolist()


class TrtllmGen:
    """trtllm_fmha_kernel_launcher.cu and sageQuant.cu."""

    def __init__(self, capability, missing):
        self.capability = capability
        self.missing = missing

    @compiled
    def trtllm_ragged_attention(self, *args):
        # 0.6.18 added use_fp16_softmax and uses_spcompress behind lse
        (out, query, key, value, buffer, seq_lens, max_q_len, max_kv_len, bmm1, bmm2, o_sf, batch) = args[:12]
        (window, starts_q, starts_kv, _, pdl, causal, buffer_size, sinks, factor, lse) = args[12:22]
        *later, q_sf, k_sf, p_sf, v_sf, q_block, k_block, p_block, v_block = args[22:]
        assert len(args) in (30, 32) and all(x is None for x in later)
        assert (window, pdl, causal, sinks, lse, p_sf) == (-1, False, False, None, None, None)
        assert buffer.dtype == torch.uint8 and buffer.numel() == buffer_size >= 1 << 20
        assert isinstance(bmm1, float) and isinstance(bmm2, float) and isinstance(o_sf, float)
        self._find_kernel(query, out, q_block, k_block)
        query, result = by_shape(query), by_shape(out)
        result.fill_(math.nan)
        starts_q, starts_kv = integers(starts_q, batch + 1), integers(starts_kv, batch + 1)
        threshold = 0.0 if factor is None else factor / max_kv_len
        for b, length in enumerate(integers(seq_lens, batch)):
            rows = slice(starts_q[b], min(starts_q[b + 1], starts_q[b] + max_q_len))
            keys = slice(starts_kv[b], starts_kv[b] + length)
            q, k, v = query[rows].double(), key[keys].double(), value[keys].double()
            assert len(k) == length <= max_kv_len, "keys beyond the end of the buffer"
            assert starts_kv[b + 1] - starts_kv[b] == length
            if q_sf is not None:
                q = q * _token_scales(q_sf, query, q_block, batch, b, starts_q[b], len(q))
                k = k * _token_scales(k_sf, key, k_block, batch, b, starts_kv[b], length)
                v = v * by_shape(v_sf).double()
                assert v_block == 1 and p_block == 0
            attended = attend(q, k, v, bmm1, threshold, (128, 128), quantize_p=q_sf is not None)
            result[rows] = (attended * bmm2).to(result.dtype)

    def _find_kernel(self, query, out, q_block, k_block):
        known = (query.dtype, q_block, k_block)
        is_sage = query.dtype in (torch.int8, torch.float8_e4m3fn)
        no_kernel = known in self.missing or (query.dtype == torch.int8 and self.capability == (10, 3))
        no_kernel = no_kernel or (is_sage != (q_block > 0)) or query.shape[2] != 128
        if no_kernel or out.dtype != torch.bfloat16 or query.dtype not in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
            raise RuntimeError(f"Missing TRTLLM-GEN kernel ragged attention: {known}")

    @compiled
    def trtllm_sage_attention_quantize(self, *args):
        q_quant, k_quant, v_quant, q_scale, k_scale, v_scale, query, key, value = args[:9]
        if len(args) == 12:  # 0.6.16: one sequence, no smoothing
            q_block, k_block, _ = args[9:]
            starts_q = torch.tensor([0, len(query)], dtype=INT32)
            starts_kv = torch.tensor([0, len(key)], dtype=INT32)
            smooth = False
        else:
            starts_q, starts_kv, q_block, k_block, _, mean, smooth = args[9:]
        for tensor in (query, key, value, q_quant, k_quant, v_quant):
            assert tensor.is_contiguous() and tensor.dtype != torch.float32
        keys = key.float()
        if smooth:
            mean.copy_(keys.mean(0))
            keys = keys - mean
        self._quantize_tokens(query.float(), q_quant, q_scale, starts_q, q_block)
        self._quantize_tokens(keys, k_quant, k_scale, starts_kv, k_block)
        v_scale.copy_(value.float().abs().amax(0).clamp_min(1e-3) / 448)
        v_quant.copy_((value.float() / v_scale).to(v_quant.dtype))

    @staticmethod
    def _quantize_tokens(x, quantized, scale, starts, block):
        limit = 126.9 if quantized.dtype == torch.int8 else 448.0
        scale.fill_(math.nan)
        starts = integers(starts, len(starts))
        for b, (start, end) in enumerate(zip(starts, starts[1:])):
            for i, token in enumerate(range(start, end, block)):
                tokens = slice(token, min(token + block, end))
                step = x[tokens].abs().amax((0, 2)).clamp_min(1e-3) / limit  # [heads]
                scale[:, start // block + b + i] = step
                scaled = x[tokens] / step[:, None]
                quantized[tokens] = (scaled.round() if quantized.dtype == torch.int8 else scaled).to(quantized.dtype)


def _token_scales(scales, x, block, batch, b, start, length):
    """[length, heads, 1] from the flat [heads, ceil(tokens / block) + batch - 1] the kernel walks."""
    stride = -(-len(x) // block) + batch - 1
    assert scales.dtype == torch.float32 and scales.numel() == x.shape[1] * stride
    flat = scales.as_strided((x.shape[1], stride), (stride, 1), scales.storage_offset())
    index = start // block + b + torch.arange(length) // block
    return flat[:, index].T[..., None].double()


class FmhaV2:
    """fmha_v2_run.cu with the Hopper kernels, which read all of q, k and v by shape."""

    def __init__(self, layout, dtype, out_dtype=None):
        assert layout == "SEPARATE_Q_K_V" and dtype in (torch.float16, torch.bfloat16)
        self.dtype = dtype

    @compiled
    def run(self, *args):
        (query, key, value, out, buffer, size, tables, page, _, starts_q, starts_kv, layout) = args[:12]
        (max_q_len, max_kv_len, batch, mask, softmax_scale, bmm1, bmm2) = args[12:19]
        (window, chunk, alibi, cap, factor, lse, sinks) = args[19:]
        assert (tables, page, layout, softmax_scale) == (None, 0, "separate_q_k_v", 1.0)
        assert (window, chunk, alibi, cap, lse, sinks) == (-1, 0, False, 0.0, None, None)
        assert {x.dtype for x in (query, key, value, out)} == {self.dtype}
        assert buffer.numel() == size >= 4
        query, key, value, out = (by_shape(x) for x in (query, key, value, out))
        out.fill_(math.nan)
        # dma.h sizes the descriptors of k, v and out by q's rows: beyond a buffer lies anything
        assert len(out) >= len(query) and len(key) >= len(query) and len(value) >= len(query)
        scale = bmm1 or query.shape[-1] ** -0.5
        tile = (64, 256 if query.shape[-1] <= 64 else 128)
        starts_q, starts_kv = integers(starts_q, batch + 1), integers(starts_kv, batch + 1)
        for b in range(batch):
            rows = slice(starts_q[b], min(starts_q[b + 1], starts_q[b] + max_q_len))
            keys = slice(starts_kv[b], starts_kv[b + 1])
            q, k, v = query[rows].double(), key[keys].double(), value[keys].double()
            k[max(len(query) - starts_kv[b], 0) :], v[max(len(query) - starts_kv[b], 0) :] = 0, 0
            assert len(k) == starts_kv[b + 1] - starts_kv[b] <= max_kv_len
            # what lies behind the last query, the next sequence or zeros, votes on skipping with it
            behind = query[rows.stop : rows.stop + -len(q) % tile[0]].double()
            voters = torch.cat([q, behind, q.new_zeros(-(len(q) + len(behind)) % tile[0], *q.shape[1:])])
            result = attend(voters, k, v, scale, factor / len(k), tile, causal=mask != "padding")
            out[rows] = (result[: len(q)] * bmm2).to(out.dtype)


class Prefill:
    """single_prefill.cu (fa2) and single_prefill_sm90.cu (fa3), which take strides from the tensors."""

    def __init__(self, backend, dtype_q, dtype_kv, dtype_o, dim_qk, dim_vo, *options):
        assert options[0] == 0 and not any(options) and dim_qk == dim_vo
        self.backend, self.dtypes = backend, (dtype_q, dtype_kv, dtype_kv, dtype_o)

    @compiled
    def run(self, query, key, value, tmp, out, lse, mask_mode, layout, window, *rest):
        packed = None
        if self.backend == "fa3":
            scale_v, cap, scale, scale_v_scalar = rest
            assert scale_v is None and scale_v_scalar == 1.0
        else:
            packed, alibi, *factors, cap, scale, rope_scale, rope_theta = rest
            assert alibi is None and all(f is None for f in factors)
        assert (lse, layout, window, cap) == (None, 0, -1, 0.0)
        # the kernel reads memory as its own dtype, whatever the tensor says
        assert tuple(x.dtype for x in (query, key, value, out)) == self.dtypes
        assert all(x.stride(-1) == 1 for x in (query, key, value))
        keep = None
        if mask_mode == 2 and packed is not None:
            bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
            keep = bits.flatten()[: len(query) * len(key)].view(len(query), len(key)).bool()
        attended = attend(query.double(), key.double(), value.double(), scale, 0.0, (128, 128), keep=keep)
        out.copy_(attended.to(out.dtype))


class Packing:
    @compiled
    def packbits(self, bits, order, packed):
        assert order == "little" and bits.is_contiguous() and bits.dtype == torch.bool
        padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
        packed.copy_((padded << torch.arange(8, dtype=torch.uint8)).sum(-1))


def attend(q, k, v, scale, threshold, tile, causal=False, keep=None, quantize_p=False):
    """float64 attention over tiles, [tokens, heads, dim] each; skips as the CUDA sources do."""
    groups = q.shape[1] // k.shape[1]
    q = q.transpose(0, 1)  # [heads, tokens, dim]
    k, v = (x.transpose(0, 1).repeat_interleave(groups, 0) for x in (k, v))
    scores = scale * q @ k.transpose(1, 2)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1 + k.shape[1] - q.shape[1]) > 0, -math.inf)
    if keep is not None:
        scores = scores.masked_fill(~keep, -math.inf)
    rows = [_query_tile(part, v, threshold, tile[1], quantize_p) for part in scores.split(tile[0], 1)]
    return torch.cat(rows, 1).transpose(0, 1)


def _query_tile(scores, values, threshold, width, quantize_p):
    """One tile of queries, all heads side by side; each head decides for itself what it skips."""
    peak = total = result = None
    for part, value in zip(scores.split(width, 2), values.split(width, 1)):
        tile_peak = part.max(2).values
        if peak is None:
            peak, total, result = tile_peak, torch.zeros_like(tile_peak), torch.zeros_like(scores[:, :, :1])
            skip = torch.zeros(len(scores), 1, dtype=torch.bool)
        else:
            skip = ((tile_peak - peak).exp() < threshold).all(1, keepdim=True)
        new_peak = torch.maximum(peak, tile_peak)
        p = (part - new_peak[..., None]).exp().nan_to_num(0.0)
        decay = (peak - new_peak).exp().nan_to_num(1.0)
        new_total = total * decay + p.sum(2)
        if quantize_p:
            p = (p * 448).to(torch.float8_e4m3fn).double() / 448
        new_result = result * decay[..., None] + p @ value
        peak, total = torch.where(skip, peak, new_peak), torch.where(skip, total, new_total)
        result = torch.where(skip[..., None], result, new_result)
    return result / total[..., None]
