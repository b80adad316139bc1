"""Characters that a tokenizer does not know, in eleven scripts."""

import json
import string

import pytest

from triptych.running.text import Tokenizer, load_tokenizer
from triptych.running.text.unknown_characters import MOST_UNKNOWN, count_unknown, unknown_token, why_no_bits
from triptych.training.corpora.tokenizer_training import TokenizerSpec, train_tokenizer, train_tokenizers

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


@pytest.fixture(scope="module")
def with_special_tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer of the characters a to z, with <s> in front of every text."""
    import tokenizers

    folder = tmp_path_factory.mktemp("tokenizer")
    special = ["<unk>", "<s>", "<|im_end|>"]
    letters = {name: number for number, name in enumerate([*special, *string.ascii_lowercase, " "])}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(letters, [], unk_token="<unk>"))
    inner.decoder = tokenizers.decoders.Fuse()  # type: ignore[assignment]
    inner.add_special_tokens(special)
    inner.post_processor = tokenizers.processors.TemplateProcessing(  # type: ignore[assignment]
        single=["<s>", "$A"], special_tokens=[("<s>", letters["<s>"])]
    )
    inner.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    ("text", "expected", "as_text"),
    [
        ("ab", 0, 0),
        ("ab<|im_end|>", 0, 5),  # "<", "|", "_", "|", ">"
        ("ab<|im_end|>今c", 1, 6),
        ("<s>a<s>今b<|im_end|><|im_end|>c", 1, 15),
        ("a<unk>b", 0, 2),
        ("a<unk>今b<unk>", 1, 5),
        ("a<unk>今b", 1, 3),
    ],
)
def test_special_tokens_that_a_text_spells_out_are_not_unknown(
    with_special_tokens: Tokenizer, text: str, expected: int, as_text: int
) -> None:
    tokenizer = with_special_tokens
    (ids,) = tokenizer.encode([text], add_special=True, parse_special=True)
    assert count_unknown(tokenizer, text, ids) == expected
    (ids,) = tokenizer.encode([text], add_special=True)
    assert count_unknown(tokenizer, text, ids, "text") == as_text


def test_a_share_above_the_stated_one_has_no_bits_per_byte() -> None:
    assert why_no_bits(0.0) == why_no_bits(MOST_UNKNOWN) == ""
    assert why_no_bits(0.25).startswith("no bits per byte: 25.00% of the characters are unknown")
