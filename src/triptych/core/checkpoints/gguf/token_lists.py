"""Vocabularies of GGUF files as the files of a tokenizer in Hugging Face's format.

llama.cpp has four kinds: byte-level BPE ("gpt2"), BPE by scores as in SentencePiece ("llama"), WordPiece
("bert") and unigrams ("t5"). Texts have the same ids as in llama.cpp.

Source: src/llama-vocab.cpp of github.com/ggml-org/llama.cpp.
"""

import base64
import json
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, final

from triptych.core.checkpoints.specs import Spec
from triptych.errors import DataError
from triptych.untrusted import shown

_FILE = files("triptych.core.checkpoints.gguf") / "pre_tokenizers.toml"
_UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
_UNUSED = 5
SPACE = "▁"
# Named special tokens of Hugging Face, by their keys.
NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


@final
class PreTokenizer(Spec):
    """A way to cut a text before byte-level BPE; the file documents the fields."""

    names: tuple[str, ...]
    patterns: tuple[str, ...]
    whole: bool = False
    begins: bool = False
    framed: bool = (
        False  # True if texts stand between the first and the separating token
    )


@cache
def pre_tokenizers() -> tuple[PreTokenizer, ...]:
    """Return the known ways to split texts."""
    record = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    return tuple(PreTokenizer(**entry) for entry in record["pre_tokenizer"])


class Frame(NamedTuple):
    """Ids of the tokens around a text, or None."""

    first: int | None
    last: int | None


@final
class Vocabulary:
    """The vocabulary of a GGUF file.

    `where`: name of the file, for messages.
    """

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._metadata = metadata
        self.kind = self._value("model", str)
        tokens = self._value("tokens", list)
        if not isinstance(tokens, list) or not all(
            isinstance(token, str) for token in tokens
        ):
            raise DataError(
                f"{where}: tokenizer.ggml.tokens is no list of texts: it has no tokenizer"
            )
        # llama.cpp names tokens without a text, too.
        self.tokens: list[str] = [
            token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)
        ]
        types = self._value("token_type", list)
        self.types: list[int] = types if isinstance(types, list) else [1] * len(tokens)
        scores = self._value("scores", list)
        self.scores: list[float] = (
            scores if isinstance(scores, list) else [0.0] * len(tokens)
        )
        if len(self.types) < len(tokens) or len(self.scores) < len(tokens):
            raise DataError(
                f"{where}: its {len(tokens):,} tokens have fewer types or scores; fetch it again"
            )

    def files(self) -> dict[str, str]:
        """Return the contents of the tokenizer's files by name."""
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        for name, key in NAMED.items():
            if (token := self._id(key)) is not None:
                settings[name] = self.tokens[token]
        # The files follow `transformers`, so that one reader serves both formats.
        found = {"tokenizer.json": json.dumps(self._tokenizer(), ensure_ascii=False)}
        template = self._metadata.get("tokenizer.chat_template")
        if isinstance(template, str):
            found["chat_template.jinja"] = template
        found["tokenizer_config.json"] = json.dumps(
            settings, ensure_ascii=False, indent=2
        )
        return found

    def _tokenizer(self) -> dict[str, Any]:
        match self.kind:
            case "gpt2":
                return self._byte_level()
            case "llama":
                return self._by_scores()
            case "bert":
                return self._word_pieces()
            case "t5":
                return self._unigrams()
        raise DataError(
            f"{self.where}: its tokenizer {shown(self.kind)} is not read: gpt2, llama, bert and t5 are; "
            "give the "
            "folder of one with --tokenizer"
        )

    def _byte_level(self) -> dict[str, Any]:
        pre = self._value("pre", str) or "default"
        found = next((one for one in pre_tokenizers() if pre in one.names), None)
        if found is None:
            raise DataError(
                f"{self.where}: how {shown(pre)} cuts texts is not known (tokenizer.ggml.pre): give the "
                "folder of the "
                "tokenizer with --tokenizer"
            )
        merges = self._value("merges", list)
        if not isinstance(merges, list) or not all(
            isinstance(one, str) for one in merges
        ):
            raise DataError(
                f"{self.where}: tokenizer.ggml.merges is no list of texts: it has no tokenizer"
            )
        model = {
            "type": "BPE",
            "vocab": self._ids(),
            "merges": [pair for pair in map(_pair, merges) if pair is not None],
            "ignore_merges": found.whole,
            "byte_fallback": False,
            "fuse_unk": False,
        }
        # The patterns split the text first; the byte level then maps bytes to characters without a pattern.
        cuts: list[dict[str, Any]] = [
            {
                "type": "Split",
                "pattern": {"Regex": one},
                "behavior": "Isolated",
                "invert": False,
            }
            for one in found.patterns
        ]
        level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        frame = self._frame(
            begins=found.begins or found.framed, ends=False, separated=found.framed
        )
        return self._whole(
            model,
            None,
            {"type": "Sequence", "pretokenizers": [*cuts, level]},
            {**level, "use_regex": True},
            frame,
        )

    def _by_scores(self) -> dict[str, Any]:
        prefixed = self._flag("add_space_prefix", True)
        unknown = self._id("unknown_token_id")
        ids = self._ids()
        model = {
            "type": "BPE",
            "vocab": ids,
            "merges": list(self._merges_by_scores(ids)),
            "unk_token": None if unknown is None else self.tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
        }
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        # SentencePiece writes spaces as "▁", and puts one before the text unless the file says otherwise.
        steps: list[dict[str, Any]] = (
            [{"type": "Prepend", "prepend": SPACE}] if prefixed else []
        )
        normalizer = {"type": "Sequence", "normalizers": [*steps, replace]}
        back: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if prefixed:
            back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        frame = self._frame(begins=True, ends=False)
        return self._whole(
            model, normalizer, None, {"type": "Sequence", "decoders": back}, frame
        )

    def _merges_by_scores(self, ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Yield all pairs of tokens whose text is a token, by falling score."""
        plain = [
            token
            for token in range(len(self.tokens))
            if self.types[token] not in (CONTROL, _UNUSED)
        ]
        for token in sorted(plain, key=lambda token: (-self.scores[token], token)):
            text = self.tokens[token]
            for cut in range(1, len(text)):
                if text[:cut] in ids and text[cut:] in ids:
                    yield text[:cut], text[cut:]

    def _word_pieces(self) -> dict[str, Any]:
        def as_stored(token: str, kind: int) -> str:
            if kind in (CONTROL, _UNKNOWN, _UNUSED):
                return token
            return (
                token.removeprefix(SPACE) if token.startswith(SPACE) else f"##{token}"
            )

        # The tokens of texts are stored with a mark before words, and without one within words.
        self.tokens = [
            as_stored(token, kind)
            for token, kind in zip(self.tokens, self.types, strict=False)
        ]
        unknown = self._id("unknown_token_id")
        model = {
            "type": "WordPiece",
            "vocab": self._ids(),
            "unk_token": "[UNK]" if unknown is None else self.tokens[unknown],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        }
        lowercase = self._flag("normalizer.lowercase", True)
        normalizer = {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": self._flag("normalizer.strip_accents", lowercase),
            "lowercase": lowercase,
        }
        decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
        frame = self._frame(begins=True, ends=False, separated=True)
        return self._whole(
            model, normalizer, {"type": "BertPreTokenizer"}, decoder, frame
        )

    def _unigrams(self) -> dict[str, Any]:
        model = {
            "type": "Unigram",
            "vocab": [
                list(pair) for pair in zip(self.tokens, self.scores, strict=False)
            ],
            "unk_id": self._id("unknown_token_id"),
            "byte_fallback": False,
        }
        steps: list[dict[str, Any]] = []
        charsmap = self._metadata.get("tokenizer.ggml.precompiled_charsmap")
        if isinstance(charsmap, list) and charsmap:
            # Metadata have signed bytes.
            packed = bytes(
                number & 255 for number in charsmap if isinstance(number, int)
            )
            steps.append(
                {
                    "type": "Precompiled",
                    "precompiled_charsmap": base64.b64encode(packed).decode(),
                }
            )
        if self._flag("remove_extra_whitespaces", False):
            steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
            steps.append(
                {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": SPACE}
            )
        always = "always" if self._flag("add_space_prefix", True) else "never"
        spaces = {
            "type": "Metaspace",
            "replacement": SPACE,
            "prepend_scheme": always,
            "split": True,
        }
        normalizer = {"type": "Sequence", "normalizers": steps} if steps else None
        return self._whole(
            model, normalizer, spaces, spaces, self._frame(begins=False, ends=True)
        )

    def _whole(
        self,
        model: dict[str, Any],
        normalizer: Any,
        pre_tokenizer: Any,
        decoder: Any,
        frame: Frame,
    ) -> dict[str, Any]:
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": list(self._added()),
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": self._framing(frame),
            "decoder": decoder,
            "model": model,
        }

    def _added(self) -> Iterator[dict[str, Any]]:
        for number, (token, kind) in enumerate(
            zip(self.tokens, self.types, strict=False)
        ):
            # As in llama.cpp, the token for unknown text is found where it is spelled out.
            if kind in (CONTROL, USER_DEFINED, _UNKNOWN):
                flags = dict.fromkeys(
                    ("single_word", "lstrip", "rstrip", "normalized"), False
                )
                yield {
                    "id": number,
                    "content": token,
                    "special": kind != USER_DEFINED,
                    **flags,
                }

    # The tokens around a text; the arguments are llama.cpp's defaults of the kind.
    def _frame(self, *, begins: bool, ends: bool, separated: bool = False) -> Frame:
        first = self._flag("add_bos_token", begins)
        last = self._flag("add_eos_token", ends)
        between = self._flag("add_sep_token", separated)
        beginning = (
            self._id("bos_token_id")
            if self.kind != "bert"
            else self._id("bos_token_id", "cls_token_id")
        )
        end = (
            self._id("seperator_token_id", "eos_token_id")
            if between
            else self._id("eos_token_id")
        )
        return Frame(beginning if first else None, end if last or between else None)

    def _framing(self, frame: Frame) -> dict[str, Any] | None:
        if frame == Frame(None, None):
            return None
        named = [token for token in frame if token is not None]

        def special(token: int | None) -> list[dict[str, Any]]:
            return (
                []
                if token is None
                else [{"SpecialToken": {"id": self.tokens[token], "type_id": 0}}]
            )

        one = [
            *special(frame.first),
            {"Sequence": {"id": "A", "type_id": 0}},
            *special(frame.last),
        ]
        # The second text of a pair does not get a first token.
        two = [*one, {"Sequence": {"id": "B", "type_id": 1}}, *special(frame.last)]
        tokens = {
            self.tokens[token]: {
                "id": self.tokens[token],
                "ids": [token],
                "tokens": [self.tokens[token]],
            }
            for token in named
        }
        return {
            "type": "TemplateProcessing",
            "single": one,
            "pair": two,
            "special_tokens": tokens,
        }

    def _ids(self) -> dict[str, int]:
        # If two tokens have the same text, readers use the first.
        found: dict[str, int] = {}
        for number, token in enumerate(self.tokens):
            found.setdefault(token, number)
        return found

    def _value(self, key: str, kind: type) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, kind) else None

    def _flag(self, key: str, default: bool) -> bool:
        value = self._value(key, bool)
        return default if value is None else bool(value)

    def _id(self, *keys: str) -> int | None:
        """Return the id of the first named token of several keys, or None."""
        for key in keys:
            value = self._metadata.get(f"tokenizer.ggml.{key}")
            if (
                isinstance(value, int)
                and not isinstance(value, bool)
                and 0 <= value < len(self.tokens)
            ):
                return value
        return None


def has_vocabulary(metadata: Mapping[str, Any]) -> bool:
    """Return True if a file has a tokenizer."""
    return isinstance(metadata.get("tokenizer.ggml.tokens"), list)


def token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Return the named tokens of a file as fields of `config.json`."""
    found = {}
    for name in ("bos_token", "eos_token", "pad_token"):
        value = metadata.get(f"tokenizer.ggml.{NAMED[name]}")
        if isinstance(value, int) and not isinstance(value, bool):
            found[f"{name}_id"] = value
    return found


def _pair(merge: str) -> list[str] | None:
    first, space, second = merge.partition(" ")
    return [first, second] if space and first and second else None
