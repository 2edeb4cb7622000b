"""A kernel that is wrong on this GPU is found before it is used (a GPU is imagined: inputs stay on the CPU)."""

from types import SimpleNamespace

import pytest
import torch

from trtllm_core import reference, selfcheck
from trtllm_core.backends import Unavailable
from trtllm_core.device import Device
from trtllm_core.specs import AttentionSpec, AttnQuantSpec, SkipSoftmaxSpec

GPU = Device("cuda", (9, 0), "imagined")
SKIP = SkipSoftmaxSpec(threshold=0.01)
SPECS = {
    "dense": AttentionSpec(),
    "skip": AttentionSpec(skip_softmax=SKIP),
    "int8": AttentionSpec(quant=AttnQuantSpec("int8")),
    "fp8": AttentionSpec(quant=AttnQuantSpec("fp8_e4m3", q_block_size=16)),
    "fp8 and skip": AttentionSpec(quant=AttnQuantSpec("fp8_e4m3"), skip_softmax=SKIP),
}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(selfcheck, "_checked", {})
    to_gpu = torch.Tensor.to

    def to(self, *args, **kwargs):
        asked.update(a for a in args if str(a).startswith("cuda"))
        return to_gpu(self, *("cpu" if str(a).startswith("cuda") else a for a in args), **kwargs)

    asked = set()
    monkeypatch.setattr(torch.Tensor, "to", to)
    return asked


def module(run, lossy=False):
    requirements = SimpleNamespace(backend="IMAGINED", dtypes=(torch.float16,), lossy=lossy)
    return SimpleNamespace(REQUIREMENTS=requirements, run=run)


def right(call):
    out, stats = reference.attention(call.query, call.key, call.value, threshold=call.threshold, quant=call.quant)
    if call.threshold:
        assert stats.sparsity > 0.3  # the skip path is really taken
    return out


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("head_dim", [64, 128, None])
def test_case_07_a_right_kernel_passes(name, head_dim):
    selfcheck.self_check(module(right), GPU, SPECS[name], head_dim, torch.float16)


@pytest.mark.parametrize("name", SPECS)
def test_case_07_a_wrong_kernel_is_named_and_not_used(name):
    def wrong(call):
        return 0.7 * right(call) + 0.3 * call.value

    with pytest.raises(Unavailable, match="wrong on this GPU"):
        selfcheck.self_check(module(wrong), GPU, SPECS[name], 128, torch.float16)


def test_case_07_nan_is_wrong():
    with pytest.raises(Unavailable, match="wrong on this GPU"):
        selfcheck.self_check(module(lambda call: call.query * float("nan")), GPU, AttentionSpec(), 128, torch.float16)


def test_case_20_a_failure_is_remembered_and_not_tried_again():
    calls = []

    def broken(call):
        calls.append(call)
        raise RuntimeError("ptxas exited with 255")

    for _ in range(3):
        with pytest.raises(Unavailable, match="ptxas exited with 255"):
            selfcheck.self_check(module(broken), GPU, AttentionSpec(), 128, torch.float16)
    assert len(calls) == 1


def test_a_cpu_is_not_checked():
    selfcheck.self_check(module(lambda call: None), Device.current("cpu"), AttentionSpec(), 128, torch.float32)


@pytest.mark.parametrize(("index", "place"), [(None, "cuda"), (1, "cuda:1")])
def test_the_gpu_that_is_planned_for_is_the_one_that_is_checked(on_the_cpu, index, place):
    gpu = Device("cuda", (9, 0), "imagined", index=index)
    selfcheck.self_check(module(right), gpu, AttentionSpec(), 128, torch.float16)
    assert on_the_cpu == {place}
