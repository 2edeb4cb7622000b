"""Specs refuse what they cannot mean, and say key, value and range."""

import math

import pytest

from trtllm_core.gate import TimestepGate
from trtllm_core.specs import AttentionSpec, AttnQuantSpec, SkipSoftmaxSpec


@pytest.mark.parametrize(
    "make, parts",
    [
        (lambda: SkipSoftmaxSpec(threshold=math.nan), ("threshold", "nan", "finite")),
        (lambda: SkipSoftmaxSpec(threshold=math.inf), ("threshold", "inf", "finite")),
        (lambda: SkipSoftmaxSpec(threshold=-0.1), ("threshold", "-0.1", "at least 0")),
        (lambda: SkipSoftmaxSpec(threshold="0.1"), ("threshold", "'0.1'", "number", "str")),
        (lambda: SkipSoftmaxSpec(threshold=True), ("threshold", "True", "number")),
        (lambda: SkipSoftmaxSpec(target_sparsity=75), ("target_sparsity", "75", "0.75")),
        (lambda: SkipSoftmaxSpec(target_sparsity=1.5), ("target_sparsity", "1.5", "[0, 1]")),
        (lambda: SkipSoftmaxSpec(threshold=0.1, target_sparsity=0.5), ("threshold=0.1", "target_sparsity=0.5", "remove one")),
        (lambda: SkipSoftmaxSpec(), ("threshold", "target_sparsity")),
        (lambda: SkipSoftmaxSpec(threshold=0.1, disabled_until_timestep=2), ("disabled_until_timestep", "2", "[0, 1]")),
        (lambda: SkipSoftmaxSpec(threshold=0.1, disabled_until_timestep=math.nan), ("disabled_until_timestep", "nan")),
        (lambda: AttnQuantSpec(dtype_qk="int4"), ("quant.dtype_qk", "'int4'", "'int8'", "did you mean")),
        (lambda: AttnQuantSpec(dtype_vo="fp8_e4m3"), ("quant.dtype_vo", "'float16'")),
        (lambda: AttnQuantSpec(q_block_size=2), ("quant.q_block_size", "2", "1, 4, 16")),
        (lambda: AttnQuantSpec(k_block_size=True), ("quant.k_block_size", "True")),
        (lambda: AttnQuantSpec(flashinfer_backend=""), ("quant.flashinfer_backend", "non-empty")),
        (lambda: AttentionSpec(backend="TRITON"), ("'TRITON'", "TRITON_ATTN", "did you mean")),
        (lambda: AttentionSpec(backend=3), ("backend", "3", "string")),
        (lambda: AttentionSpec(quant={"dtype_qk": "int8"}), ("AttnQuantSpec", "dict")),
        (lambda: AttentionSpec(skip_softmax={"threshold": 0.1}), ("SkipSoftmaxSpec", "dict")),
        (lambda: TimestepGate(1.01), ("disabled_until_timestep", "1.01")),
    ],
)
def test_case_24_malformed_values_name_key_value_and_range(make, parts):
    with pytest.raises(ValueError) as error:
        make()
    for part in parts:
        assert part in str(error.value)


def test_defaults_are_the_documented_ones():
    assert AttnQuantSpec() == AttnQuantSpec(None, None, 1, 16, None)
    assert SkipSoftmaxSpec(threshold=0.0).disabled_until_timestep == 0.0
    assert AttentionSpec() == AttentionSpec(None, None, None)


def test_lossy_is_what_differs_from_dense():
    assert not AttentionSpec("TORCH_SDPA").is_lossy
    assert not AttentionSpec(quant=AttnQuantSpec(dtype_qk="bfloat16")).is_lossy
    assert AttentionSpec(quant=AttnQuantSpec(dtype_qk="int8")).is_lossy
    assert AttentionSpec(skip_softmax=SkipSoftmaxSpec(threshold=0.1)).is_lossy


def test_gate_is_dense_above_the_cutoff_only():
    times = [1.0, 0.941, 0.8]  # Wan, shift 8, three steps
    assert [TimestepGate(0.9).is_dense(t) for t in times] == [True, True, False]
    assert TimestepGate(0.9).dense_steps(times) == 2
    assert TimestepGate(0.941).is_dense(0.941) is False


def test_gate_of_zero_needs_no_time_and_any_other_does():
    assert TimestepGate(0).dense_steps([1.0, 0.9, None]) == 0
    assert TimestepGate(1).dense_steps([1.0, 0.9]) == 0
    assert TimestepGate(1).is_dense(None)
