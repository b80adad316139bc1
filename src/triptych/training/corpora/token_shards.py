"""Tokens of a corpus in memory-mapped files on the disk; a corpus may be larger than memory."""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Literal, final

import numpy as np
from jaxtyping import Int32, Int64
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from triptych.errors import DataError
from triptych.files import (
    hold_folder,
    remove_leftovers,
    write_atomically,
    write_bytes,
    write_text,
)
from triptych.running.text import (
    Frame,
    LanguageCorpusSpec,
    TextPart,
    Tokenizer,
    fingerprint,
    read_documents,
    require_documents,
)

TOKENS_PER_SHARD = 1 << 24

_INDEX = "shards.json"
# Size of a call of the tokenizer; its threads divide the call by parts.
_CHARACTERS_AT_ONCE = 1 << 21
_PARTS_AT_ONCE = 10_000
_MOST_MAPPED = 16
_COUNTED_AT_A_TIME = 1 << 20
_FORMAT: Literal["triptych token shards 1"] = "triptych token shards 1"


class _FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


@final
class ShardRecord(_FrozenModel):
    """Record of a shard."""

    num_tokens: int = Field(ge=0)  # number of tokens
    num_documents: int = Field(
        ge=0
    )  # number of documents with their first token in the shard
    num_bytes: int = Field(ge=0)  # size of the text in UTF-8
    num_parts: int = Field(
        ge=0
    )  # parts of documents up to the end of this shard, from the first shard
    ends_document: bool  # True if the next shard begins with another document


@final
class ShardIndex(_FrozenModel):
    """Index of a folder of shards, written last."""

    format: Literal["triptych token shards 1"] = _FORMAT  # format of the folder
    dtype: Literal["<u2", "<u4"]  # dtype of the stored tokens
    vocab_size: int = Field(
        ge=1
    )  # size of the tokenizer's vocabulary; tokens are below it
    shards: tuple[ShardRecord, ...]  # records in order


@final
class TokenShards:
    """Tokens of a corpus: concatenated documents with their special tokens and end tokens."""

    def __init__(self, index: ShardIndex, folder: Path) -> None:
        self.index = index
        self.folder = folder
        self.num_tokens = sum(
            record.num_tokens for record in index.shards
        )  # with special tokens
        self.num_documents = sum(
            record.num_documents for record in index.shards
        )  # without empty documents
        self.num_bytes = sum(
            record.num_bytes for record in index.shards
        )  # size of the text in UTF-8
        self._ends = list(accumulate(record.num_tokens for record in index.shards))
        self._mapped = lru_cache(_MOST_MAPPED)(self._map)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token. Bits per byte are nats per token / (bytes per token · ln 2)."""
        return self.num_bytes / self.num_tokens

    def share_of(self, token: int | None, most: int = 1 << 24) -> float:
        """Return the share of a token among the first `most` tokens; 0 for None."""
        count = 0
        seen = min(self.num_tokens, most)
        for start in range(0, 0 if token is None else seen, _COUNTED_AT_A_TIME):
            part = self.tokens(start, min(start + _COUNTED_AT_A_TIME, seen))
            count += int(np.count_nonzero(part == token))
        return count / max(1, seen)

    def tokens(self, start: int, stop: int) -> Int32[np.ndarray, "length"]:
        """Return a copy of the tokens from `start` up to `stop`."""
        parts = (
            self._mapped(shard)[0][low:high]
            for shard, low, high in self._cut(start, stop)
        )
        return np.concatenate(
            [np.zeros(0, np.int32), *(part.astype(np.int32) for part in parts)]
        )

    def starts_within(self, start: int, stop: int) -> Int64[np.ndarray, "num_starts"]:
        """Return the starts of documents from `start` up to `stop`, ascending."""
        found = [np.zeros(0, np.int64)]
        for shard, low, high in self._cut(start, stop):
            starts = self._mapped(shard)[1]
            first, last = np.searchsorted(starts, (low, high))
            found.append(np.asarray(starts[first:last]) + self._first(shard))
        return np.concatenate(found)

    def _cut(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield shard, start and stop within the shard for each shard of a range."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise ValueError(
                f"{start} to {stop} is not within the {self.num_tokens} tokens of {self.folder}"
            )
        shard = bisect_right(self._ends, start)
        while start < stop:
            first = self._first(shard)
            end = min(stop, self._ends[shard])
            yield shard, start - first, end - first
            start = end
            shard = shard + 1

    def _first(self, shard: int) -> int:
        return self._ends[shard] - self.index.shards[shard].num_tokens

    def _map(self, shard: int) -> tuple[np.ndarray, np.ndarray]:
        """Map tokens and starts of a shard into memory."""
        record = self.index.shards[shard]
        return (
            _map_file(
                _path(self.folder, shard, "tokens"), self.index.dtype, record.num_tokens
            ),
            _map_file(_path(self.folder, shard, "starts"), "<i8", record.num_documents),
        )


def tokenize_corpus(
    spec: LanguageCorpusSpec,
    tokenizer: Tokenizer,
    *,
    cache_folder: Path,
    base: Path = Path(),
) -> TokenShards:
    """Tokenize a corpus, or open its tokens in the cache."""
    digest = hashlib.sha256(_FORMAT.encode())
    for part in (fingerprint(spec, base=base), tokenizer.to_json()):
        digest.update(f"{len(part)} {part}".encode())
    folder = cache_folder / f"shards-{digest.hexdigest()[:32]}"
    try:
        return read_shards(folder)
    except DataError:
        parts = require_documents(read_documents(spec, base=base), spec.describe())
        return write_shards(parts, tokenizer, folder)


def write_shards(
    texts: Iterable[TextPart | str],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    tokens_per_shard: int = TOKENS_PER_SHARD,
) -> TokenShards:
    """Tokenize documents into shards; a repeated call resumes after the last complete shard."""
    # The lock lets one process write; other processes then read the finished shards.
    folder.mkdir(parents=True, exist_ok=True)
    with hold_folder(folder):
        try:
            return read_shards(folder)
        except DataError:
            pass
        remove_leftovers(folder, ("*.tokens", "*.starts", "*.json"))
        dtype: Literal["<u2", "<u4"] = (
            "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
        )
        records = _complete_shards(folder, dtype)
        num_done = records[-1].num_parts if records else 0
        parts = islice(
            (TextPart(text) if isinstance(text, str) else text for text in texts),
            num_done,
            None,
        )
        frame = Frame.of(tokenizer)  # special tokens around every document
        if not frame.after and tokenizer.eos_id is not None:
            frame = frame._replace(after=(tokenizer.eos_id,))
        groups = _grouped(parts)
        for group in groups:
            shard = _Shard(tokenizer, frame, dtype, records[-1] if records else None)
            shard.write(folder, len(records), chain([group], groups), tokens_per_shard)
            records.append(shard.record)
        index = ShardIndex(
            dtype=dtype, vocab_size=tokenizer.vocab_size, shards=tuple(records)
        )
        write_text(folder / _INDEX, index.model_dump_json())
    return read_shards(folder)


def read_shards(folder: Path) -> TokenShards:
    """Open the shards of a folder, and check the sizes of their files."""
    path = folder / _INDEX
    try:
        index = ShardIndex.model_validate_json(path.read_bytes())
    except OSError:
        raise DataError(
            f"{folder} holds no complete corpus: it has no {_INDEX}; tokenize it again"
        ) from None
    except ValidationError as error:
        raise DataError(
            f"{path} is damaged: {error.errors()[0]['msg']}; delete {folder}"
        ) from None
    for shard, record in enumerate(index.shards):
        if damage := _damage(folder, shard, record, index.dtype):
            raise DataError(f"{damage}; delete {folder} and tokenize the corpus again")
    return TokenShards(index, folder)


@final
class _Shard:
    """Writer of a shard."""

    def __init__(
        self, tokenizer: Tokenizer, frame: Frame, dtype: str, before: ShardRecord | None
    ) -> None:
        self._tokenizer = tokenizer
        self._frame = frame
        self._dtype = dtype
        self._starts: list[int] = []
        self._num_tokens = self._num_bytes = 0
        self._num_parts, self._is_between = (
            (before.num_parts, before.ends_document) if before else (0, True)
        )

    @property
    def record(self) -> ShardRecord:
        return ShardRecord(
            num_tokens=self._num_tokens,
            num_documents=len(self._starts),
            num_bytes=self._num_bytes,
            num_parts=self._num_parts,
            ends_document=self._is_between,
        )

    def write(
        self,
        folder: Path,
        number: int,
        groups: Iterable[list[TextPart]],
        tokens_per_shard: int,
    ) -> None:
        """Write groups of parts until the shard is full, and then its record."""
        # A shard without a record is incomplete.

        def write_tokens(temporary: Path) -> None:
            with temporary.open("wb") as file:
                for group in groups:
                    file.write(self._encode(group).tobytes())
                    if self._num_tokens >= tokens_per_shard:
                        return

        write_atomically(_path(folder, number, "tokens"), write_tokens)
        write_bytes(
            _path(folder, number, "starts"),
            np.array(self._starts, dtype="<i8").tobytes(),
        )
        write_text(_path(folder, number, "json"), self.record.model_dump_json())

    def _encode(self, group: list[TextPart]) -> np.ndarray:
        # A document may consist of parts in several groups and shards: `_is_between` persists.
        sequences = []
        for part, ids in zip(
            group, self._tokenizer.encode([part.text for part in group]), strict=True
        ):
            if self._is_between:
                self._starts.append(self._num_tokens)
                ids = [*self._frame.before, *ids]
            if part.ends_document:
                ids = [*ids, *self._frame.after]
            sequences.append(np.array(ids, dtype=self._dtype))
            self._num_tokens += len(ids)
            self._num_bytes += len(part.text.encode())
            self._is_between = part.ends_document
            if (
                self._is_between
                and self._starts
                and self._starts[-1] == self._num_tokens
            ):
                self._starts.pop()  # a document without a token
        self._num_parts += len(group)
        return np.concatenate(sequences)


def _grouped(parts: Iterable[TextPart]) -> Iterator[list[TextPart]]:
    group: list[TextPart] = []
    size = 0
    for part in parts:
        group.append(part)
        size += len(part.text)
        if size >= _CHARACTERS_AT_ONCE or len(group) == _PARTS_AT_ONCE:
            yield group
            group = []
            size = 0
    if group:
        yield group


def _complete_shards(folder: Path, dtype: str) -> list[ShardRecord]:
    """Return the records of the complete shards before the first incomplete shard."""
    records: list[ShardRecord] = []
    while True:
        try:
            record = ShardRecord.model_validate_json(
                _path(folder, len(records), "json").read_bytes()
            )
        except (OSError, ValidationError):
            return records
        if _damage(folder, len(records), record, dtype):
            return records
        records.append(record)


def _damage(folder: Path, shard: int, record: ShardRecord, dtype: str) -> str | None:
    """Describe missing or truncated files of a shard; None if they are complete."""
    # Only sizes are compared: reading a large corpus would need minutes.
    wanted = {
        _path(folder, shard, "tokens"): record.num_tokens * np.dtype(dtype).itemsize,
        _path(folder, shard, "starts"): record.num_documents * 8,
    }
    for path, size in wanted.items():
        try:
            found = path.stat().st_size
        except OSError:
            return f"{path} is missing"
        if found != size:
            return (
                f"{path} is truncated or damaged: it has {found:,} bytes, not {size:,}"
            )
    return None


def _map_file(path: Path, dtype: str, count: int) -> np.ndarray:
    if count == 0:
        return np.zeros(0, dtype)
    try:
        return np.memmap(path, dtype=dtype, mode="r", shape=(count,))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be mapped into memory: {error}") from None


def _path(
    folder: Path, shard: int, ending: Literal["tokens", "starts", "json"]
) -> Path:
    return folder / f"{shard:05d}.{ending}"
