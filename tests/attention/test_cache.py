"""What a cache holds; what layers compute with one is in `test_projections`."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tolerances import assert_same
from triptych.core.attention import DecoderCache, LayerCache


@given(st.lists(st.integers(1, 40), max_size=8))
def test_what_was_appended_comes_back_in_order(lengths: list[int]) -> None:
    cache, end = LayerCache(), 0
    assert (cache.length, cache.entries) == (0, ())
    held = torch.randn(2, 3, sum(lengths), 4), torch.randn(2, 1, sum(lengths), 5)
    for length in lengths:
        end += length
        returned = cache.append(tuple(entry[:, :, end - length : end] for entry in held))
        for one, other in zip(returned, held, strict=True):
            assert_same(one, other[:, :, :end], kind="exact")


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
