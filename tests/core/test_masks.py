"""Which masks are lengths, how lengths and masks combine, and that a mask is read once."""

import gc
import math
import sys
import threading

import pytest
import torch

from trtllm_core import backends, masks
from trtllm_core.masks import MaskReader, as_4d, mask_refusal, suffix_lengths, with_lengths

KEYS = 10
HIDDEN = {
    "bool": None,
    "-inf": -math.inf,
    "finfo.min": torch.finfo(torch.float32).min,
    "bfloat16 finfo.min": torch.finfo(torch.bfloat16).min,
    "float16 finfo.min": torch.finfo(torch.float16).min,
}


def suffix_mask(lengths, hidden, shape):
    """Keys from `lengths[b]` on are hidden; `shape` ends in KEYS and starts with the batch."""
    attends = torch.arange(KEYS) < torch.tensor(lengths)[:, None]
    attends = attends.view(len(lengths), *(1,) * (len(shape) - 2), KEYS).expand(shape)
    if hidden == "bool":
        return attends.clone()
    dtype = getattr(torch, hidden.split()[0]) if " " in hidden else torch.float32
    return torch.zeros(shape, dtype=dtype).masked_fill(~attends, HIDDEN[hidden])


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize(
    "shape, lengths",
    [
        ((1, KEYS), [7]),  # 2-D is [query, key]
        ((1, 1, KEYS), [7]),
        ((1, 6, KEYS), [7]),
        ((2, 1, KEYS), [3, 10]),
        ((2, 1, 1, KEYS), [1, 9]),
        ((2, 4, 6, KEYS), [4, 4]),
    ],
)
def test_a_padded_suffix_becomes_lengths(hidden, shape, lengths):
    mask = suffix_mask(lengths, hidden, shape)
    found = MaskReader().key_lengths(mask, KEYS)
    assert found.dtype == torch.int32 and found.tolist() == lengths


def test_an_expanded_mask_is_read_by_its_row():
    mask = suffix_mask([6], "-inf", (1, 1, KEYS)).expand(3, 5, KEYS)
    assert MaskReader().key_lengths(mask, KEYS).tolist() == [6, 6, 6]


def not_padding():
    attends = torch.ones(1, 1, KEYS, dtype=torch.bool)
    prefix, hole, nothing = attends.clone(), attends.clone(), torch.zeros_like(attends)
    prefix[..., :3] = False
    hole[..., 4] = False
    yield "hides a prefix", prefix
    yield "hides one in the middle", hole
    yield "hides everything", nothing
    yield "causal", torch.ones(KEYS, KEYS, dtype=torch.bool).tril()
    rows = suffix_mask([7], "bool", (1, 4, KEYS))
    rows[0, 2] = True
    yield "differs between rows", rows
    heads = suffix_mask([7], "bool", (1, 2, 1, KEYS))
    heads[0, 1] = True
    yield "differs between heads", heads
    bias = suffix_mask([7], "-inf", (1, 1, KEYS))
    bias[..., 0] = 0.5
    yield "adds a bias", bias
    yield "hides only nearly", suffix_mask([7], "-inf", (1, 1, KEYS)).clamp_min(-100.0)
    yield "NaN", torch.full((1, 1, KEYS), math.nan)
    yield "of integers", torch.ones(1, 1, KEYS, dtype=torch.int64)
    yield "broadcast over keys", torch.ones(1, 1, 1, dtype=torch.bool)


@pytest.mark.parametrize("name, mask", list(not_padding()))
def test_case_10_every_other_mask_stays_a_mask(name, mask):
    assert MaskReader().key_lengths(mask, KEYS) is None


def test_a_mask_of_another_rank_is_refused():
    with pytest.raises(ValueError, match=r"2, 3 or 4 dimensions, not 1: \(10,\)"):
        as_4d(torch.zeros(KEYS))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_is_read_once_also_through_new_views(mode, monkeypatch):
    reads = []

    def counted(*arguments):
        reads.append(arguments)
        return suffix_lengths(*arguments)

    monkeypatch.setattr(masks, "suffix_lengths", counted)
    with mode():
        reader, mask = MaskReader(), suffix_mask([7], "-inf", (1, 1, KEYS))
        for _ in range(5):
            assert reader.key_lengths(mask[:, None], KEYS).tolist() == [7]
        assert len(reads) == 1
        reader.clear()
        reader.key_lengths(mask[:, None], KEYS)
        assert len(reads) == 2


def test_a_new_mask_is_never_taken_for_an_old_one():
    reader = MaskReader()
    for length in range(1, KEYS + 1):
        mask = suffix_mask([length], "-inf", (1, 1, KEYS))  # may well reuse the last one's memory
        assert reader.key_lengths(mask, KEYS).tolist() == [length]
        del mask
        gc.collect()
    assert len(reader._known) <= 2


def test_a_mask_changed_in_place_is_read_again():
    reader, mask = MaskReader(), suffix_mask([7], "bool", (1, 1, KEYS))
    assert reader.key_lengths(mask, KEYS).tolist() == [7]
    mask[..., 5:] = False
    assert reader.key_lengths(mask, KEYS).tolist() == [5]


@pytest.mark.parametrize("kind", ["none", "boolean", "additive"])
def test_lengths_and_a_mask_combine(kind):
    lengths = torch.tensor([4, 10], dtype=torch.int32)
    padding = suffix_mask([4, 10], "bool", (2, 1, 1, KEYS))
    keep = torch.rand(1, 1, 6, KEYS) > 0.5
    if kind == "none":
        assert torch.equal(with_lengths(None, lengths, KEYS), padding)
    elif kind == "boolean":
        assert torch.equal(with_lengths(keep, lengths, KEYS), keep & padding)
    else:
        bias = torch.randn(1, 1, 6, KEYS)
        combined = with_lengths(bias, lengths, KEYS)
        assert torch.equal(combined, bias.expand(2, 1, 6, KEYS).masked_fill(~padding, -math.inf))
    assert with_lengths(keep, None, KEYS) is keep


def test_a_refusal_names_layer_shape_and_two_backends_that_can():
    text = mask_refusal("SAGE_ATTN", "txt_in.blocks.0.self_attn", torch.zeros(1, 1, 77, 77))
    for part in ("txt_in.blocks.0.self_attn", "SAGE_ATTN", "(1, 1, 77, 77)", *masks.MASK_BACKENDS):
        assert part in text
    assert all(backends.requirements(name).mask == "any" for name in masks.MASK_BACKENDS)


def test_masks_read_by_several_threads():
    """One thread per GPU, all with one reader."""
    reader, wrong, kept = MaskReader(), [], []

    def read():
        for length in range(1, 400):
            try:
                mask = padding(length)
                kept.append(mask)
                if reader.host_key_lengths(mask, 400) != (length,):
                    wrong.append(length)
            except Exception as error:
                wrong.append(error)

    padding = lambda length: (torch.arange(400) < length).view(1, 1, 1, 400)
    threads = [threading.Thread(target=read) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
