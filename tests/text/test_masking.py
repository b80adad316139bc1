"""Rows of masked language models: what is hidden, and that it is said again."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.errors import UsageError
from triptych.running.text import Masking, MaskingSpec
from triptych.training.corpora.generated import generate_pairs
from triptych.training.corpora.packing import PackedBatches
from triptych.training.corpora.token_shards import TokenShards, write_shards
from triptych.training.corpora.tokenizer_training import TokenizerSpec, train_tokenizer, train_tokenizers

TEXTS = [target for _, target in generate_pairs(300, "train", 0)]
TOKENIZER = train_tokenizer(TokenizerSpec(vocab_size=400), TEXTS)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    return write_shards(TEXTS, TOKENIZER, tmp_path_factory.mktemp("shards"), tokens_per_shard=2000)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    return write_shards(TEXTS[:5], TOKENIZER, tmp_path_factory.mktemp("few"))


def batches_of(shards: TokenShards, **options: object) -> PackedBatches:
    spec = {name: options.pop(name) for name in [*options] if name in MaskingSpec.model_fields}
    masking = Masking(TOKENIZER, MaskingSpec.model_validate(spec))
    given_options = {"context": 32, "batch_size": 4, "seed": 1, **options}
    return PackedBatches(shards, masking=masking, **given_options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("share", "masked_share", "random_share"), [(0.15, 0.8, 0.1), (0.3, 0.8, 0.1), (0.3, 0.5, 0.5)]
)
def test_tokens_are_hidden_in_the_shares_asked_for(
    shards: TokenShards, share: float, masked_share: float, random_share: float
) -> None:
    batches = batches_of(shards, share=share, masked=masked_share, random=random_share)
    masked = other = kept = num_tokens = 0
    for epoch in range(3):
        for indices in batches.plan(epoch):
            batch = batches.collate(indices)
            chosen = batch.targets != -1
            ids, targets = batch.ids[chosen], batch.targets[chosen]
            masked += int((ids == TOKENIZER.mask_id).sum())
            kept += int((ids == targets).sum())
            other += int(((ids != targets) & (ids != TOKENIZER.mask_id)).sum())
            assert batch.num_target_tokens == int(chosen.sum())
            assert not torch.isin(targets, torch.tensor(sorted(TOKENIZER.special_ids))).any()
        num_tokens += shards.num_tokens
    total = masked + other + kept
    assert total / num_tokens == pytest.approx(share, abs=0.02)  # ends of documents are never hidden
    assert masked / total == pytest.approx(masked_share, abs=0.02)
    assert other / total == pytest.approx(random_share, abs=0.02)
    assert kept / total == pytest.approx(1 - masked_share - random_share, abs=0.02)


@given(st.integers(1, 9), st.integers(0, 3), st.booleans(), st.booleans())
@settings(max_examples=12, deadline=None)
def test_every_token_is_in_one_row_and_is_kept_or_said_again(
    few: TokenShards, context: int, epoch: int, whole: bool, shuffle: bool
) -> None:
    batches = batches_of(few, context=context, whole_words=whole, shuffle=shuffle, batch_size=64)
    found = []
    for indices in batches.plan(epoch):
        batch = batches.collate(indices)
        original = torch.where(batch.targets == -1, batch.ids, batch.targets)
        for row, index in enumerate(indices.tolist()):
            place = index % (few.num_tokens + context) - context
            begin, end = max(place, 0), min(place + context, few.num_tokens)
            found += list(zip(range(begin, end), original[row].tolist(), strict=False))
    assert sorted(found) == list(enumerate(few.tokens(0, few.num_tokens).tolist()))


def test_order_and_masks_are_a_function_of_seed_epoch_and_place(shards: TokenShards) -> None:
    def rows(epoch: int, **options: object) -> dict[int, tuple[list[int], list[int]]]:
        batches, found = batches_of(shards, **options), {}
        for indices in batches.plan(epoch)[:9]:
            batch = batches.collate(indices)
            pairs = zip(batch.ids.tolist(), batch.targets.tolist(), strict=True)
            found.update(dict(zip(indices.tolist(), pairs, strict=True)))
        return found

    assert rows(2) == rows(2)
    one_by_one = rows(2, batch_size=1)
    assert all(rows(2)[index] == row for index, row in one_by_one.items())
    fixed = [rows(epoch, shuffle=False) for epoch in (0, 1)]
    assert list(fixed[0].values()) != list(fixed[1].values())
    assert list(rows(0, shuffle=False, seed=2).values()) != list(fixed[0].values())


def test_whole_words_are_hidden_whole(shards: TokenShards) -> None:
    batches = batches_of(shards, whole_words=True, context=64)
    parts = 0
    for indices in batches.plan(0):
        batch = batches.collate(indices)
        original = torch.where(batch.targets == -1, batch.ids, batch.targets)
        for ids, targets in zip(original.tolist(), batch.targets.tolist(), strict=True):
            pieces = TOKENIZER.pieces(ids)
            for i in range(1, len(ids)):
                special = {ids[i], ids[i - 1]} & TOKENIZER.special_ids
                if not special and pieces[i][0].isalnum() and pieces[i - 1][-1].isalnum():
                    parts += 1
                    assert (targets[i] == -1) == (targets[i - 1] == -1), pieces[i - 1 : i + 1]
    assert parts > 1000


def unspaced(first: int, last: int, length: int) -> str:
    """Text without stops, of the characters of a range."""
    draw = random.Random(first)
    return "".join(chr(min(first + int(draw.expovariate(0.01)), last)) for _ in range(length))


# Texts without a space or a stop: Chinese, kana, Thai, Burmese and Khmer letters; and with spaces: Hindi,
# Arabic, Korean.
SCRIPTS = {
    "zh": unspaced(0x4E00, 0x9FFF, 4000),
    "ja": unspaced(0x3042, 0x30F3, 4000),
    "th": unspaced(0x0E01, 0x0E4E, 4000),
    "my": unspaced(0x1000, 0x1049, 4000),
    "km": unspaced(0x1780, 0x17D2, 4000),
    "hi": "यह किताब रोचक है और मुझे चाय पसंद है। " * 100,
    "ar": "هذا الكتاب ممتع وأحب شرب الشاي في الصباح. " * 100,
    "ko": "이 책은 재미있고 나는 차 마시는 것을 좋아합니다. " * 100,
}


@pytest.mark.parametrize("kind", ["bpe", "characters", "bytes"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_whole_words_hide_the_share_asked_for_in_every_script(script: str, kind: str) -> None:
    text = SCRIPTS[script]
    tokenizer = train_tokenizer(TokenizerSpec.model_validate({"kind": kind, "vocab_size": 400}), [text])
    ids = np.array(tokenizer.encode([text], add_special=False)[0])
    masking = Masking(tokenizer, MaskingSpec(whole_words=True))
    generator = np.random.default_rng(0)
    rows = [ids[start : start + 128] for start in range(0, len(ids) - 128, 128)]
    shares = [masking.hide(row, generator)[1].mean() for row in rows]
    assert np.mean(shares) == pytest.approx(0.15, abs=0.02)
    assert max(shares) < 0.25


def test_a_character_is_hidden_with_its_marks_and_all_of_its_bytes() -> None:
    text = "กำลัง 今天 e\u0323👍🏽 ก็"
    tokenizer = train_tokenizer(TokenizerSpec(kind="characters"), [text])
    ids = np.array(tokenizer.encode([text], add_special=False)[0])
    joined = Masking(tokenizer, MaskingSpec(whole_words=True))._joints
    assert joined is not None
    starts = np.flatnonzero(~np.concatenate([[False], joined.between(ids)]))
    words = [tokenizer.decode([part.tolist()])[0] for part in np.split(ids, starts[1:])]
    assert words == ["ก", "ำ", "ลั", "ง", " ", "今", "天", " ", "e\u0323", "👍🏽", " ", "ก็"]


def test_nothing_attends_to_what_fills_a_row_up(shards: TokenShards) -> None:
    batches = batches_of(shards, shuffle=False)
    *_, last = batches.plan(0)
    batch = batches.collate(last)
    length = shards.num_tokens % 32
    assert length
    assert batch.mask is not None
    assert not batch.mask[-1, 0, :length, length:].any()
    assert batch.mask[-1, 0, :length, :length].all()
    assert batches.collate(batches.plan(0)[0]).mask is None


def test_within_documents_a_token_meets_its_own_document_alone(shards: TokenShards) -> None:
    batches = batches_of(shards, within_documents=True, shuffle=False)
    document = np.searchsorted(shards.starts_within(0, shards.num_tokens), np.arange(64), side="right")
    mask = batches.collate(batches.plan(0)[0]).mask
    assert mask is not None
    for row in range(2):
        own = document[32 * row : 32 * row + 32]
        assert torch.equal(mask[row, 0], torch.from_numpy(own[:, None] == own[None, :]))


def test_a_tokenizer_without_a_mask_token_is_refused() -> None:
    tokenizer = train_tokenizers(TokenizerSpec(vocab_size=300), ["a"], []).source
    with pytest.raises(UsageError, match="no mask token"):
        Masking(tokenizer, MaskingSpec())


def test_a_row_of_special_tokens_has_a_target(tmp_path: Path) -> None:
    empty = write_shards(["a"], TOKENIZER, tmp_path)
    batches = batches_of(empty, context=1, batch_size=1, seed=0, shuffle=False)
    assert [batches.collate(indices).num_target_tokens for indices in batches.plan(0)] == [1, 1]


def test_pieces_are_readable(tmp_path: Path) -> None:
    ids = TOKENIZER.encode("a ä")[0]
    assert "".join(TOKENIZER.pieces(ids)).replace("<0xC3><0xA4>", "ä") == "a▁ä"
