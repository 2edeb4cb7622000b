"""The selector against the table a person can read, and the words it says."""

import logging
import pathlib
import re

import pytest
import torch

from trtllm_core import backends
from trtllm_core.backends import Unavailable
from trtllm_core.device import Device
from trtllm_core.selector import Selection, announce, dense_companion, line_of, select
from trtllm_core.specs import AttentionSpec, AttnQuantSpec, SkipSoftmaxSpec

TABLE = pathlib.Path(__file__).with_name("selection_table.md")
ASKED = "attention_config.default"
GPUS = {
    "B200": ("cuda", (10, 0)),
    "B300": ("cuda", (10, 3)),
    "RTX 5090": ("cuda", (12, 0)),
    "GB10": ("cuda", (12, 1)),
    "H200": ("cuda", (9, 0)),
    "RTX 4090": ("cuda", (8, 9)),
    "RTX 3090": ("cuda", (8, 6)),
    "A100": ("cuda", (8, 0)),
    "Orin": ("cuda", (8, 7)),
    "T4": ("cuda", (7, 5)),
    "Thor": ("cuda", (11, 0)),
    "MI300X": ("rocm", None),
    "mps": ("mps", None),
    "CPU": ("cpu", None),
}
VERSIONS = {
    "flashinfer": "0.6.18",
    "flash-attn": "2.8.3",
    "flash-attn-3": "3.0.0b1",
    "fa3-fwd": "0.0.3",
    "flash-attn-4": "4.0.0b18",
    "sageattention": "2.2.0",
    "sageattn3": "1.0.0",
    "kernels": "0.14.1",
    "triton": "3.6.0",
}
QUANT_DTYPES = {"int8": "int8", "fp8": "fp8_e4m3", "float16": "float16", "bfloat16": "bfloat16"}


def device_of(gpu: str, installed: str) -> Device:
    kind, capability = GPUS[gpu]
    cudnn, packages, broken = None, {}, {}
    for word in installed.split():
        name, _, version = word.lstrip("!").partition("=")
        if name == "cudnn":
            cudnn = int(version or 91002)
            continue
        if name in VERSIONS:
            packages[name] = version or VERSIONS[name]
        if word.startswith("!"):
            broken[name] = "OSError: libsomething.so"
    return Device(kind, capability, gpu, cudnn=cudnn, packages=packages, broken=broken)


def spec_of(asked: str) -> AttentionSpec:
    backend, *words = asked.split()
    quant, skip = {}, None
    for word in words:
        key, has_value, value = word.partition("=")
        if word == "skip":
            skip = SkipSoftmaxSpec(threshold=0.01)
        elif has_value:
            quant[key] = int(value) if value.isdigit() else value
        else:
            quant["dtype_qk"] = QUANT_DTYPES[word]
    return AttentionSpec(
        None if backend == "auto" else backend, AttnQuantSpec(**quant) if quant else None, skip
    )


def call_of(call: str) -> dict:
    head_dim, *words = call.split()
    dtypes = [word for word in words if "float" in word]
    return {
        "head_dim": None if head_dim == "?" else int(head_dim),
        "mask": "any" if "mask" in words else "padding" if "padding" in words else "none",
        "mask_free": "may-mask" not in words,
        "gqa": "gqa" in words,
        "dtype": getattr(torch, dtypes[0]) if dtypes else None,
    }


def rows():
    section = ""
    for number, line in enumerate(TABLE.read_text().splitlines(), 1):
        if line.startswith("## "):
            section = line[3:]
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] in GPUS:
            name = "-".join(cells[:4]).replace(" ", "_")
            yield pytest.param(section, *cells, id=f"{number}-{name}")


def test_the_table_is_large_enough():
    assert len(list(rows())) >= 150


def test_no_row_stands_twice():
    lines = [line for line in TABLE.read_text().split("## The same site")[0].splitlines()]
    asked = [line.rpartition("| ")[0] for line in lines if line.startswith("| ")]
    asked = [line for line in asked if "installed" not in line and "---" not in line]
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("section, gpu, installed, asked, call, result", list(rows()))
def test_selection(section, gpu, installed, asked, call, result):
    choose = dense_companion if section.startswith("The same site") else select
    device, spec = device_of(gpu, installed), spec_of(asked)
    if result.startswith("error:"):
        with pytest.raises(Unavailable) as refused:
            choose(spec, device, source=ASKED, **call_of(call))
        pieces = [piece.strip() for piece in result.removeprefix("error:").split(";")]
        reasons = list(refused.value.reasons)
        assert len(reasons) == len(pieces), reasons
        for piece, reason in zip(pieces, reasons, strict=True):
            assert piece in reason
            assert reason in str(refused.value)
        return
    outcome, _, warning = result.partition(", warns: ")
    backend, source = outcome.split(", ")
    selection = choose(spec, device, source=ASKED, **call_of(call))
    assert (selection.backend, selection.source.replace(ASKED, "asked")) == (backend, source)
    pieces = warning.split("; ") if warning else []
    assert len(selection.warnings) == len(pieces), selection.warnings
    for piece, said in zip(pieces, selection.warnings, strict=True):
        assert piece in said


def test_a_refusal_names_what_could_run_instead():
    with pytest.raises(Unavailable, match=r"On H200 \(sm_90\) CUDNN_ATTN, TORCH_SDPA can"):
        select(AttentionSpec("TRTLLM_ATTN"), device_of("H200", "cudnn"), head_dim=64, mask="any")


def test_a_quant_block_that_no_default_reads_names_who_does():
    spec = AttentionSpec(quant=AttnQuantSpec(dtype_qk="float16"))
    device = device_of("H200", "flashinfer flash-attn")
    with pytest.raises(
        Unavailable, match=r"auto cannot run: .*On H200 \(sm_90\) FLASHINFER_ATTN can"
    ):
        select(spec, device, head_dim=128)


def test_case_04_an_unsupported_head_size_is_refused_when_planned_and_auto_goes_on():
    device = device_of("H200", "flash-attn triton")
    assert select(AttentionSpec(), device, head_dim=160).backend == "FLASH_ATTN"
    with pytest.raises(Unavailable, match="head size 160 is not supported"):
        select(AttentionSpec("TRITON_ATTN"), device, head_dim=160)


def test_case_22_a_backend_this_machine_lacks_is_a_valid_spec_and_a_clear_refusal():
    spec = AttentionSpec("SAGE_ATTN_3")
    with pytest.raises(Unavailable, match="sageattn3 is not installed .*SageAttention"):
        select(spec, device_of("RTX 5090", ""), head_dim=128)


def test_selection_never_depends_on_this_machine(monkeypatch):
    monkeypatch.setattr(
        Device, "current", lambda *_: pytest.fail("selection looked at the machine")
    )
    assert select(AttentionSpec(), device_of("H200", "flash-attn"), head_dim=128).backend


@pytest.mark.parametrize(
    "gpu, installed, call, line",
    [
        ("RTX 5090", "cudnn", "128", "CUDNN_ATTN (Blackwell sm_120, cuDNN 91002)"),
        ("B200", "flashinfer", "128", "TRTLLM_ATTN (datacenter Blackwell sm_100, head_dim 128)"),
        ("H200", "flash-attn", "128", "FLASH_ATTN (Hopper sm_90)"),
        ("H200", "", "128", "SDPA (Hopper sm_90)"),
    ],
)
def test_documented_line_of_a_default(gpu, installed, call, line):
    selection = select(AttentionSpec(), device_of(gpu, installed), **call_of(call))
    assert line_of(selection, "self") == f"Defaulting to diffusion attention backend {line}"


def test_documented_line_of_a_configured_backend():
    selection = Selection("TRTLLM_ATTN", "attention_config.default")
    assert line_of(selection, "self") == (
        "Resolved diffusion attention backend 'TRTLLM_ATTN' for role='self' "
        "via attention_config.default"
    )
    assert line_of(Selection("CUDNN_ATTN", "the node"), "self") == (
        "Using diffusion attention backend 'CUDNN_ATTN'"
    )


def test_lines_are_logged_once_per_role_and_source(caplog):
    caplog.set_level(logging.INFO, "trtllm_attention")
    selection = Selection("TORCH_SDPA", ASKED, warnings=("SAGE_ATTN_3 has no GQA",))
    said: set[str] = set()
    for _ in range(3):
        announce(selection, "self", said)
        announce(selection, "cross", said)
    assert [record.levelname for record in caplog.records].count("WARNING") == 2
    assert len(caplog.records) == 4


def test_every_backend_answers_with_data():
    for name in backends.BACKEND_NAMES:
        requirements = backends.requirements(name)
        assert requirements.backend == name
        assert re.search(r"head size", requirements.describe())
        with pytest.raises(AttributeError):
            requirements.mask = "any"
