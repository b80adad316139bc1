"""Trained tokenizers, kept on disk between runs."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import tokenizers

from triptych.files import write_text
from triptych.text import byte_level, pretrained, training
from triptych.text.encoded import add_texts
from triptych.text.training import TokenizerSpec

_FORMAT = f"triptych tokenizer cache 1, tokenizers {tokenizers.__version__}"
# The code that decides, besides text and specification, what a trained tokenizer is.
_CODE = (Path(training.__file__), Path(byte_level.__file__), Path(pretrained.__file__))


def trained_once(
    spec: TokenizerSpec,
    texts: Callable[[], Iterable[str]],
    train: Callable[[], Sequence[str]],
    *,
    purpose: str,
    cache_folder: Path | None,
) -> list[str]:
    """Train tokenizers, or find them trained by an earlier run."""
    if cache_folder is None:
        return list(train())
    path = cache_folder / f"tokenizers-{_key_of(spec, purpose, texts())}.json"
    found = _read(path)
    if found is None:
        found = list(train())
        cache_folder.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"sha256": _digest_of(found), "tokenizers": found}) + "\n")
    return found


def _key_of(spec: TokenizerSpec, purpose: str, texts: Iterable[str]) -> str:
    digest = hashlib.sha256(f"{_FORMAT}\n{spec.model_dump_json()}\n{purpose}\n".encode())
    for path in _CODE:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    add_texts(digest, texts)
    return digest.hexdigest()


def _read(path: Path) -> list[str] | None:
    """What was written there; None where there is nothing, or nothing sound."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        found = [str(text) for text in record["tokenizers"]]
        expected = record["sha256"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    # A flipped bit would pass as another piece; only the digest shows it.
    return found if _digest_of(found) == expected else None


def _digest_of(texts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()
