"""Characters that a tokenizer does not know, in eleven scripts."""

import pytest

from triptych.text import TokenizerSpec, train_tokenizers
from triptych.text.training import train_tokenizer
from triptych.text.unknown import MOST_UNKNOWN, count_unknown, unknown_token, why_no_bits

TEXTS = {
    "latin": "The weather is nice today.",
    "german": "Über den Wolken muß die Freiheit grenzenlos sein.",
    "cyrillic": "Сегодня хорошая погода.",
    "greek": "Ο καιρός είναι ωραίος σήμερα.",
    "chinese": "今天天气很好。",
    "japanese": "今日は天気がいいです。",
    "korean": "오늘은 날씨가 좋습니다.",
    "arabic": "الطقس جميل اليوم.",
    "hindi": "आज मौसम अच्छा है।",
    "thai": "วันนี้อากาศดี",
    "emoji": "😀👍🏽🎉",
}


@pytest.mark.parametrize("known", TEXTS)
def test_characters_that_the_training_text_lacks_are_counted(known: str) -> None:
    tokenizer = train_tokenizer(TokenizerSpec(kind="characters", vocab_size=200), [TEXTS[known]])
    held = set(TEXTS[known])
    for name, text in TEXTS.items():
        ids = tokenizer.encode([text], add_special=True)[0]
        expected = sum(character not in held for character in text)
        assert count_unknown(tokenizer, text, ids) == expected, name
        assert (name == known) <= (expected == 0)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "bytes"])
def test_tokenizers_of_bytes_know_every_character(kind: str) -> None:
    tokenizer = train_tokenizer(TokenizerSpec(kind=kind, vocab_size=300), [TEXTS["latin"] * 20])
    pair = train_tokenizers(TokenizerSpec(vocab_size=300), [TEXTS["latin"]], [TEXTS["latin"]])
    for own in (tokenizer, pair.source):
        for text in TEXTS.values():
            assert count_unknown(own, text, own.encode([text], add_special=True)[0]) == 0


def test_one_token_for_several_unknown_characters_counts_all_of_them() -> None:
    tokenizer = train_tokenizer(TokenizerSpec(kind="characters", vocab_size=200), ["abc "])
    unknown = unknown_token(tokenizer)
    assert unknown is not None
    a, b = tokenizer.encode(["ab"])[0]
    assert count_unknown(tokenizer, "a今天天b", [a, unknown, b]) == 3
    assert count_unknown(tokenizer, "ab", [a, b]) == 0


def test_a_share_above_the_stated_one_has_no_bits_per_byte() -> None:
    assert why_no_bits(0.0) == why_no_bits(MOST_UNKNOWN) == ""
    assert why_no_bits(0.25).startswith("no bits per byte: 25.00% of the characters are unknown")
