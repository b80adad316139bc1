from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.errors import UsageError
from triptych.running.text import TokenSequences
from triptych.training.corpora.encoded import EncodedCorpus
from triptych.training.corpora.pair_batches import TokenBatches


def make_corpus(lengths: list[tuple[int, int]]) -> EncodedCorpus:
    source = [[10 + index] * src for index, (src, _) in enumerate(lengths)]
    target = [[10 + index] * tgt for index, (_, tgt) in enumerate(lengths)]
    numbers = np.arange(len(lengths), dtype=np.int64) + 101
    return EncodedCorpus(TokenSequences.pack(source), TokenSequences.pack(target), numbers, "toy")


def make_batches(
    lengths: list[tuple[int, int]], max_tokens: int = 30, seed: int = 0, shuffle: bool = True
) -> TokenBatches:
    return TokenBatches(
        make_corpus(lengths), max_tokens=max_tokens, seed=seed, pad_id=0, bos_id=1, eos_id=2, shuffle=shuffle
    )


def as_lists(plan: list[np.ndarray]) -> list[list[int]]:
    return [batch.tolist() for batch in plan]


LENGTHS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=60)
MANY = [(1 + i % 7, 1 + i % 5) for i in range(200)]


@given(lengths=LENGTHS, max_tokens=st.integers(13, 60), epoch=st.integers(0, 5), shuffle=st.booleans())
@settings(deadline=None)
def test_every_pair_comes_once_and_no_batch_is_past_the_budget(
    lengths: list[tuple[int, int]], max_tokens: int, epoch: int, shuffle: bool
) -> None:
    batches = make_batches(lengths, max_tokens, shuffle=shuffle)
    plan = batches.plan(epoch)
    assert sorted(index for batch in plan for index in batch.tolist()) == list(range(len(lengths)))
    for indices in plan:
        batch = batches.collate(indices)
        assert batch.src.numel() <= max_tokens
        assert batch.tgt_in.numel() <= max_tokens
        assert batch.tgt_out.shape == batch.tgt_in.shape


@given(lengths=LENGTHS, epoch=st.integers(0, 5))
@settings(deadline=None)
def test_the_padding_waste_is_the_share_of_padding_in_the_tensors(
    lengths: list[tuple[int, int]], epoch: int
) -> None:
    batches = make_batches(lengths)
    sides = [
        side
        for plan in batches.plan(epoch)
        for side in (batches.collate(plan).src, batches.collate(plan).tgt_out)
    ]
    padded = sum(int((side == 0).sum()) for side in sides)
    assert batches.padding_waste(epoch) == pytest.approx(padded / sum(side.numel() for side in sides))


def test_a_plan_depends_on_seed_and_epoch_alone() -> None:
    assert as_lists(make_batches(MANY).plan(3)) == as_lists(make_batches(MANY).plan(3))
    assert as_lists(make_batches(MANY).plan(3)) != as_lists(make_batches(MANY).plan(4))
    assert as_lists(make_batches(MANY).plan(3)) != as_lists(make_batches(MANY, seed=1).plan(3))


def test_other_epochs_bring_other_pairs_together() -> None:
    batches = make_batches(MANY)
    groups = [{frozenset(batch.tolist()) for batch in batches.plan(epoch)} for epoch in (0, 1)]
    assert groups[0] != groups[1]


def test_without_shuffling_the_pairs_come_in_order_of_their_longer_side() -> None:
    batches = make_batches(MANY, shuffle=False)
    order = [index for batch in batches.plan(0) for index in batch.tolist()]

    def place(index: int) -> tuple[int, int, int]:
        src, tgt = (length + 1 for length in MANY[index])
        longer = max(src, tgt)
        return longer, src - tgt if longer % 2 else tgt - src, index

    assert order == sorted(range(len(MANY)), key=place)
    assert as_lists(batches.plan(0)) == as_lists(batches.plan(1))


@given(lengths=LENGTHS, epoch=st.integers(0, 5))
def test_shuffling_changes_neither_the_number_of_batches_nor_their_padding(
    lengths: list[tuple[int, int]], epoch: int
) -> None:
    shuffled, ordered = make_batches(lengths), make_batches(lengths, shuffle=False)
    assert len(shuffled.plan(epoch)) == len(ordered.plan(0))
    assert shuffled.padding_waste(epoch) == pytest.approx(ordered.padding_waste(0))


@pytest.mark.parametrize("max_tokens", [1024, 4096, 8192])
def test_there_is_less_padding_than_in_order_of_the_target_in_about_as_many_batches(max_tokens: int) -> None:
    """Lengths of sentences as they are in translations: skewed, and alike on both sides."""
    generator = np.random.default_rng(0)
    tgt = 1 + generator.poisson(generator.gamma(6.0, 2.5, 20_000))
    src = 1 + generator.binomial(tgt, 0.85) + generator.poisson(2.0, len(tgt))
    lengths = list(zip(src.tolist(), tgt.tolist(), strict=True))
    num_batches, waste = sorted_by_target(lengths, max_tokens)
    batches = make_batches(lengths, max_tokens)
    assert len(batches.plan(0)) == pytest.approx(num_batches, rel=0.03)
    assert batches.padding_waste(0) < waste / 2


def sorted_by_target(lengths: list[tuple[int, int]], max_tokens: int) -> tuple[int, float]:
    """Batches and padding where pairs are sorted by target, then source, and batches are full."""
    parts: list[list[tuple[int, int]]] = [[]]
    for tgt, src in sorted((tgt + 1, src + 1) for src, tgt in lengths):
        widest = max(max(pair) for pair in [*parts[-1], (tgt, src)])
        if widest * (len(parts[-1]) + 1) > max_tokens:
            parts.append([])
        parts[-1].append((tgt, src))
    slots = sum(len(part) * (max(t for t, _ in part) + max(s for _, s in part)) for part in parts)
    return len(parts), 1 - sum(src + tgt + 2 for src, tgt in lengths) / slots


def test_a_batch_is_cut_short_where_its_padding_would_cost_more_than_a_batch() -> None:
    few_short_ones = make_batches([(19, 19)] + [(4, 4)] * 3, max_tokens=100, shuffle=False)
    assert as_lists(few_short_ones.plan(0)) == [[1, 2, 3], [0]]
    nearly_as_long = make_batches([(24, 24), (23, 23)] * 2, max_tokens=100, shuffle=False)
    assert as_lists(nearly_as_long.plan(0)) == [[1, 3, 0, 2]]


def test_a_corpus_without_pairs_has_no_batches() -> None:
    assert make_batches([]).plan(0) == []


def test_batches_are_as_large_as_the_budget_allows() -> None:
    batches = make_batches([(4, 4)] * 10, max_tokens=20)
    assert sorted(len(batch) for batch in batches.plan(0)) == [2, 4, 4]
    assert batches.padding_waste(0) == 0.0


def test_a_batch_holds_padded_ids_with_begin_and_end() -> None:
    batch = make_batches([(1, 3), (2, 1)]).collate(np.array([1, 0]))
    torch.testing.assert_close(batch.src, torch.tensor([[11, 11, 2], [10, 2, 0]]))
    torch.testing.assert_close(batch.tgt_in, torch.tensor([[1, 11, 0, 0], [1, 10, 10, 10]]))
    torch.testing.assert_close(batch.tgt_out, torch.tensor([[11, 2, 0, 0], [10, 10, 10, 2]]))
    assert batch.line_numbers == (102, 101)
    assert batch.num_target_tokens == 6


@given(lengths=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1), data=st.data())
def test_rows_hold_the_ids_of_their_pairs(lengths: list[tuple[int, int]], data: st.DataObject) -> None:
    batches = make_batches(lengths)
    corpus = make_corpus(lengths)
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=8))
    batch = batches.collate(np.array(chosen))
    for row, index in enumerate(chosen):
        src, tgt = corpus.source[index].tolist(), corpus.target[index].tolist()
        for side, ids in ((batch.src, [*src, 2]), (batch.tgt_in, [1, *tgt]), (batch.tgt_out, [*tgt, 2])):
            assert side[row].tolist() == ids + [0] * (side.shape[1] - len(ids))
    assert batch.src.shape[1] == max(lengths[index][0] for index in chosen) + 1
    assert batch.tgt_out.shape[1] == max(lengths[index][1] for index in chosen) + 1


def test_a_pair_past_the_budget_is_refused_with_its_line_and_both_numbers() -> None:
    with pytest.raises(
        UsageError, match=r"toy, line 102: a side of 31 tokens, .* is past max_tokens = 30 per"
    ):
        make_batches([(3, 3), (4, 30)])


def test_a_pair_that_fills_the_budget_alone_is_kept() -> None:
    assert as_lists(make_batches([(29, 1)]).plan(0)) == [[0]]


def weighted(weights: list[float], **options: int) -> TokenBatches:
    corpus = replace(make_corpus([MANY[i % 200] for i in range(len(weights))]), weights=np.array(weights))
    return TokenBatches(
        corpus, **{"max_tokens": 30, "seed": 0, "pad_id": 0, "bos_id": 1, "eos_id": 2} | options
    )


@given(
    weights=st.lists(st.sampled_from([0.01, 0.25, 0.5, 1.0, 1.5, 3.0]), min_size=1, max_size=60),
    epoch=st.integers(0, 5),
)
@settings(deadline=None)
def test_an_epoch_reads_each_pair_as_often_as_its_weight_says(weights: list[float], epoch: int) -> None:
    drawn = Counter(index for batch in weighted(weights).plan(epoch) for index in batch.tolist())
    assert drawn
    for index, weight in enumerate(weights):
        least = int(weight)
        assert least <= drawn[index] <= least + 1 + (sum(weights) < 1)
    for weight in {*weights}:
        of_weight = [index for index, one in enumerate(weights) if one == weight]
        number = sum(drawn[index] for index in of_weight)
        assert abs(number - weight * len(of_weight)) <= 1


def test_a_fraction_is_drawn_anew_in_each_epoch_and_reaches_every_pair() -> None:
    batches = weighted([0.25] * 40 + [1.0] * 40)
    epochs = [[index for batch in batches.plan(epoch) for index in batch.tolist()] for epoch in range(60)]
    assert epochs[3] == [index for batch in batches.plan(3) for index in batch.tolist()]
    assert epochs[3] != epochs[4]
    assert {len(epoch) for epoch in epochs} <= {49, 50, 51}
    times = Counter(index for epoch in epochs for index in epoch)
    assert all(times[index] == 60 for index in range(40, 80))
    assert all(5 <= times[index] <= 28 for index in range(40))
    assert batches.num_target_tokens == round(
        sum(weight * (MANY[i][1] + 1) for i, weight in enumerate([0.25] * 40 + [1.0] * 40))
    )


def test_pieces_of_an_epoch_are_those_of_its_batches() -> None:
    usual = make_corpus(MANY)
    epochs = [make_corpus([(src + epoch, tgt) for src, tgt in MANY]) for epoch in range(4)]
    batches = TokenBatches(
        usual, max_tokens=30, seed=0, pad_id=0, bos_id=1, eos_id=2, of_epoch=epochs.__getitem__
    )
    for epoch in (3, 0, 2, 3):
        plain = TokenBatches(epochs[epoch], max_tokens=30, seed=0, pad_id=0, bos_id=1, eos_id=2)
        for ours, theirs in zip(batches.plan(epoch), plain.plan(epoch), strict=True):
            assert torch.equal(batches.collate(ours).src, plain.collate(theirs).src)
            assert batches.collate(ours).line_numbers == plain.collate(theirs).line_numbers
        assert batches.padding_waste(epoch) == plain.padding_waste(epoch)
