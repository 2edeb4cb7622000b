"""Every library backend against float64 attention, with a stand-in for the library."""

import importlib.abc
import sys

import pytest
import torch
import torch.nn.functional as F

from tests.core import library_stand_ins
from tests.core.library_stand_ins import Library, close, exact, tensors
from trtllm_core import backends
from trtllm_core.backends import AttentionCall, Request, Unavailable
from trtllm_core.backends import flash_attn as flash_attn_backend
from trtllm_core.device import Device
from trtllm_core.specs import AttnQuantSpec

HOPPER, BLACKWELL, ADA = (9, 0), (12, 0), (8, 9)


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setattr(flash_attn_backend, "_libraries", {})
    for name in ("FLASH_ATTN_HUB", "FLASH_ATTN_3_HUB"):
        monkeypatch.setattr(backends.load_module(name), "_library", None)
    return Library(monkeypatch)


VERSIONS = {
    "flash-attn": "2.8.3",
    "flash-attn-3": "3.0.0b1",
    "fa3-fwd": "0.0.3",
    "flash-attn-4": "4.0.0b18",
    "sageattention": "2.2.0",
    "sageattn3": "1.0",
    "kernels": "0.14.1",
}


def gpu(capability, *packages, **versions):
    found = {name: VERSIONS[name] for name in packages} | versions
    return Device(capability=capability, name="a GPU", cudnn=91002, packages=found)


def on(monkeypatch, capability):
    monkeypatch.setattr(flash_attn_backend, "capability_of", lambda tensor: capability)


def loaded(name, device):
    module = backends.load_module(name)
    module.load(device)
    return module


# backend, its stand-in, the GPU, what has to have run, and whether it takes fewer key heads
BACKENDS = {
    "TORCH_SDPA": ("TORCH_SDPA", None, gpu(ADA), None, True),
    "FLASH_ATTN 2": ("FLASH_ATTN", Library.flash_attn_2, gpu(ADA, "flash-attn"), "FA2", True),
    "FLASH_ATTN 3": (
        "FLASH_ATTN",
        lambda lib: lib.flash_attn_3("flash_attn_interface"),
        gpu(HOPPER, "flash-attn-3"),
        "flash_attn_interface",
        True,
    ),
    "FLASH_ATTN fa3-fwd": (
        "FLASH_ATTN",
        lambda lib: lib.flash_attn_3("fa3_fwd_interface"),
        gpu(HOPPER, "fa3-fwd"),
        "fa3_fwd_interface",
        True,
    ),
    "FLASH_ATTN 4": (
        "FLASH_ATTN",
        Library.flash_attn_4,
        gpu(BLACKWELL, "flash-attn-4"),
        "FA4",
        True,
    ),
    "SAGE_ATTN 1": (
        "SAGE_ATTN",
        lambda lib: lib.sage("1.0.6"),
        gpu(ADA, sageattention="1.0.6"),
        "sage 1.0.6",
        True,
    ),
    "SAGE_ATTN 2": (
        "SAGE_ATTN",
        lambda lib: lib.sage("2.2.0", SM89_ENABLED=True),
        gpu(ADA, "sageattention"),
        "sage 2.2.0",
        True,
    ),
    "SAGE_ATTN_3": ("SAGE_ATTN_3", Library.sage_3, gpu(BLACKWELL, "sageattn3"), "sage 3", False),
    "FLASH_ATTN_HUB": ("FLASH_ATTN_HUB", Library.hub, gpu(ADA, "kernels"), "hub_kernel", True),
    "FLASH_ATTN_3_HUB": (
        "FLASH_ATTN_3_HUB",
        Library.hub,
        gpu(HOPPER, "kernels"),
        "hub_kernel",
        True,
    ),
}
RAGGED = [name for name, row in BACKENDS.items() if backends.requirements(row[0]).mask != "none"]


def ready(name, library, monkeypatch):
    backend, install, device, ran, _ = BACKENDS[name]
    if install is not None:
        install(library)
    on(monkeypatch, device.capability)
    return loaded(backend, device), ran


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BACKENDS)
def test_self_attention(name, dtype, library, monkeypatch):
    module, ran = ready(name, library, monkeypatch)
    query, key, value = tensors(query_length=13, dtype=dtype)
    out = module.run(AttentionCall(query, key, value, scale=64**-0.5))
    assert out.dtype == dtype and out.shape == query.shape
    close(out, exact(query, key, value, 64**-0.5), dtype)
    assert ran is None or library.calls[-1] == ran


@pytest.mark.parametrize("name", BACKENDS)
def test_case_11_scale_and_grouped_heads_are_honoured(name, library, monkeypatch):
    module, _ = ready(name, library, monkeypatch)
    key_heads = 2 if BACKENDS[name][-1] else 4
    query, key, value = tensors(key_heads=key_heads)
    out = module.run(AttentionCall(query, key, value, scale=0.5))
    # a q that had to be prescaled was rounded once more
    dtype = torch.float8_e4m3fn if name == "SAGE_ATTN_3" else torch.bfloat16
    close(out, exact(query, key, value, 0.5), dtype)
    assert backends.requirements(BACKENDS[name][0]).gqa == BACKENDS[name][-1]


@pytest.mark.parametrize("name", BACKENDS)
def test_inputs_are_left_alone_whatever_the_library_does(name, library, monkeypatch):
    module, _ = ready(name, library, monkeypatch)
    inputs = tensors()
    before = [x.clone() for x in inputs]
    module.run(AttentionCall(*inputs, scale=0.1))
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


@pytest.mark.parametrize("name", BACKENDS)
def test_strided_views_as_comfyui_has_them(name, library, monkeypatch):
    """[B, H, L, D] tensors and slices of one fused projection, not contiguous either way."""
    module, _ = ready(name, library, monkeypatch)
    fused = torch.randn(2, 13, 3, 4, 64).to(torch.bfloat16)
    query, key, value = fused.unbind(2)
    value = value.transpose(1, 2).contiguous().transpose(1, 2)
    out = module.run(AttentionCall(query, key, value, scale=0.125))
    close(out, exact(query, key, value, 0.125), torch.bfloat16)


@pytest.mark.parametrize("name", RAGGED)
def test_key_lengths(name, library, monkeypatch):
    module, ran = ready(name, library, monkeypatch)
    query, key, value = tensors()
    lengths = torch.tensor([13, 5], dtype=torch.int32)
    value[1, 5:] = 100.0
    out = module.run(AttentionCall(query, key, value, scale=0.125, key_lengths=lengths))
    close(out, exact(query, key, value, 0.125, lengths), torch.bfloat16)
    assert ran is None or library.calls[-1].startswith(ran)


MASKS = {
    "2-D boolean": torch.rand(9, 13) > 0.3,
    "3-D boolean": torch.rand(2, 9, 13) > 0.3,
    "4-D boolean": torch.rand(2, 4, 9, 13) > 0.3,
    "2-D additive": torch.randn(9, 13),
    "3-D additive": torch.randn(2, 1, 13),
    "4-D additive": torch.randn(1, 4, 9, 13),
}


@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize("name", ["TORCH_SDPA", "REFERENCE"])
def test_case_10_masks_are_honoured(name, mask_name):
    mask = MASKS[mask_name].clone()
    if mask.dtype == torch.bool:
        mask[..., 0] = True
    if mask.ndim == 3:
        mask = mask[:, None]
    query, key, value = tensors(dtype=torch.float32)
    module = loaded(name, Device("cpu"))
    out = module.run(AttentionCall(query, key, value, scale=0.125, mask=mask))
    torch.testing.assert_close(
        out.double(), exact(query, key, value, 0.125, mask=mask), rtol=1e-5, atol=1e-5
    )
    lengths = torch.tensor([13, 5], dtype=torch.int32)
    call = AttentionCall(query, key, value, scale=0.125, mask=mask, key_lengths=lengths)
    expected = exact(query, key, value, 0.125, lengths, mask)
    torch.testing.assert_close(module.run(call).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", backends.BACKEND_NAMES)
def test_case_10_a_mask_that_cannot_be_honoured_is_refused(name):
    requirements = backends.requirements(name)
    for mask in backends.MASKS:
        found = requirements.reasons(Request(mask=mask), gpu(HOPPER))
        refused = any("cannot honour" in reason for reason in found)
        assert refused != requirements.supports_mask(mask)


@pytest.mark.parametrize("shape", [(1, 300, 2, 64), (2, 77, 3, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_sdpa_is_bit_for_bit_what_comfyui_computes(shape, dtype):
    """ComfyUI views [B, L, H*D] as heads, transposes, and calls SDPA with nothing but a mask."""
    batch, length, heads, dim = shape
    flat = [torch.randn(batch, length, heads * dim).to(dtype) for _ in range(3)]
    q, k, v = (x.view(batch, -1, heads, dim).transpose(1, 2) for x in flat)
    mask = torch.randn(1, 1, length, length).to(dtype)
    for attn_mask in (None, mask):
        stock = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=0.0, is_causal=False
        )
        call = AttentionCall(
            *(x.view(batch, -1, heads, dim) for x in flat), scale=dim**-0.5, mask=attn_mask
        )
        assert torch.equal(loaded("TORCH_SDPA", Device("cpu")).run(call), stock.transpose(1, 2))


class TestWhichFlashAttention:
    EVERY = ("flash-attn", "flash-attn-3", "fa3-fwd", "flash-attn-4")

    @pytest.fixture(autouse=True)
    def everything(self, library):
        library.flash_attn_2()
        library.flash_attn_3("flash_attn_interface")
        library.flash_attn_3("fa3_fwd_interface")
        library.flash_attn_4()
        self.library = library

    @pytest.mark.parametrize(
        "capability, packages, head_dim, ran",
        [
            (BLACKWELL, EVERY, 128, "FA4"),
            (BLACKWELL, EVERY, 256, "FA2"),
            (BLACKWELL, ("flash-attn",), 128, "FA2"),
            (HOPPER, EVERY, 128, "flash_attn_interface"),
            (HOPPER, ("flash-attn", "fa3-fwd"), 256, "fa3_fwd_interface"),
            (HOPPER, ("flash-attn",), 128, "FA2"),
            (ADA, EVERY, 128, "FA2"),
        ],
    )
    def test_order(self, capability, packages, head_dim, ran, monkeypatch):
        on(monkeypatch, capability)
        module = loaded("FLASH_ATTN", gpu(capability, *packages))
        module.run(AttentionCall(*tensors(dim=head_dim), scale=0.1))
        assert self.library.calls == [ran]

    def test_a_library_that_fails_to_import_is_said_and_the_next_one_serves(
        self, monkeypatch, caplog
    ):
        monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
        on(monkeypatch, BLACKWELL)
        module = loaded("FLASH_ATTN", gpu(BLACKWELL, "flash-attn", "flash-attn-4"))
        module.run(AttentionCall(*tensors(), scale=0.1))
        assert self.library.calls == ["FA2"]
        assert "FLASH_ATTN runs FlashAttention 2: flash_attn.cute cannot be imported" in caplog.text

    def test_two_generations_in_one_machine_keep_their_own(self, monkeypatch):
        for capability in (BLACKWELL, ADA):
            loaded("FLASH_ATTN", gpu(capability, *self.EVERY))
        for capability in (BLACKWELL, ADA):
            on(monkeypatch, capability)
            backends.load_module("FLASH_ATTN").run(AttentionCall(*tensors(), scale=0.1))
        assert self.library.calls == ["FA4", "FA2"]


def test_hub_kernels_are_pinned_and_loaded_once(library):
    library.hub()
    for _ in range(2):
        loaded("FLASH_ATTN_HUB", gpu(ADA, "kernels"))
        loaded("FLASH_ATTN_3_HUB", gpu(HOPPER, "kernels"))
    assert library.calls == [
        ("kernels-community/flash-attn2", 2),
        ("kernels-community/flash-attn3", 1),
    ]


def test_case_22_a_hub_kernel_that_cannot_be_downloaded_says_so(library):
    def get_kernel(repo_id, revision=None, version=None, backend=None):
        raise OSError("no route to host")

    library.install("kernels", get_kernel=get_kernel)
    with pytest.raises(
        Unavailable, match="flash-attn2 version 2 could not be loaded: OSError: no route"
    ):
        backends.load_module("FLASH_ATTN_HUB").load(gpu(ADA, "kernels"))


class Broken(importlib.abc.MetaPathFinder):
    """Every library raises `error` when it is imported."""

    LIBRARIES = (
        "flash_attn",
        "flash_attn_interface",
        "sageattention",
        "sageattn3",
        "kernels",
        "flashinfer",
    )

    def __init__(self, error):
        self.error = error

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.LIBRARIES:
            raise self.error


FOREIGN = ["FLASH_ATTN", "SAGE_ATTN", "SAGE_ATTN_3", "FLASH_ATTN_HUB", "FLASH_ATTN_3_HUB"]
FOREIGN += ["FLASHINFER_ATTN", "TRTLLM_ATTN", "FMHA_V2"]


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'x'"),
        ImportError("undefined symbol: _ZN3c10"),
        OSError("libcudart.so.12: cannot open shared object file"),
        AttributeError("module 'torch' has no attribute 'y'"),
        RuntimeError("CUDA driver is too old"),
        TypeError("'type' object is not subscriptable"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("name", FOREIGN)
def test_case_18_a_library_broken_on_import_is_a_reason(name, error, library, monkeypatch):
    for module in [m for m in sys.modules if m.split(".")[0] in Broken.LIBRARIES]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Broken(error), *sys.meta_path])
    device = gpu(HOPPER, "flash-attn", "sageattention", "sageattn3", "kernels", flashinfer="0.6.18")
    with pytest.raises(Unavailable) as refused:
        backends.load_module(name).load(device)
    assert refused.value.backend == name
    assert f"{type(error).__name__}: {error}" in str(refused.value)


@pytest.mark.parametrize("name", FOREIGN)
def test_case_18_a_library_that_is_missing_is_a_reason_with_a_way_to_get_it(name):
    capability = BLACKWELL if name == "SAGE_ATTN_3" else HOPPER
    (reason, *_) = backends.reasons(
        name, Request(), gpu((10, 0) if name == "TRTLLM_ATTN" else capability)
    )
    assert "is not installed (" in reason


@pytest.mark.parametrize(
    "name, package, version",
    [("FLASH_ATTN_HUB", "kernels", "0.9.0"), ("FLASH_ATTN", "flash-attn-4", "4.0.0b3")],
)
def test_case_18_a_library_that_is_too_old_is_a_reason(name, package, version):
    found = backends.reasons(name, Request(), gpu(BLACKWELL, **{package: version}))
    assert any(f"is needed, found {version}" in reason for reason in found)


@pytest.mark.parametrize(
    "capability, flag",
    [
        ((8, 0), "SM80_ENABLED"),
        (ADA, "SM89_ENABLED"),
        (HOPPER, "SM90_ENABLED"),
        (BLACKWELL, "SM89_ENABLED"),
    ],
)
def test_case_19_a_branch_that_was_never_built_is_refused_when_planned(capability, flag, library):
    device = gpu(capability, "sageattention")
    library.sage("2.2.0", **{flag: False})
    with pytest.raises(Unavailable, match=f"lacks its kernels for .*{flag}"):
        backends.load_module("SAGE_ATTN").load(device)
    library.sage("2.2.0", **{flag: True})
    backends.load_module("SAGE_ATTN").load(device)


def test_case_19_the_triton_branch_needs_no_extension(library):
    library.sage("2.2.0")
    backends.load_module("SAGE_ATTN").load(gpu((8, 6), "sageattention"))


def test_case_19_the_callable_itself_must_exist(library):
    library.install("sageattn3")
    with pytest.raises(Unavailable, match="AttributeError: .*sageattn3_blackwell"):
        backends.load_module("SAGE_ATTN_3").load(gpu(BLACKWELL, "sageattn3"))
    library.install("flash_attn_interface", flash_attn_func=lambda: None)
    with pytest.raises(Unavailable, match="flash_attn_with_kvcache"):
        backends.load_module("FLASH_ATTN").load(gpu(HOPPER, "flash-attn-3"))


def test_case_09_what_each_backend_computes_float32_in():
    for name in backends.BACKEND_NAMES:
        requirements = backends.requirements(name)
        dtype = requirements.compute_dtype(torch.float32)
        assert dtype in requirements.dtypes
        found = requirements.reasons(Request(dtype=torch.float32), gpu(HOPPER))
        assert not any("float32" in reason for reason in found)
    assert any(
        "does not take int8" in reason
        for reason in backends.reasons("FLASH_ATTN", Request(dtype=torch.int8), gpu(HOPPER))
    )


def test_the_reference_counts_its_tiles():
    module = backends.load_module("REFERENCE")
    query, key, value = tensors(batch=1, query_length=300, key_length=300, heads=2, key_heads=2)
    skipped = torch.zeros(1, dtype=torch.int64)
    call = AttentionCall(query, key, value, scale=1.0, threshold=1e30, skipped=skipped)
    module.run(call)
    assert module.tile_count(call) == 2 * 3 * 5
    assert skipped.item() == 2 * 3 * 4  # all but the first tile of each row of tiles


def test_refusals_hold_every_reason_in_words():
    error = Unavailable("SAGE_ATTN", ("one", "two"), "On this machine TORCH_SDPA can")
    assert str(error) == "SAGE_ATTN cannot run: one; two. On this machine TORCH_SDPA can"
    assert error.reasons == ("one", "two")


@pytest.mark.parametrize("name", BACKENDS)
def test_case_08_a_call_that_failed_still_holds_its_inputs(name, library, monkeypatch):
    """So that whoever catches the error can compute the call on another backend."""
    module, ran = ready(name, library, monkeypatch)
    inputs = tensors()
    call = AttentionCall(*inputs, scale=0.1, mask="no tensor" if ran is None else None)
    monkeypatch.setattr(library_stand_ins, "exact", lambda *_: 1 / 0)
    with pytest.raises((ZeroDivisionError, TypeError)):
        module.run(call)
    assert all(x is y for x, y in zip((call.query, call.key, call.value), inputs, strict=True))


@pytest.mark.parametrize("masked", [False, True])
def test_batches_beyond_what_pytorch_s_kernels_take_are_split(masked):
    batch = 2**15 + 3
    query, key, value = tensors(batch, 2, 3, heads=1, key_heads=1, dim=8, dtype=torch.float32)
    mask = torch.rand(batch, 1, 2, 3) > 0.3 if masked else None
    if masked:
        mask[..., 0] = True
    call = AttentionCall(query, key, value, scale=0.5, mask=mask)
    out = loaded("TORCH_SDPA", Device("cpu")).run(call)
    expected = exact(query, key, value, 0.5, mask=mask)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", ["hopper", "portable"])
def test_triton_attn_gives_either_kernels_consecutive_heads(kernels, monkeypatch):
    """q, k and v interleaved in their last dimension, which the Hopper kernels refuse."""
    triton_attn = backends.load_module("TRITON_ATTN")
    given = []

    def kernel(query, key, value, **options):
        given.append((query, key, value))
        return query

    monkeypatch.setattr(triton_attn, "kernels", lambda call: kernels)
    monkeypatch.setattr(triton_attn.hopper, "hopper_attention", kernel)
    monkeypatch.setattr(triton_attn, "triton_attention", kernel)
    q, k, v = torch.randn(1, 9, 2, 64, 3).half().unbind(-1)
    triton_attn.run(AttentionCall(q, k, v, scale=0.125))
    assert all(x.stride(-1) == 1 and x.equal(y) for x, y in zip(given[0], (q, k, v)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_attn_names_the_kernels_that_run_once_inputs_are_cast(dtype, monkeypatch):
    triton_attn = backends.load_module("TRITON_ATTN")
    on_hopper = lambda device, dtype, head_dim, quant: triton_attn.hopper.unsupported((9, 0), dtype, head_dim, quant, "3.6.0")
    monkeypatch.setattr(triton_attn, "_hopper_reasons", on_hopper)
    q = torch.zeros(1, 9, 2, 64, dtype=dtype)
    assert triton_attn.variant(AttentionCall(q, q, q, scale=0.125)) == "hopper"


@pytest.mark.parametrize("keys", [16, 1023, 1024])
def test_triton_attn_leaves_sage_out_where_it_costs_more_than_it_saves(keys, monkeypatch, caplog):
    triton_attn = backends.load_module("TRITON_ATTN")
    given = []
    monkeypatch.setattr(triton_attn, "_hopper_reasons", lambda *_: ())
    monkeypatch.setattr(triton_attn.hopper, "hopper_attention", lambda q, k, v, **options: given.append(options["quant"]))
    triton_attn._say_short.cache_clear()
    quant, key = AttnQuantSpec("int8"), torch.zeros(1, keys, 2, 64, dtype=torch.float16)
    call = AttentionCall(torch.zeros(1, 9, 2, 64, dtype=torch.float16), key, key, scale=0.125, quant=quant)
    with caplog.at_level("WARNING", "trtllm_attention"):
        for _ in range(3):
            triton_attn.run(call)
    assert given == [quant if keys == 1024 else None] * 3
    assert triton_attn.variant(call) == ("hopper" if keys == 1024 else "hopper without SAGE")
    assert caplog.text.count("run without SAGE") == (keys < 1024)
