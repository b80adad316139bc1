"""Corpora for language models: their specification in a recipe, and their documents in parts."""

import glob
import hashlib
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple, final

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from triptych.errors import DataError, UsageError
from triptych.files import file_hash
from triptych.literals import Documents
from triptych.running.text.lines import iterate_blocks, iterate_file
from triptych.running.text.record_files import (
    NumberedTexts,
    fingerprint_hub,
    read_hub,
    read_jsonl,
    read_parquet,
    record_ending,
)

# Maximum length of a part in characters. Tokenization needs about a hundred times its size in memory.
LONGEST_PART = 1 << 17

_FOLDER_ENDINGS = (
    ".parquet",
    *map("".join, product((".txt", ".text", ".md", ".jsonl"), ("", ".gz", ".zst"))),
)
_OPTION_PLACES = {"split": "hub", "config_name": "hub", "documents": "files"}


@final
class LanguageCorpusSpec(BaseModel):
    """Where the text of a language model comes from: files, or a dataset of the Hugging Face Hub.

    Attributes:
        files: files of text, .jsonl (all also .gz and .zst) or .parquet; folders, whose .txt, .text, .md,
            .jsonl and .parquet files are read, in folders below them too; or patterns ("books/*.txt").
        documents: what a document is in a file of text: the whole "file", each "line" that is not blank, or
            the text between "blank-lines". In other files it is a record.
        hub: a dataset of the Hugging Face Hub by name, or a local dataset folder.
        split: which split of `hub`.
        config_name: which configuration of `hub`, if it has several.
        text_field: where the text is in each record: a column or field name, or a dotted path.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: tuple[str, ...] = ()
    documents: Documents = "file"
    hub: str | None = Field(default=None, min_length=1)
    split: str = Field(default="train", min_length=1)
    config_name: str | None = Field(default=None, min_length=1)
    text_field: str = Field(default="text", min_length=1)

    @field_validator("files", mode="before")
    @classmethod
    def _one_file_is_a_list_of_one(cls, files: object) -> object:
        return (str(files),) if isinstance(files, str | Path) else files

    @model_validator(mode="after")
    def _check_that_the_options_agree(self) -> "LanguageCorpusSpec":
        if bool(self.files) == (self.hub is not None):
            raise ValueError(
                "files and hub contradict each other; keep one of them"
                if self.files
                else "no corpus is given; set files or hub"
            )
        place = "files" if self.files else "hub"
        for option, wanted in _OPTION_PLACES.items():
            given = getattr(self, option) != type(self).model_fields[option].default
            if given and place != wanted:
                raise ValueError(
                    f"{option} goes with {wanted}, but this corpus is given by {place}"
                )
        return self

    def describe(self) -> str:
        """Return the name of the corpus for messages."""
        return (
            f"{self.hub} {self.split}"
            if self.hub is not None
            else ", ".join(self.files)
        )


class TextPart(NamedTuple):
    """A document, or a part of a long document."""

    text: str  # text of the part; not empty
    ends_document: bool = True  # True = the next part belongs to another document


def read_documents(
    spec: LanguageCorpusSpec, *, base: Path = Path()
) -> Iterator[TextPart]:
    """Yield the documents of a corpus in parts, without empty documents."""
    fields = (spec.text_field,)
    if spec.hub is not None:
        records = read_hub(spec.hub, spec.config_name, spec.split, fields, base)
        yield from cut_parts(_of_records(records))
        return
    for path in find_files(spec, base=base):
        match record_ending(path):
            case ".jsonl":
                yield from cut_parts(_of_records(read_jsonl(path, fields)))
            case ".parquet":
                yield from cut_parts(_of_records(read_parquet(path, fields)))
            case _:
                yield from cut_parts(_of_text(path, spec.documents))


def find_files(spec: LanguageCorpusSpec, *, base: Path = Path()) -> list[Path]:
    """Return the files of a corpus in the given order; files of a folder or pattern are sorted by name."""
    # Hidden files and folders are skipped; a name with wildcards is a pattern unless it exists.
    found: list[Path] = []
    for entry in spec.files:
        place = base / entry
        if place.is_dir():
            inside = (path for path in place.rglob("*") if path.is_file())
            paths = sorted(
                path
                for path in inside
                if path.name.lower().endswith(_FOLDER_ENDINGS)
                and not any(
                    part.startswith(".") for part in path.relative_to(place).parts
                )
            )
            if not paths:
                raise UsageError(
                    f"{place} has no file that ends in {', '.join(_FOLDER_ENDINGS)}"
                )
        elif not place.exists() and glob.has_magic(entry):
            root = Path(place.anchor)
            paths = sorted(
                path
                for path in root.glob(str(place.relative_to(root)))
                if path.is_file()
            )
            if not paths:
                raise UsageError(
                    f"no file matches {place}: give a pattern that fits, or the names of files"
                )
        else:
            paths = [place]
        found += paths
    return found


def fingerprint(spec: LanguageCorpusSpec, *, base: Path = Path()) -> str:
    """Compute a fingerprint of the documents of a corpus from the content of its files."""
    digest = hashlib.sha256(f"{spec.documents} {spec.text_field}\n".encode())
    if spec.hub is not None:
        digest.update(
            fingerprint_hub(spec.hub, spec.config_name, spec.split, base).encode()
        )
        return digest.hexdigest()
    # Endings count as well: they decide how a file is parsed.
    for path in find_files(spec, base=base):
        try:
            digest.update(
                f"{record_ending(path)} {path.suffix.lower()} {file_hash(path)}\n".encode()
            )
        except IsADirectoryError:
            raise UsageError(f"{path} is a folder; give a file in it") from None
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def require_documents(parts: Iterable[TextPart], name: str) -> Iterator[TextPart]:
    """Yield the parts unchanged; an empty corpus is a `DataError`."""
    some = False
    for part in parts:
        some = True
        yield part
    if not some:
        raise DataError(f"{name} is empty: at least one document with text is needed")


def whole_documents(parts: Iterable[TextPart]) -> Iterator[str]:
    """Yield the documents of a corpus, with their parts joined."""
    begun: list[str] = []
    for text, ends_document in parts:
        begun.append(text)
        if ends_document:
            yield "".join(begun)
            begun = []


def _of_records(records: Iterable[NumberedTexts]) -> Iterator[str | None]:
    for _, (text,) in records:
        yield from (text, None)


def _of_text(path: Path, documents: Documents) -> Iterator[str | None]:
    if documents == "file":
        yield from iterate_blocks(path)
        yield None
        return
    # A document ends at a blank line, or at every line if documents are lines.
    begun = False
    for line in iterate_file(path):
        blank = not line.strip()
        if blank or documents == "line":
            begun = False
            yield None
        if not blank:
            yield f"\n{line}" if begun else line
            begun = True
    yield None


def cut_parts(pieces: Iterable[str | None]) -> Iterator[TextPart]:
    """Cut documents into parts; `pieces` are strings, with a None after each document."""
    # The parts depend on the text alone, not on its division into pieces.
    text = ""
    for piece in pieces:
        if piece is None:
            if text:
                yield TextPart(text)
            text = ""
            continue
        text += piece
        start = 0
        while len(text) - start > LONGEST_PART:
            end = _end_of_part(text, start)
            yield TextPart(text[start:end], ends_document=False)
            start = end
        text = text[start:]


def _end_of_part(text: str, start: int) -> int:
    """Return the end of a part, if possible right after a line feed between two words."""
    # Tokenizers split text at such a line feed anyway. Otherwise cut after any line feed, or at the limit.
    longest = start + LONGEST_PART
    earliest = start + LONGEST_PART // 2
    end = longest
    while (place := text.rfind("\n", earliest, end)) > 0:
        if not text[place - 1].isspace() and not text[place + 1].isspace():
            return place + 1
        end = place
    place = text.rfind("\n", earliest, longest)
    return place + 1 if place > 0 else longest
