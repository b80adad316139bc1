"""Tokenizer settings in the files of a checkpoint: everything but the vocabulary."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from tokenizers import AddedToken

from triptych.core.checkpoints.source import find_source
from triptych.errors import DataError
from triptych.running.text.lines import SURROGATE
from triptych.untrusted import read_json

Token = str | AddedToken
NAMED_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
# Maximum value of settings with a number of generated tokens.
_MOST_COUNTED = 10_000


@final
@dataclass(frozen=True)
class TokenizerSettings:
    """The tokenizer settings of a checkpoint."""

    record: Mapping[
        str, Any
    ]  # `tokenizer_config.json`, merged with `special_tokens_map.json`
    tokenizer_class: (
        str | None
    )  # tokenizer class without "Fast"; None if it is not stated
    model_type: str | None  # model type in `config.json`
    # named special tokens of the files; plain text if a file does not state flags
    given: Mapping[str, Token]
    # further special tokens; None if the files do not list any
    extra: tuple[Token, ...] | None
    added: Mapping[int, AddedToken]  # tokens outside the vocabulary, by id
    where: str  # name of the file for messages

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean setting."""
        found = self.record.get(name)
        return default if found is None else bool(found)

    def count(self, name: str, default: int) -> int:
        """Return a setting with a number of generated tokens, checked against a limit."""
        number = self.record.get(name, default)
        if not isinstance(number, int) or not 0 <= number <= _MOST_COUNTED:
            raise ValueError(
                f"{self.where}: {name} is {number!r}: a number up to {_MOST_COUNTED:,} is needed"
            )
        return number

    @classmethod
    def read(cls, folder: Path, whole: Mapping[str, Any]) -> "TokenizerSettings":
        """Read the settings of a checkpoint's files; `whole` is the content of `tokenizer.json`."""
        where = str(folder / "tokenizer_config.json")
        record = _read_if_there(Path(where))
        config = _read_if_there(folder / "config.json")
        added: dict[int, AddedToken] = {}
        if "added_tokens_decoder" in record:
            if not isinstance(record["added_tokens_decoder"], dict):
                raise DataError(
                    f"{where}: added_tokens_decoder is not a record; correct it"
                )
            for number, entry in record["added_tokens_decoder"].items():
                added[_id_of(number, where)] = _token(entry, where)
        else:
            record = {**record, **_read_if_there(folder / "special_tokens_map.json")}
            path = folder / "added_tokens.json"
            special = {
                _content(record[name], where)
                for name in NAMED_TOKENS
                if record.get(name)
            }
            special |= {
                _content(value, where) for value in _extra_of(record, where)[0] or ()
            }
            for content, number in _read_if_there(path).items():
                known = content in special
                added[_id_of(number, str(path))] = AddedToken(
                    content, normalized=not known, special=known
                )
            for entry in whole.get("added_tokens") or ():
                added[_id_of(entry["id"], where)] = _token(entry, where)
        made = {token.content: token for token in added.values()}

        def known_as(value: object) -> Token:
            token = (
                value if isinstance(value, str) else _token(value, where, special=True)
            )
            return made.get(_content(value, where), token)

        extra, own = _extra_of(record, where)
        # Model-specific tokens, such as `image_token`, are named too.
        named = {
            name: value
            for name, value in record.items()
            if (value and name in NAMED_TOKENS)
            or (name.endswith("_token") and isinstance(value, str))
        }
        name = record.get("tokenizer_class") or config.get("tokenizer_class")
        if config and config.get("model_type") is None:
            config = dict(
                find_source(folder).record
            )  # the tensors determine its model type
        model_type = config.get("model_type")
        return cls(
            record=record,
            tokenizer_class=name.removesuffix("Fast")
            if isinstance(name, str)
            else None,
            model_type=model_type if isinstance(model_type, str) else None,
            given={key: known_as(value) for key, value in {**named, **own}.items()},
            extra=None if extra is None else tuple(known_as(value) for value in extra),
            added=dict(sorted(added.items())),
            where=where,
        )


def content_of(token: Token) -> str:
    """Return the text of a token."""
    return token if isinstance(token, str) else token.content


def _extra_of(
    record: Mapping[str, Any], where: str
) -> tuple[list[object] | None, dict[str, object]]:
    """Return the further special tokens of a record: a list of tokens or None, and named tokens."""
    said = [
        record[name]
        for name in ("extra_special_tokens", "additional_special_tokens")
        if name in record
    ]
    found: object = next((value for value in said if value), [])
    if isinstance(found, dict):
        return None, found
    if not isinstance(found, list):
        raise DataError(f"{where}: additional_special_tokens is not a list; correct it")
    return (list(found) if said else None), {}


def _id_of(number: object, where: str) -> int:
    if (
        isinstance(number, str | int)
        and str(number).isascii()
        and str(number).isdigit()
    ):
        return int(number)
    raise DataError(f"{where}: {number!r} is no id of a token; correct it")


def _content(value: object, where: str) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str):
        raise DataError(
            f"{where}: a special token is neither text nor a record with content; correct it"
        )
    return content


def _token(value: object, where: str, *, special: bool | None = None) -> AddedToken:
    content = _content(value, where)
    flags = {
        name: bool(value[name])
        for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
        if isinstance(value, dict) and name in value
    }
    if special is not None:
        flags["special"] = special
    return AddedToken(content, **flags)


def _read_if_there(path: Path) -> dict[str, Any]:
    """Read the record of a file; empty if the file is missing."""
    record = read_json(path) if path.exists() else {}
    if SURROGATE.search(json.dumps(record, ensure_ascii=False)):
        raise DataError(f"{path} holds half of a surrogate pair; fetch it again")
    return record
