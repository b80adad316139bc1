"""Tokenizers as the metadata of a GGUF file.

The metadata are read back with `token_lists`, the reader of GGUF files, and must give the tokenizer's ids.
"""

import base64
import json
import tempfile
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, final

from triptych.converting.output_checks import ConversionCheck
from triptych.core.checkpoints.gguf import (
    CONTROL,
    NAMED,
    SPACE,
    USER_DEFINED,
    PreTokenizer,
    Vocabulary,
    pre_tokenizers,
)
from triptych.errors import DataError, UsageError
from triptych.files import write_text
from triptych.running.text import PretrainedTokenizer, load_tokenizer

# Normalisation of characters as SentencePiece compiles it; bytes in a file.
CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
_NORMAL = 1
_UNKNOWN = 2
_UNUSED = 5
_BYTE = 6
_GPT2 = pre_tokenizers()[0].patterns[0]
# A part of patterns, and another spelling of the same part.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPELLED_OUT = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SAMPLES = (
    "A little girl, 3 years old, isn't afraid: it costs $12.50 (or 10%)!",
    "  two  spaces\tand a tab \n\n and lines\r\n",
    "snake_case, CamelCase, http://example.org/?a=1&b=2, I've we'LL",
    "Zwei Männer. Привет, мир. 你好，世界。 안녕 🙂 नमस्ते مرحبا",
    "1234567890 12,345.67 e\u0301 é ﬁne ½",
    "",
)


class WrittenTokens(NamedTuple):
    """The metadata of a tokenizer, and the result of the comparison with the tokenizer."""

    metadata: dict[str, Any]
    notes: tuple[str, ...]
    check: ConversionCheck


def write_tokens(
    tokenizer: PretrainedTokenizer, rows: int, end_ids: tuple[int, ...], name: str
) -> WrittenTokens:
    """Return a tokenizer as metadata.

    `rows`: rows of the embedding table. `end_ids`: tokens that end a text.
    """
    made = _Tokens(tokenizer, rows, name)
    metadata = made.metadata(end_ids)
    # NFC leaves texts of composed characters unchanged.
    samples = [
        unicodedata.normalize("NFC", text) if made.notes else text for text in _SAMPLES
    ]
    return WrittenTokens(
        metadata, made.notes, _check_ids(tokenizer, metadata, samples, name)
    )


@final
class _Tokens:
    def __init__(self, tokenizer: PretrainedTokenizer, rows: int, name: str) -> None:
        self._tokenizer = tokenizer
        self._rows = rows
        self._name = name
        self._record: dict[str, Any] = json.loads(tokenizer.inner_json)
        self._model: dict[str, Any] = self._record["model"]
        self.notes: tuple[str, ...] = ()

    def metadata(self, end_ids: tuple[int, ...]) -> dict[str, Any]:
        match self._model.get("type"):
            case "BPE":
                found = (
                    self._byte_level() if self._is_byte_level() else self._by_scores()
                )
            case "WordPiece":
                found = self._word_pieces()
            case "Unigram":
                found = self._unigrams()
            case other:
                raise self._refused(f"its model is {other}")
        found |= self._named(end_ids)
        if (template := self._tokenizer.chat_template) is not None:
            found["tokenizer.chat_template"] = template
        return found

    def _refused(self, why: str) -> UsageError:
        return UsageError(f"{self._name}: llama.cpp has no such tokenizer: {why}")

    def _is_byte_level(self) -> bool:
        return "ByteLevel" in json.dumps(
            [self._record.get("pre_tokenizer"), self._record.get("decoder")]
        )

    def _tokens(self) -> tuple[list[str], list[int]]:
        """Return the text and the type of every row of the embedding table."""
        vocab = self._model["vocab"]
        # Unigrams are a list of pieces with their scores.
        texts = (
            {token: text for text, token in vocab.items()}
            if isinstance(vocab, dict)
            else {token: text for token, (text, _) in enumerate(vocab)}
        )
        kinds = dict.fromkeys(texts, _NORMAL)
        for entry in self._record.get("added_tokens") or ():
            texts[entry["id"]] = entry["content"]
            kinds[entry["id"]] = CONTROL if entry["special"] else USER_DEFINED
        if max(texts, default=0) >= self._rows:
            raise self._refused(
                f"it has the id {max(texts):,}, and the model {self._rows:,} rows"
            )
        tokens = [texts.get(row, f"[PAD{row}]") for row in range(self._rows)]
        types = [kinds.get(row, _UNUSED) for row in range(self._rows)]
        return tokens, types

    def _merges(self) -> list[tuple[str, str]]:
        found = []
        for merge in self._model.get("merges") or ():
            first, second = merge.split(" ", 1) if isinstance(merge, str) else merge
            found.append((first, second))
        return found

    def _byte_level(self) -> dict[str, Any]:
        tokens, types = self._tokens()
        merges = self._merges()
        if self._record.get("normalizer") is not None:
            kind = self._record["normalizer"].get("type")
            self.notes = (
                f"texts are not normalised ({kind}): llama.cpp does not do it",
            )
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": self._pre_tokenizer(bool(merges)).names[0],
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        }

    def _pre_tokenizer(self, merging: bool) -> PreTokenizer:
        """Return the way to cut texts; without merges, every way gives the same tokens."""
        whole = bool(self._model.get("ignore_merges"))
        patterns = tuple(
            map(_spelled, self._patterns(self._record.get("pre_tokenizer")))
        )
        fitting = [
            one
            for one in pre_tokenizers()
            if tuple(map(_spelled, one.patterns)) == patterns and not one.framed
        ]
        if not merging:
            return pre_tokenizers()[0]
        if not fitting:
            raise self._refused(
                f"it cuts texts by {' then '.join(patterns) or 'nothing'}"
            )
        return next((one for one in fitting if one.whole == whole), fitting[0])

    def _patterns(self, record: Any) -> list[str]:
        match record:
            case None:
                return []
            case {"type": "Sequence", "pretokenizers": list(parts)}:
                return [*chain.from_iterable(self._patterns(part) for part in parts)]
            case {"type": "ByteLevel", "add_prefix_space": True}:
                raise self._refused("it puts a space before texts")
            case {"type": "ByteLevel", "use_regex": use_regex}:
                return [_GPT2] if use_regex else []
            case {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }:
                return [pattern]
            # "Removed" with `invert` drops text between matches: the same for patterns that match all text.
            case {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Removed",
                "invert": True,
            }:
                return [pattern]
            case {"type": "Digits", "individual_digits": True}:
                return ["\\p{N}"]
        raise self._refused(f"it cuts texts by {record.get('type')}")

    def _by_scores(self) -> dict[str, Any]:
        if not self._model.get("byte_fallback"):
            raise self._refused(
                "its BPE is neither byte-level nor with bytes for unknown characters"
            )
        tokens, types = self._tokens()
        unknown = self._model.get("unk_token")
        types = [
            _UNKNOWN
            if token == unknown
            else _BYTE
            if _is_byte(token) and kind == _NORMAL
            else kind
            for token, kind in zip(tokens, types, strict=True)
        ]
        # llama.cpp merges the pair whose text has the best score: that of the first merge into it.
        first: dict[str, int] = {}
        for rank, (left, right) in enumerate(self._merges()):
            first.setdefault(left + right, rank)
        scores = [-float(first.get(token, len(first))) for token in tokens]
        spaces = json.dumps(
            [self._record.get("normalizer"), self._record.get("pre_tokenizer")]
        )
        prefixed = (
            '"Prepend"' in spaces
            or '"prepend_scheme": "always"' in spaces
            or '"first"' in spaces
        )
        return {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.tokens": [
                token.replace(SPACE, " ") if kind == USER_DEFINED else token
                for token, kind in zip(tokens, types, strict=True)
            ],
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.add_space_prefix": prefixed,
        }

    def _word_pieces(self) -> dict[str, Any]:
        normalizer = self._record.get("normalizer") or {}
        cuts = (self._record.get("pre_tokenizer") or {}).get("type")
        if normalizer.get("type") != "BertNormalizer" or cuts != "BertPreTokenizer":
            raise self._refused(
                f"its WordPiece is not that of BERT, but cuts texts by {cuts}"
            )
        tokens, types = self._tokens()
        within = self._model.get("continuing_subword_prefix", "##")
        lowercase = bool(normalizer.get("lowercase"))
        stripped = normalizer.get("strip_accents")
        # llama.cpp marks the beginnings of words, and not the pieces within them.
        return {
            "tokenizer.ggml.model": "bert",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.tokens": [
                token
                if kind in (CONTROL, _UNUSED)
                else token.removeprefix(within)
                if token.startswith(within)
                else f"{SPACE}{token}"
                for token, kind in zip(tokens, types, strict=True)
            ],
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.normalizer.lowercase": lowercase,
            "tokenizer.ggml.normalizer.strip_accents": lowercase
            if stripped is None
            else bool(stripped),
        }

    def _unigrams(self) -> dict[str, Any]:
        tokens, types = self._tokens()
        unknown = self._model.get("unk_id")
        if unknown is not None:
            types[unknown] = _UNKNOWN
        scores = [float(score) for _, score in self._model["vocab"]]
        # A normaliser may be a sequence of several.
        steps = self._record.get("normalizer") or {}
        steps = steps.get("normalizers", [steps])
        charsmap = next(
            (
                one["precompiled_charsmap"]
                for one in steps
                if one.get("type") == "Precompiled"
            ),
            "",
        )
        spaces = json.dumps(self._record.get("pre_tokenizer"))
        return {
            "tokenizer.ggml.model": "t5",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": scores + [0.0] * (len(tokens) - len(scores)),
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.add_space_prefix": '"prepend_scheme": "never"'
            not in spaces,
            "tokenizer.ggml.remove_extra_whitespaces": any(
                one.get("type") in ("Strip", "Replace") for one in steps
            ),
            **({CHARSMAP: [*base64.b64decode(charsmap)]} if charsmap else {}),
        }

    def _named(self, end_ids: tuple[int, ...]) -> dict[str, Any]:
        """Return the special tokens by name, and which of them texts stand between."""
        found: dict[str, Any] = {}
        for name, key in NAMED.items():
            token = self._tokenizer.named_ids.get(name)
            if token is not None and key not in ("cls_token_id",):
                found[f"tokenizer.ggml.{key}"] = token
        before, after = self._frame()
        if before:
            found["tokenizer.ggml.bos_token_id"] = before[0]
        # llama.cpp ends a text at either of two tokens.
        ends = tuple(dict.fromkeys([*after, *end_ids]))
        if ends:
            found["tokenizer.ggml.eos_token_id"] = ends[0]
        if len(ends) > 1:
            found["tokenizer.ggml.eot_token_id"] = ends[1]
        found["tokenizer.ggml.add_bos_token"] = bool(before)
        found["tokenizer.ggml.add_eos_token"] = bool(after)
        found["tokenizer.ggml.add_sep_token"] = False
        return found

    def _frame(self) -> tuple[list[int], list[int]]:
        (bare,) = self._tokenizer.encode(["a"])
        (framed,) = self._tokenizer.encode(["a"], add_special=True)
        at = next(
            (
                start
                for start in range(len(framed))
                if framed[start : start + len(bare)] == bare
            ),
            len(framed),
        )
        before = framed[:at]
        after = framed[at + len(bare) :]
        if len(before) > 1 or len(after) > 1 or at == len(framed):
            raise self._refused("it puts several special tokens around a text")
        return before, after


def _spelled(pattern: str) -> str:
    pattern = pattern.replace(_SPELLED_OUT, _CONTRACTIONS)
    # A last alternative of all spaces is redundant: unmatched text is a piece as well.
    return pattern.removesuffix("|\\s+")


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _check_ids(
    tokenizer: PretrainedTokenizer,
    metadata: Mapping[str, Any],
    samples: Sequence[str],
    name: str,
) -> ConversionCheck:
    """Compare the tokenizer's ids of texts with the ids from the metadata."""
    what = "token ids as llama.cpp reads them and of the tokenizer"
    with tempfile.TemporaryDirectory(prefix="triptych-") as place:
        for file, content in Vocabulary(metadata, name).files().items():
            write_text(Path(place, file), content)
        again = load_tokenizer(Path(place))
    compared = 0
    for text in samples:
        for special in (False, True):
            (own,) = tokenizer.encode([text], add_special=special, parse_special=True)
            if tokenizer.unk_id in own:
                continue  # llama.cpp encodes characters outside the vocabulary differently
            compared += 1
            (found,) = again.encode([text], add_special=special, parse_special=True)
            if found != own:
                raise DataError(
                    f"{what}: {text!r} is {found} there and {own} here: nothing is written"
                )
    return ConversionCheck(what, True, note=f"{compared} texts")
