"""Vocabularies of tokenizers out of `tokenizer.json`, or the files that came before it."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import tokenizers
from tokenizers import AddedToken

VOCABULARY_FILES = (
    *("vocab.json", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model"),
)
NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))

Kind = Literal["pairs", "words", "unigrams"]
Pieces = tuple[tuple[str, float], ...]
"""Every piece by id with its score."""


@final
@dataclass(frozen=True)
class TokenizerSettings:
    """What a checkpoint says of its tokenizer besides the vocabulary."""

    record: Mapping[str, Any]  # `tokenizer_config.json`, with what `special_tokens_map.json` adds
    tokenizer_class: str | None  # the class that it names, without "Fast"; None where it names none
    model_type: str | None  # of `config.json`
    # The named special tokens of the files; plain text where a file says no more of one.
    given: Mapping[str, str | AddedToken]
    # Further special tokens; None where the files do not speak of any.
    extra: tuple[str | AddedToken, ...] | None
    added: Mapping[int, AddedToken]  # tokens outside the vocabulary, by id
    where: str  # the file, for messages

    def flag(self, name: str, default: bool) -> bool:
        """A setting that is true or false."""
        found = self.record.get(name)
        return default if found is None else bool(found)


@final
@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a tokenizer, and the little else that is taken from the file that has them."""

    kind: Kind  # how text is cut into them
    ids: Mapping[str, int]  # of every token; for unigrams, see `pieces`
    merges: tuple[tuple[str, str], ...] = ()  # of byte pairs, the most important first
    pieces: Pieces = ()  # of unigrams
    charsmap: bytes = b""  # SentencePiece's rules of normalization; empty for none
    unk_id: int | None = None  # of what no piece covers, where the file of a SentencePiece model says it
    # Tokens that a SentencePiece model marks; None for other files.
    marked: tuple[AddedToken, ...] | None = None
    # What a `tokenizer.json` puts around a text; None for other files, and where it puts nothing.
    surrounding: Any = None
    is_whole: bool = False  # whether it is from a `tokenizer.json`


def read_vocabulary(name: str, content: bytes, merges: bytes) -> Vocabulary:
    """The vocabulary of `vocab.json` or `vocab.txt`, which came before `tokenizer.json`."""
    if name == "vocab.json":
        ids, pairs = _read_ids(content), _read_merges(merges)
        unknown = [pair for pair in pairs if pair[0] + pair[1] not in ids or {*pair} - ids.keys()]
        if unknown:
            raise ValueError(f"merges.txt merges {' and '.join(unknown[0])}, which are not all in vocab.json")
        return Vocabulary("pairs", ids, pairs)
    lines = content.decode("utf-8").removesuffix("\n").split("\n")
    return Vocabulary("words", {line.removesuffix("\r"): number for number, line in enumerate(lines)})


def vocabulary_of_whole(record: Mapping[str, Any], inner: tokenizers.Tokenizer) -> Vocabulary:
    """The vocabulary of a `tokenizer.json`."""
    model = record["model"]
    rules = record.get("normalizer") or {}
    charsmaps = [rule for rule in rules.get("normalizers", [rules]) if rule.get("type") == "Precompiled"]
    charsmap = base64.b64decode(charsmaps[0]["precompiled_charsmap"]) if charsmaps else b""
    common: dict[str, Any] = {"charsmap": charsmap, "surrounding": inner.post_processor, "is_whole": True}
    match inner.model:
        case tokenizers.models.BPE():
            pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
            merges = tuple((left, right) for left, right in pairs)
            return Vocabulary("pairs", model["vocab"], merges, **common)
        case tokenizers.models.WordPiece():
            return Vocabulary("words", model["vocab"], **common)
        case tokenizers.models.Unigram():
            pieces = tuple((str(piece), float(score)) for piece, score in model["vocab"])
            ids = {piece: number for number, (piece, _) in enumerate(pieces)}
            return Vocabulary("unigrams", ids, pieces=pieces, **common)
        case other:
            raise ValueError(f"its model is a {type(other).__name__}, which no class of tokenizers has")


def _read_ids(content: bytes) -> dict[str, int]:
    try:
        ids = json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(ids, dict) or not all(
        isinstance(number, int) and 0 <= number < 2 * len(ids) + 1000 for number in ids.values()
    ):
        raise ValueError("it is not a record of tokens and their ids")
    return ids


def _read_merges(content: bytes) -> tuple[tuple[str, str], ...]:
    merges = []
    for number, line in enumerate(content.decode("utf-8").split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2:
            raise ValueError(f"merges.txt, line {number}: not two tokens")
        merges.append((parts[0], parts[1]))
    return tuple(merges)
