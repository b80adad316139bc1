"""Training of tokenizers for translators and language models."""

import hashlib
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, final

import tokenizers
from pydantic import BaseModel, ConfigDict, Field, model_validator
from tokenizers import decoders, models, pre_tokenizers, trainers

from triptych.errors import DataError, UsageError
from triptych.files import write_text
from triptych.running.text import (
    BYTE_ALPHABET,
    BYTE_OF,
    SPECIAL_TOKENS,
    ByteLevelTokenizer,
    PretrainedRecord,
    PretrainedTokenizer,
    SentencePieceTokenizer,
    SentenceTokenizer,
    TokenizerPair,
    assemble,
)
from triptych.training.corpora.encoded import add_texts
from triptych.untrusted import LONGEST_TOKENIZER, read_limited

_PAD = "<pad>"
_EOS = "<eos>"
_MASK = "<mask>"
_UNK = "<unk>"
_SPECIAL = [_PAD, _EOS, _MASK]
_LONGEST_WORD = 1000
# Words before training: letters, digits, other marks, or white space.
_LONG_WORD = re.compile(
    "|".join(
        f"{one}{{{_LONGEST_WORD}}}(?={one})"
        for one in (r"[^\W\d_]", r"\d", r"(?:[^\w\s]|_)", r"\s")
    )
)
_BYTES = sorted(BYTE_OF, key=BYTE_OF.__getitem__)


@final
class TokenizerSpec(BaseModel):
    """Specification of the tokenizers.

    Attributes:
        kind: "bpe", byte-pair encoding; "unigram", the unigram language model; "sentencepiece", an
            existing model (translators only); for language models also "characters" of the training text,
            and the 256 "bytes".
        vocab_size: most tokens per vocabulary, bytes and specials included; a small text yields fewer, and of
            characters the most frequent are kept. An existing model has its number of tokens.
        joint: one vocabulary for both sides, or one for each.
        min_frequency: how often a pair of pieces must occur to be merged (BPE only; 2 by default).
        model: file of a SentencePiece model, for kind = "sentencepiece"; of the source if `joint` is false.
        target_model: file of the SentencePiece model of the target, if `joint` is false.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["bpe", "unigram", "sentencepiece", "characters", "bytes"] = "bpe"
    vocab_size: int = Field(default=8000, ge=1, le=10**9)
    joint: bool = True
    min_frequency: int | None = Field(default=None, ge=1, le=10**9)
    model: str | None = Field(default=None, min_length=1)
    target_model: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _models_are_given(self) -> "TokenizerSpec":
        exists = self.kind == "sentencepiece"
        for name, is_needed in (
            ("model", exists),
            ("target_model", exists and not self.joint),
        ):
            is_given = getattr(self, name) is not None
            if is_needed and not is_given:
                raise ValueError(
                    f'{name} is missing: kind = "sentencepiece" needs model, and without joint target_model'
                )
            if is_given and not is_needed:
                raise ValueError(
                    f'{name} goes with kind = "sentencepiece"'
                    f"{' and joint = false' if name == 'target_model' else ''}: leave it out"
                )
        return self

    @model_validator(mode="after")
    def _check_that_the_options_agree(self) -> "TokenizerSpec":
        if self.kind != "bpe" and self.min_frequency is not None:
            raise ValueError(
                f'min_frequency goes with kind = "bpe", but kind is "{self.kind}"; leave it out'
            )
        return self


def train_tokenizers(
    spec: TokenizerSpec, source_texts: Iterable[str], target_texts: Iterable[str]
) -> TokenizerPair:
    """Train the tokenizers of source and target; the same texts give the same tokenizers."""
    if spec.kind not in ("bpe", "unigram"):
        raise UsageError(
            f'tokenizer.kind = "{spec.kind}" goes with language models; set "bpe" or "unigram"'
        )

    def train(texts: Iterable[str]) -> SentenceTokenizer:
        return ByteLevelTokenizer(_train_pieces(spec, texts, assemble, SPECIAL_TOKENS))

    if spec.joint:
        tokenizer = train(chain(source_texts, target_texts))
        return TokenizerPair(tokenizer, tokenizer)
    return TokenizerPair(train(source_texts), train(target_texts))


def read_sentencepiece(spec: TokenizerSpec, base: Path) -> TokenizerPair:
    """Read the SentencePiece models of a specification; paths are relative to `base`."""

    def read(path: str) -> SentencePieceTokenizer:
        try:
            content = read_limited(base / path, LONGEST_TOKENIZER)
        except OSError as error:
            raise DataError(
                f"tokenizer: {path} cannot be read: {error.strerror}"
            ) from None
        return SentencePieceTokenizer.from_model(content, path)

    assert spec.model is not None, 'it goes with kind = "sentencepiece"'
    source = read(spec.model)
    target = source if spec.target_model is None else read(spec.target_model)
    return TokenizerPair(source, target)


def train_tokenizer(spec: TokenizerSpec, texts: Iterable[str]) -> PretrainedTokenizer:
    """Train the tokenizer of a language model; the same texts give the same tokenizer."""
    if spec.kind == "sentencepiece":
        raise UsageError(
            'tokenizer.kind = "sentencepiece" goes with translators; set "bpe" or "unigram"'
        )
    # All kinds except "characters" encode every text. A character outside the vocabulary becomes `<unk>`;
    # `decode` skips it. `<eos>` ends a document, and begins a text (`bos_id`).
    special = _SPECIAL
    match spec.kind:
        case "bytes":
            inner = _gpt2_like(
                models.BPE(_number_tokens([*_SPECIAL, *_BYTES]), []),
                use_regex=False,
            )
        case "characters":
            special = [*_SPECIAL, _UNK]
            vocab = _number_tokens(
                [*special, *_characters(texts, spec.vocab_size - len(special))]
            )
            inner = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token=_UNK))
            inner.decoder = decoders.Fuse()
        case _:
            inner = _train_pieces(spec, texts, _gpt2_like, _SPECIAL)
    # A piece includes the space before it, and so does the mask token in place of a piece (`lstrip`).
    mask = tokenizers.AddedToken(_MASK, lstrip=spec.kind in ("bpe", "unigram"))
    inner.add_special_tokens([mask if token == _MASK else token for token in special])
    names = {
        "pad_token": _PAD,
        "bos_token": _EOS,
        "eos_token": _EOS,
        "mask_token": _MASK,
    }
    if _UNK in special:
        names["unk_token"] = _UNK
    record = PretrainedRecord(tokens=names, chat_templates={}, inner=inner.to_str())
    return PretrainedTokenizer(record, "the tokenizer")


def _gpt2_like(model: models.Model, *, use_regex: bool = True) -> tokenizers.Tokenizer:
    """Return a tokenizer like GPT-2's: text is not normalised, and words include the space before them."""
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=use_regex
    )
    inner.decoder = decoders.ByteLevel()
    return inner


def _characters(texts: Iterable[str], most: int) -> list[str]:
    """Return the most frequent characters in order of code points."""
    if most < 1:
        raise UsageError(
            "vocab_size is too small: the special tokens and one character need at least 5"
        )
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    if not counts:
        raise DataError("the training text has no character; give more text")
    return sorted(sorted(counts, key=lambda char: (-counts[char], char))[:most])


def _number_tokens(tokens: Iterable[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _train_pieces(
    spec: TokenizerSpec,
    texts: Iterable[str],
    assemble: Callable[[models.Model], tokenizers.Tokenizer],
    special_tokens: Sequence[str],
) -> tokenizers.Tokenizer:
    """Train a tokenizer of byte-level pieces; the same texts give the same pieces."""
    texts = chain.from_iterable(map(_cut_words, texts))
    # BPE can have exactly the bytes and special tokens. The unigram trainer needs one more token, or exceeds
    # its size.
    smallest = len(special_tokens) + len(BYTE_ALPHABET) + (spec.kind == "unigram")
    if spec.vocab_size < smallest:
        raise UsageError(
            f"vocab_size = {spec.vocab_size} is too small: the bytes and the special tokens need at least "
            f"{smallest} with kind = {spec.kind!r}"
        )
    options: dict[str, Any] = {
        **{
            "vocab_size": spec.vocab_size,
            "special_tokens": list(special_tokens),
            "show_progress": False,
        },
        "initial_alphabet": list(BYTE_ALPHABET),
    }
    if spec.kind == "bpe":
        inner = assemble(models.BPE())
        trainer = trainers.BpeTrainer(min_frequency=spec.min_frequency or 2, **options)
        inner.train_from_iterator(texts, trainer)
        return inner
    inner = assemble(models.Unigram())
    inner.train_from_iterator(texts, trainers.UnigramTrainer(**options))
    scores = dict(json.loads(inner.to_str())["model"]["vocab"])
    settled = assemble(
        models.Unigram(_settle_scores(scores, special_tokens), None, False)
    )
    settled.add_special_tokens(list(special_tokens))
    return settled


def _cut_words(text: str) -> Iterator[str]:
    """Cut words of unnatural length: each merge of a trainer reads the whole word.

    A DNA sequence, for example, is a single word: training on 2 MB took a minute.
    """
    start = 0
    if len(text) > _LONGEST_WORD:
        for found in _LONG_WORD.finditer(text):
            yield text[start : found.end()]
            start = found.end()
    yield text[start:]


def _settle_scores(
    scores: dict[str, float], special_tokens: Sequence[str]
) -> list[tuple[str, float]]:
    """Return the vocabulary with reproducible order and scores."""
    # The trainer's order of words changes from run to run. So do the last digits of the scores, and the
    # scores of the bytes added at the end: the lowest score plus 0, 0.0001, …
    lowest = min(scores.values())
    highest_added = lowest + 0.0001 * len(BYTE_ALPHABET)
    settled = {
        piece: round(lowest if len(piece) == 1 and score < highest_added else score, 6)
        for piece, score in scores.items()
        if piece not in special_tokens
    }
    ordered = sorted(settled.items(), key=lambda item: (-item[1], item[0]))
    return [(token, 0.0) for token in special_tokens] + ordered


_FORMAT = f"triptych tokenizer cache 1, tokenizers {tokenizers.__version__}"
# Code with an influence on a trained tokenizer, besides text and specification.
_CODE = (
    Path(__file__),
    *map(Path, map(inspect.getfile, (ByteLevelTokenizer, PretrainedTokenizer))),
)


def trained_once(
    spec: TokenizerSpec,
    texts: Callable[[], Iterable[str]],
    train: Callable[[], Sequence[str]],
    *,
    purpose: str,
    cache_folder: Path | None,
) -> list[str]:
    """Train tokenizers, or read them from the cache."""
    # The key is a hash of library version, specification, purpose, code and text.
    if cache_folder is None:
        return list(train())
    digest = hashlib.sha256(
        f"{_FORMAT}\n{spec.model_dump_json()}\n{purpose}\n".encode()
    )
    for code in _CODE:
        digest.update(hashlib.sha256(code.read_bytes()).digest())
    add_texts(digest, texts())
    path = cache_folder / f"tokenizers-{digest.hexdigest()}.json"
    found = _read_cached(path)
    if found is None:
        found = list(train())
        cache_folder.mkdir(parents=True, exist_ok=True)
        write_text(
            path,
            json.dumps({"sha256": _digest_of_texts(found), "tokenizers": found}) + "\n",
        )
    return found


def _read_cached(path: Path) -> list[str] | None:
    """Read tokenizers of a cache file; None if the file is missing or damaged."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        found = [str(text) for text in record["tokenizers"]]
        expected = record["sha256"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    # Only the digest detects a flipped bit: it would be another piece.
    return found if _digest_of_texts(found) == expected else None


def _digest_of_texts(texts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()
