"""The cache: a text fed in parts is the text fed whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tolerances import assert_same
from triptych.attention import DecoderCache, Factored, LayerCache, MultiHeadAttention

D_MODEL, BATCH = 16, 3


def make_layer() -> MultiHeadAttention:
    return MultiHeadAttention(D_MODEL, 4, Factored(d_k=3, d_v=5, k_bias=True)).double()


@given(
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=8), path=st.sampled_from(["reference", "fast"])
)
def test_a_text_fed_in_chunks_gives_what_it_gives_whole(chunks: list[int], path: str) -> None:
    layer = make_layer()
    x = torch.randn(BATCH, sum(chunks), D_MODEL, dtype=torch.float64)
    cache = LayerCache()
    parts = [layer(part, causal=True, cache=cache, path=path).output for part in x.split(chunks, dim=1)]
    assert cache.length == sum(chunks)
    assert_same(torch.cat(parts, dim=1), layer(x, causal=True, path=path).output, kind="output")


def test_a_text_fed_token_by_token_gives_what_it_gives_whole_weights_included() -> None:
    layer = make_layer()
    x = torch.randn(BATCH, 40, D_MODEL, dtype=torch.float64)
    whole = layer(x, causal=True, need_weights=True)
    cache = LayerCache()
    for i in range(40):
        step = layer(x[:, i : i + 1], causal=True, cache=cache, need_weights=True)
        assert_same(step.output, whole.output[:, i : i + 1], kind="output")
        assert_same(step.weights, whole.weights[:, :, i : i + 1, : i + 1], kind="output")


def test_the_memory_is_read_once_and_then_from_the_cache() -> None:
    layer = make_layer()
    x = torch.randn(BATCH, 4, D_MODEL, dtype=torch.float64)
    memory = torch.randn(BATCH, 6, D_MODEL, dtype=torch.float64)
    mask = torch.ones(BATCH, 1, 1, 6, dtype=torch.bool)
    mask[0, ..., 4:] = False
    cache = LayerCache()
    expected = layer(x, memory=memory, mask=mask).output
    assert_same(layer(x, memory=memory, mask=mask, cache=cache).output, expected, kind="exact")
    unread = torch.full_like(memory, torch.nan)
    again = layer(x[:, 2:], memory=unread, mask=mask, cache=cache).output
    assert_same(again, expected[:, 2:], kind="output")
    assert cache.length == 6


@pytest.mark.parametrize("rows", [[2, 0, 1], [1, 1, 0], [2], [0, 0, 1, 2, 2]])
def test_rows_are_reordered_repeated_and_left_out(rows: list[int]) -> None:
    layer = make_layer()
    kept = torch.tensor(rows)
    x = torch.randn(BATCH, 9, D_MODEL, dtype=torch.float64)
    cache = LayerCache()
    layer(x[:, :3], causal=True, cache=cache)
    layer(x[:, 3:5], causal=True, cache=cache)
    cache.select(kept)
    rest = layer(x[kept, 5:], causal=True, cache=cache).output
    assert_same(rest, layer(x[kept], causal=True).output[:, 5:], kind="output")


def test_what_was_appended_comes_back_in_order() -> None:
    cache = LayerCache()
    assert cache.length == 0
    assert cache.entries == ()
    held = torch.randn(2, 3, 60, 4), torch.randn(2, 1, 60, 5)
    for start in range(0, 60, 7):
        returned = cache.append(tuple(entry[:, :, start : start + 7] for entry in held))
        for one, other in zip(returned, held, strict=True):
            assert_same(one, other[:, :, : start + 7], kind="exact")


def test_slots_without_a_token_hold_zeros_when_tokens_come_and_rows_are_chosen() -> None:
    keys, values = torch.randn(2, 3, 17, 4), torch.randn(2, 3, 17, 5)
    cache = LayerCache(even=8, skipped=3)
    for start, end in ((0, 7), (7, 8), (8, 9), (9, 17)):
        cache.append((keys[:, :, start:end], values[:, :, start:end]))
    assert cache.length == 20
    cache.select(torch.tensor([1, 1, 0]))
    for held, one in zip(cache.entries, (keys, values), strict=True):
        assert held.shape[2] == 24
        assert_same(held[:, :, 3:20], one[[1, 1, 0]], kind="exact")
        assert not held[:, :, :3].any()
        assert not held[:, :, 20:].any()


def test_appending_does_not_write_into_the_callers_tensors() -> None:
    entry = torch.zeros(1, 1, 40, 2)
    cache = LayerCache()
    cache.append((entry[:, :, :20],))
    cache.append((torch.ones(1, 1, 10, 2),))
    assert (entry == 0).all()


def test_a_decoder_cache_keeps_the_memory_unless_sentences_are_named() -> None:
    cache = DecoderCache(2)
    assert cache.length == 0
    for own, memory in zip(cache.own, cache.memory, strict=True):
        own.append((torch.arange(4.0).view(4, 1, 1, 1),))
        memory.append((torch.arange(2.0).view(2, 1, 1, 1),))
    cache.select(torch.tensor([3, 3, 0]))
    assert cache.length == 1
    assert [c.entries[0].flatten().tolist() for c in cache.own] == [[3, 3, 0]] * 2
    assert [c.entries[0].flatten().tolist() for c in cache.memory] == [[0, 1]] * 2
    cache.select(torch.tensor([1]), torch.tensor([1]))
    assert [c.entries[0].flatten().tolist() for c in cache.own] == [[3]] * 2
    assert [c.entries[0].flatten().tolist() for c in cache.memory] == [[1]] * 2
