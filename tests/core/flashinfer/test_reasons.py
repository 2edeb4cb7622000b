"""Why a FlashInfer backend cannot run here: every reason at once, before anything is imported or run."""

import gc
import sys
import types
import weakref

import pytest
import torch

from trtllm_core import backends
from trtllm_core.backends import Request, Unavailable, _flashinfer, flashinfer_attn, fmha_v2, trtllm_attn
from trtllm_core.device import Device
from trtllm_core.specs import AttentionSpec, AttnQuantSpec, SkipSoftmaxSpec

SKIP = SkipSoftmaxSpec(threshold=0.05)
MODULES = {"TRTLLM_ATTN": trtllm_attn, "FMHA_V2": fmha_v2, "FLASHINFER_ATTN": flashinfer_attn}


def reasons(name, capability, packages=None, mask="none", head_dim=128, dtype=torch.bfloat16, **spec):
    packages = {"flashinfer": "0.7.4"} if packages is None else packages
    request = Request(AttentionSpec(name, **spec), head_dim=head_dim, dtype=dtype, mask=mask)
    return backends.reasons(name, request, Device(capability=capability, packages=packages))


@pytest.mark.parametrize("name", MODULES)
def test_all_reasons_at_once(name):
    found = " / ".join(reasons(name, (7, 5), {}, mask="any", head_dim=96, quant=AttnQuantSpec("int8"), skip_softmax=SKIP))
    for words in ("this is sm_75", "flashinfer", "is not installed (pip install flashinfer-python)", "head size 96"):
        assert words in found
    if name != "FLASHINFER_ATTN":
        assert "cannot honour an attention mask" in found
    if name != "TRTLLM_ATTN":
        assert "dtype_qk='int8' is not for it" in found


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0), (12, 1)])
def test_trtllm_attn_is_for_datacenter_blackwell(capability):
    assert any("it needs sm_100/sm_103" in reason for reason in reasons("TRTLLM_ATTN", capability))


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_fmha_v2_is_for_hopper(capability):
    assert any("it needs sm_90" in reason for reason in reasons("FMHA_V2", capability))


def test_what_runs_where():
    quant = AttnQuantSpec("fp8_e4m3")
    for capability in ((10, 0), (10, 3)):
        assert reasons("TRTLLM_ATTN", capability, quant=quant, skip_softmax=SKIP, mask="padding") == ()
    assert reasons("FMHA_V2", (9, 0), skip_softmax=SKIP, mask="padding") == ()
    assert reasons("FLASHINFER_ATTN", (8, 0), mask="any", quant=AttnQuantSpec("float16", "float16")) == ()
    fp8 = AttnQuantSpec("fp8_e4m3", flashinfer_backend="cute-dsl-prims")
    assert reasons("FLASHINFER_ATTN", (12, 0), quant=fp8, skip_softmax=SKIP) == ()


@pytest.mark.parametrize(
    "version, spec, words",
    [
        ("0.6.3", {"skip_softmax": SKIP}, "skip_softmax needs flashinfer 0.6.4 or newer, found 0.6.3"),
        ("0.6.15", {"quant": AttnQuantSpec("int8")}, "quant.dtype_qk needs flashinfer 0.6.16rc1"),
        ("0.6.3", {}, None),
        ("0.6.16", {"quant": AttnQuantSpec("int8"), "skip_softmax": SKIP}, None),
        ("unknown", {"skip_softmax": SKIP}, "found unknown"),
    ],
)
def test_each_feature_knows_its_version(version, spec, words):
    found = reasons("TRTLLM_ATTN", (10, 0), {"flashinfer": version}, **spec)
    assert (found == ()) if words is None else any(words in reason for reason in found)


def test_int8_has_no_kernel_on_sm_103():
    assert any("sm_100 only" in r for r in reasons("TRTLLM_ATTN", (10, 3), quant=AttnQuantSpec("int8")))


@pytest.mark.parametrize("name, capability", [("TRTLLM_ATTN", (10, 0)), ("FMHA_V2", (9, 0)), ("FLASHINFER_ATTN", (9, 0))])
def test_kernel_packages_of_another_version(name, capability):
    packages = {"flashinfer": "0.7.4", "flashinfer-cubin": "0.6.13", "flashinfer-jit-cache": "0.7.4+cu130"}
    assert reasons(name, capability, packages) == (
        "flashinfer-cubin 0.6.13 does not fit flashinfer 0.7.4 (install flashinfer-cubin==0.7.4)",
    )


def test_what_the_quant_block_may_not_ask_of_flashinfer_attn():
    def found(capability=(9, 0), mask="none", skip=None, **quant):
        return " / ".join(reasons("FLASHINFER_ATTN", capability, mask=mask, quant=AttnQuantSpec(**quant), skip_softmax=skip))

    assert "must be the same" in found(dtype_qk="float16", dtype_vo="bfloat16")
    assert "'fa9' must be 'auto' or 'fa2' or 'fa3'" in found(flashinfer_backend="fa9")
    assert "drops a mask" in found(flashinfer_backend="fa3", mask="any")
    assert "needs sm_90" in found((12, 0), flashinfer_backend="fa3")
    assert "sm_120 only" in found(dtype_qk="fp8_e4m3")
    assert "takes no mask" in found((12, 0), mask="any", dtype_qk="fp8_e4m3")
    assert "only kernel with Skip-Softmax is the FP8 one" in found(skip=SKIP)


@pytest.mark.parametrize("name, capability", [("TRTLLM_ATTN", (10, 0)), ("FMHA_V2", (9, 0)), ("FLASHINFER_ATTN", (9, 0))])
@pytest.mark.parametrize("error", [ImportError("libcudart"), OSError("cannot open"), RuntimeError("driver"), AttributeError("old")], ids=lambda e: type(e).__name__)
def test_a_broken_import_is_a_reason(monkeypatch, name, capability, error):
    class Broken:
        def find_spec(self, module, path=None, target=None):
            if module == "flashinfer":
                raise error

    for module in [m for m in sys.modules if m.partition(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(Unavailable, match=f"cannot be imported: {type(error).__name__}"):
        MODULES[name].load(Device(capability=capability, packages={"flashinfer": "0.7.4"}))


@pytest.mark.parametrize("name, capability", [("TRTLLM_ATTN", (10, 0)), ("FMHA_V2", (9, 0)), ("FLASHINFER_ATTN", (9, 0))])
def test_a_partial_installation_is_a_reason(monkeypatch, name, capability):
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", types.ModuleType("flashinfer.prefill"))
    with pytest.raises(Unavailable, match="has no attribute"):
        MODULES[name].load(Device(capability=capability, packages={"flashinfer": "0.7.4"}))


def test_a_compilation_is_announced_with_its_progress(monkeypatch, caplog, tmp_path):
    """Files and cores give the minutes; finished object files are counted meanwhile."""
    recipe = types.SimpleNamespace(
        is_compiled=False, sources=["a.cu"] * 90, jit_library_path=tmp_path / "kernels.so"
    )
    monkeypatch.setenv("MAX_JOBS", "16")
    monkeypatch.setattr(_flashinfer, "PROGRESS_SECONDS", 0.01)
    monkeypatch.setattr(_flashinfer, "_built", {})

    def compile_kernels():
        (tmp_path / "a.o").touch()
        for _ in range(500):
            if "1 of 90 files" in caplog.text:
                return "module"
            _flashinfer.time.sleep(0.01)

    with caplog.at_level("INFO", "trtllm_attention"):
        for _ in range(2):
            built = _flashinfer.build("FMHA_V2", "its kernels", compile_kernels, "advice", lambda: recipe)
    assert built == "module"
    assert caplog.text.count("compiling its kernels once for this machine: 90 files on 16 cores, about 2 min") == 1
    assert "1 of 90 files compiled" in caplog.text and "compiled in" in caplog.text


def test_a_failed_build_keeps_no_tensor_of_the_caller(monkeypatch):
    """An exception that is kept has a traceback, whose frames hold what the model was computing."""
    monkeypatch.setattr(_flashinfer, "_built", {})

    def fail():
        raise RuntimeError("no compiler")

    def forward_of_a_model():
        activations = torch.zeros(10)
        try:
            _flashinfer.build("FLASHINFER_ATTN", "kernels", fail, "advice")
        except Unavailable:
            return weakref.ref(activations)

    activations = forward_of_a_model()
    gc.collect()
    assert activations() is None
