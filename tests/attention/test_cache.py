"""What a cache holds; what layers compute with one is in `test_projections`."""

import torch

from tolerances import assert_same
from triptych.attention import DecoderCache, LayerCache


def test_what_was_appended_comes_back_in_order() -> None:
    cache = LayerCache()
    assert cache.length == 0
    assert cache.entries == ()
    held = torch.randn(2, 3, 60, 4), torch.randn(2, 1, 60, 5)
    for start in range(0, 60, 7):
        returned = cache.append(tuple(entry[:, :, start : start + 7] for entry in held))
        for one, other in zip(returned, held, strict=True):
            assert_same(one, other[:, :, : start + 7], kind="exact")


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
