"""The Hopper kernels' SAGE quantization against float64: in Triton's interpreter where there is no GPU."""

import math
import pathlib
import sys

import pytest
import torch

sys.path.append(str(pathlib.Path(__file__).parent))
import hopper_oracle as oracle  # noqa: E402

from trtllm_core.specs import AttnQuantSpec  # noqa: E402

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(tokens, head_dim=64):
    generator = torch.Generator().manual_seed(tokens)
    query, key, value = (torch.randn(2, tokens, heads, head_dim, generator=generator) for heads in (2, 1, 1))
    return tuple(x.to(torch.bfloat16).to(DEVICE) for x in (query, key + 3, value + 1))


def dequantized(found, k_block_size, tokens):
    """Query, key and value that quantize_for_hopper's result stands for, [batch, tokens, heads, head_dim]."""
    query = found.query.double() * found.query_scale.double()[..., None]
    key = found.key.double() * found.key_scale.double().repeat_interleave(k_block_size, 2)[:, :, :tokens, None]
    position = torch.arange(found.value.shape[3], device=DEVICE)
    # position 4 c + 2 g + e of each 16 holds key 8 g + 2 c + e
    place = position // 16 * 16 + 8 * (position // 2 % 2) + 2 * (position // 4 % 4) + position % 2
    value = torch.empty(found.value.shape, dtype=torch.float64, device=DEVICE)
    value[..., place] = found.value.double()
    value = value * found.value_scale.double()[..., None] + found.value_mean.double()[..., None]
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(2, 3)[:, :, :tokens].transpose(1, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "dtype_qk", "q_block", "k_block"),
    [(145, "int8", 1, 16), (145, "fp8_e4m3", 16, 4), (1, "int8", 4, 1)],
)
def test_matches_float64(tokens, dtype_qk, q_block, k_block):
    from trtllm_core.kernels.hopper_quantize import quantize_for_hopper

    query, key, value = tensors(tokens)
    lengths = torch.tensor([tokens, 1 + tokens // 2], dtype=torch.int32, device=DEVICE)
    spec = AttnQuantSpec(dtype_qk=dtype_qk, q_block_size=q_block, k_block_size=k_block)
    found = quantize_for_hopper(
        query, key, value, dtype_qk=dtype_qk, q_block_size=q_block, k_block_size=k_block, multiplier=1.0, key_lengths=lengths
    )
    expected = oracle.quantized(query, key, value, spec, lengths)
    for name, got, want in zip(("query", "key", "value"), dequantized(found, k_block, tokens), expected):
        for b, length in enumerate(lengths.tolist()):
            length = tokens if name == "query" else length
            part, wanted = got[b, :length], want[b, :length]
            # a number next to the middle of two roundings may take the other one
            assert (part - wanted).norm() <= 6e-3 * wanted.norm() + 1e-6, name
    for b, length in enumerate(lengths.tolist()):
        assert not found.key[b, :, length:].double().any()


def test_numbers_that_are_not_finite_mark_their_channel():
    from trtllm_core.kernels.hopper_quantize import nan_channels

    value = tensors(145)[2]
    value[0, 144, 0, 5], value[1, 3, 0, 7], value[1, 100, 0, 9] = math.nan, -math.inf, math.nan
    marks = nan_channels(value, torch.tensor([145, 77], dtype=torch.int32, device=DEVICE))
    assert marks.isnan().nonzero().tolist() == [[0, 0, 5], [1, 0, 7]]
    assert marks.nan_to_num(0).abs().max() == 0
