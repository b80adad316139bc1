"""Tokenizers of others' checkpoints: the same ids and texts as transformers, and what is refused."""

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers

from checkpoints.tiny_spm import BYTE_PIECES, PIECES, RULES, Piece, spm
from triptych.errors import DataError, UsageError
from triptych.running.text import (
    PretrainedTokenizer,
    StreamDecoder,
    TextPair,
    load_tokenizer,
    read_tokenizer,
)

SHARED = Path(__file__).parents[3] / "shared" / "checkpoints"
END = "<|endoftext|>"
CORPUS = [
    "The quick brown fox jumps over the lazy dog. Don't you? I'm here; they've gone, we're not .",
    "Straße, Äpfel und Öl: 12345 naïve cafés. 日本語のテキスト, 中文文本 und русский текст 🙂.",
    "def f(x):\n    return {'a': x ** 2}  # a comment\n\n\tend",
] * 3
TEXTS = [
    "",
    " ",
    "   two  spaces   ",
    "The quick brown fox.",
    "Don't you 've it ? yes , no !",
    "tabs\tand\nnew\r\nlines\n\n\nmany",
    "Straße ÄÖÜ naïve e\u0301 \u0041\u030a",
    "中文 and 日本語のテキスト",
    "🙂👩‍👩‍👧 \U0001f600 zero\u200bwidth \u00a0nbsp \ufeffbom",
    "ﬁne ｅ… \u1100\u1161",
    "1234567890 3.14 -1e-9 ０１２",
    "a" * 60,
    "The end<|endoftext|>The start",
    "I [MASK] you <mask> and <s> or </s> [SEP] <unk> <pad>",
    "ababa aabaab b c <x> ab...",
    "\x01\x7f control \ufffd",
    "CAPITALS Türkçe İstanbul ǅ",
    "سلام عليكم، كيف الحال؟ שָׁלוֹם",
    "नमस्ते क्\u200dष किताबें ಕನ್ನಡ தமிழ்",
    "สวัสดีครับ ភាសាខ្មែរ မြန်မာ",
    "한국어 \u1112\u1161\u11ab\u1100\u116e\u11a8 ქართული Ελληνικά",
    "Tiê\u0301ng Việt a\u0323\u0302 \u200c\u200d\u2060 🇩🇪🏴\U000e0067\U000e0062\U000e007f ❤️",
    "The <extra_id_0> fox<extra_id_1>jumps <|im_start|>user</s>",
]
# Those that spell a special token of one of the tokenizers here.
SPELLED = [text for text in TEXTS if "<" in text or "[MASK]" in text]


def byte_level(folder: Path, **options: Any) -> None:
    """GPT-2's two files."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(CORPUS, trainer)
    inner.model.save(str(folder))
    configure(folder, **options)


def configure(folder: Path, model_type: str | None = None, **options: Any) -> None:
    if options:
        (folder / "tokenizer_config.json").write_text(json.dumps(options))
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


def gpt2(folder: Path) -> None:
    byte_level(folder, model_type="gpt2", tokenizer_class="GPT2Tokenizer")


def neox_with_a_map(folder: Path) -> None:
    byte_level(folder, model_type="gpt_neox", tokenizer_class="GPTNeoXTokenizer", pad_token="<pad>")
    tokens = {"bos_token": END, "eos_token": {"content": "</s>", "lstrip": False}, "unk_token": END}
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))


def word_pieces(folder: Path, **options: Any) -> None:
    inner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=False)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=250, special_tokens=special, show_progress=False)
    inner.train_from_iterator(CORPUS + [text.lower() for text in CORPUS], trainer)
    inner.model.save(str(folder))
    configure(folder, **options)


def bert(folder: Path) -> None:
    word_pieces(folder, model_type="bert")


def sentence_pieces(folder: Path, name: str, kind: str, *more: Piece, **options: Any) -> None:
    rules = RULES if kind == "unigram" else {}
    bytes_too = BYTE_PIECES if kind == "bpe" else []
    letters: list[Piece] = [(letter, -5.0, "normal") for letter in "dghjklmnopqrstuvwxyzTI"]
    pieces = [*PIECES[:3], *more, *bytes_too, *PIECES[3:], *letters]
    (folder / name).write_bytes(spm(pieces, kind, rules, byte_fallback=kind == "bpe"))
    configure(folder, **options)


def pieces_of_llama(folder: Path, **options: Any) -> None:
    options = {"model_type": "llama", "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, **options}
    sentence_pieces(folder, "tokenizer.model", "bpe", **options)


def llama(folder: Path) -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None}
    pieces_of_llama(folder, add_eos_token=False, legacy=False, **tokens)


def gemma(folder: Path) -> None:
    sentence_pieces(
        folder,
        "tokenizer.model",
        "bpe",
        ("<pad>", 0.0, "control"),
        model_type="gemma",
        tokenizer_class="GemmaTokenizer",
        **{"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>", "mask_token": None},
    )


def xlm_roberta(folder: Path) -> None:
    sentence_pieces(
        folder,
        "sentencepiece.bpe.model",
        "unigram",
        model_type="xlm-roberta",
        tokenizer_class="XLMRobertaTokenizer",
    )


def whole(folder: Path) -> None:
    """A tokenizer.json whose special tokens are partly in tokenizer_config.json alone."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator(CORPUS, trainer)
    inner.add_special_tokens([AddedToken(END, normalized=False)])
    inner.add_tokens([AddedToken("brown fox")])
    inner.enable_truncation(8)
    inner.enable_padding()
    inner.save(str(folder / "tokenizer.json"))
    configure(
        folder,
        tokenizer_class="PreTrainedTokenizerFast",
        **{"eos_token": END, "pad_token": "[PAD]", "additional_special_tokens": ["<s>"]},
        clean_up_tokenization_spaces=True,
    )


def whole_word_pieces(folder: Path) -> None:
    """A tokenizer.json of words, whose decoded text is cleaned up."""
    inner = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, ".": 2, "n't": 3, "b": 4}, "[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.save(str(folder / "tokenizer.json"))
    options = {"unk_token": "[UNK]", "clean_up_tokenization_spaces": True}
    configure(folder, tokenizer_class="PreTrainedTokenizerFast", **options)


# Rows of `test_tokenizer_classes.py` are made of settings alone.
MAKERS: list[Callable[[Path], None]] = [
    *(gpt2, neox_with_a_map, bert, llama, gemma, xlm_roberta, whole, whole_word_pieces)
]


def oracle(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def assert_as_transformers(folder: Path) -> None:
    ours, theirs = load_tokenizer(folder), oracle(folder)
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False, truncation=False)
        assert ours.encode(text, parse_special=True) == [ids], text
        plain = ours.encode(text)[0]
        read = {ours.vocabulary[token] for token in ours.special_ids & {*plain}}
        assert read <= {"[UNK]", "<unk>", ours.vocabulary[ours.unk_id or 0]}, text
        assert plain == ids or text in SPELLED, text
        around = theirs.encode(text, truncation=False)
        assert ours.encode(text, add_special=True, parse_special=True) == [around], text
        for skip in (True, False):
            assert ours.decode([around], skip_special=skip)[0] == theirs.decode(
                around, skip_special_tokens=skip
            ), text
    if "CodeLlama" not in type(theirs).__name__:  # it reads a pair as what surrounds a gap
        assert_pairs_as_transformers(ours, theirs)
    for name in ("bos", "eos", "pad", "unk", "mask"):
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_token_id"), name
    added = theirs.added_tokens_decoder.items()
    assert ours.special_ids == {token for token, content in added if content.special}
    assert len(set(ours.vocabulary)) == ours.vocab_size == max(theirs.get_vocab().values()) + 1


def assert_pairs_as_transformers(ours: PretrainedTokenizer, theirs: Any) -> None:
    pairs = [TextPair(*pair) for pair in zip(TEXTS, reversed(TEXTS), strict=True)]
    found = ours.encode_pairs(pairs, parse_special=True)
    for pair, own in zip(pairs, found, strict=True):
        expected = theirs(pair.first, pair.second, truncation=False)
        assert own.ids == expected["input_ids"], pair
        assert own.types == expected.get("token_type_ids"), pair
        parts = expected.sequence_ids(0)
        assert own.second == (parts.index(1) if 1 in parts else None), pair


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", MAKERS)
def test_a_tokenizer_gives_the_ids_and_texts_of_transformers(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path)
    assert_as_transformers(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_shared_checkpoints_give_the_ids_and_texts_of_transformers(name: str) -> None:
    if not (SHARED / name).exists():
        pytest.skip("the shared checkpoints are not here")
    assert_as_transformers(SHARED / name)


def test_special_tokens_of_a_text_are_text_unless_asked_for(tmp_path: Path) -> None:
    gpt2(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_id in tokenizer.encode(f"a{END}", parse_special=True)[0]
    (ids,) = tokenizer.encode(f"a{END}")
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode([ids]) == [f"a{END}"]


@pytest.mark.parametrize("make", [whole, llama])
def test_a_tokenizer_survives_saving_and_pickling(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.save(tmp_path / "saved.json")
    for again in (read_tokenizer(tmp_path / "saved.json"), pickle.loads(pickle.dumps(tokenizer))):
        assert isinstance(again, PretrainedTokenizer)
        assert again.to_json() == tokenizer.to_json()
        assert again.encode(TEXTS, add_special=True) == tokenizer.encode(TEXTS, add_special=True)
        assert (again.eos_id, again.bos_id) == (tokenizer.eos_id, tokenizer.bos_id)


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> list[PretrainedTokenizer]:
    found = []
    for make in (gpt2, llama, bert, xlm_roberta):
        folder = tmp_path_factory.mktemp(make.__name__)
        make(folder)
        found.append(load_tokenizer(folder))
    return found


@given(st.text(max_size=30))
@settings(max_examples=60, deadline=None)
def test_a_text_that_is_streamed_is_the_text(streamed: list[PretrainedTokenizer], text: str) -> None:
    for tokenizer in streamed:
        (ids,) = tokenizer.encode(text, add_special=True)
        for skip in (True, False):
            stream = StreamDecoder(tokenizer, skip_special=skip)
            parts = [stream.push(token) for token in ids]
            assert "".join(parts) + stream.finish() == tokenizer.decode([ids], skip_special=skip)[0]
            if "\ufffd" not in text:
                assert not any("\ufffd" in part for part in parts)


@given(st.lists(st.integers(0, 419), max_size=30))
@settings(max_examples=60, deadline=None)
def test_tokens_that_are_no_text_are_streamed_as_they_are_decoded(
    streamed: list[PretrainedTokenizer], ids: list[int]
) -> None:
    stream = StreamDecoder(streamed[0])
    parts = [stream.push(token) for token in ids]
    assert "".join(parts) + stream.finish() == streamed[0].decode([ids])[0]


def test_broken_bytes_are_not_held_back_for_ever(streamed: list[PretrainedTokenizer]) -> None:
    tokenizer = streamed[0]
    token = tokenizer.vocabulary.index("Ģ")  # the byte 0x80, which begins no character
    stream = StreamDecoder(tokenizer)
    assert sum(len(stream.push(token)) for _ in range(40)) >= 37


def test_a_tokenizer_that_does_not_fit_the_embedding_is_refused(tmp_path: Path) -> None:
    gpt2(tmp_path)
    assert load_tokenizer(tmp_path, vocab_size=420).vocab_size == 420
    with pytest.raises(DataError, match=r"^\S+ does not fit the model: token .* has the id 419, .* 419 rows"):
        load_tokenizer(tmp_path, vocab_size=419)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no tokenizer: none of tokenizer\.json, vocab\.json with"):
        load_tokenizer(tmp_path)
    gpt2(tmp_path)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(DataError, match="has no tokenizer"):
        load_tokenizer(tmp_path)


def test_a_text_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    gpt2(tmp_path)
    with pytest.raises(UsageError, match="text 2 holds half of a surrogate pair"):
        load_tokenizer(tmp_path).encode(["fine", "not \udcff"])


DAMAGE: dict[str, tuple[Callable[[Path], None], str, bytes]] = {
    "no JSON": (whole, "tokenizer.json", b"{"),
    "no tokenizer": (whole, "tokenizer.json", b"{}"),
    "a list": (whole, "tokenizer_config.json", b"[]"),
    "brackets": (whole, "tokenizer_config.json", b"[" * 100_000),
    "no UTF-8": (whole, "tokenizer_config.json", b'"\xff"'),
    "an id far away": (
        whole,
        "tokenizer.json",
        b'{"model": {"type": "BPE", "vocab": {"a": 99999999999}, "merges": []}}',
    ),
    "half of a pair": (whole, "tokenizer_config.json", b'{"eos_token": "\\ud800"}'),
    "a token that is a number": (whole, "tokenizer_config.json", b'{"eos_token": 7}'),
    "an id that is a word": (gpt2, "tokenizer_config.json", b'{"added_tokens_decoder": {"x": "a"}}'),
    "an id of another token": (gpt2, "tokenizer_config.json", b'{"added_tokens_decoder": {"7": "zzz"}}'),
    "ids that are words": (gpt2, "vocab.json", b'{"a": "b"}'),
    "merges of nothing": (gpt2, "merges.txt", b"#version: 0.2\nzz qq\n"),
    "merges of three": (gpt2, "merges.txt", b"a b c\n"),
    "no unknown word": (bert, "vocab.txt", b"a\nb\n"),
    "vocabulary that is not text": (bert, "vocab.txt", b"\xff\xfe"),
    "no model": (llama, "tokenizer.model", b"\x00\x01\x02"),
    "an empty model": (llama, "tokenizer.model", b""),
    "a model of another kind": (llama, "tokenizer.model", spm(PIECES, "unigram", RULES)),
    "a class nobody knows": (llama, "tokenizer_config.json", b'{"tokenizer_class": "FooTokenizer"}'),
    "templates that are numbers": (gpt2, "tokenizer_config.json", b'{"chat_template": [1]}'),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_file_is_refused_in_one_line_that_names_it(case: str, tmp_path: Path) -> None:
    make, name, content = DAMAGE[case]
    make(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as refused:
        load_tokenizer(tmp_path)
    message = str(refused.value)
    assert "\n" not in message
    assert str(tmp_path) in message


@pytest.mark.parametrize(("make", "lacking"), [(bert, "transformers"), (llama, "google.protobuf")])
def test_older_files_need_an_extra_that_is_named(
    make: Callable[[Path], None], lacking: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make(tmp_path)
    monkeypatch.setitem(sys.modules, lacking, None)
    said = rf"without tokenizer\.json needs {lacking}: pip install 'triptych\[run\]'"
    with pytest.raises(UsageError, match=said):
        load_tokenizer(tmp_path)


def test_settings_of_older_files_name_no_file_and_no_code(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "checkpoint", str(tmp_path / "vocab.json")
    folder.mkdir()
    gpt2(folder)
    wanted = load_tokenizer(folder).to_json()
    Path(elsewhere).write_text('{"a": 0}')
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    names = ("vocab", "vocab_file", "tokenizer_file", "merges_file", "init_inputs", "fast_tokenizer_files")
    paths: dict[str, Any] = dict.fromkeys(names, elsewhere)
    code = {"auto_map": {"AutoTokenizer": ["mine.Tokenizer", None]}}
    configure(folder, tokenizer_class="GPT2Tokenizer", **paths, **code)
    assert load_tokenizer(folder).to_json() == wanted
    assert not (tmp_path / "executed").exists()


def test_a_regular_expression_past_a_limit_of_the_library_is_said_to_be_that(tmp_path: Path) -> None:
    whole(tmp_path)
    record = json.loads((tmp_path / "tokenizer.json").read_text())
    deep = {"type": "Split", "pattern": {"Regex": "(?:" * 5000 + "a" + ")" * 5000}, "invert": False}
    record["pre_tokenizer"] = {**deep, "behavior": "Isolated"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(record))
    with pytest.raises(
        DataError, match="a regular expression that the tokenizers library does not run"
    ) as it:
        load_tokenizer(tmp_path)
    assert "damaged" not in str(it.value)
