"""Texts as verbs take them: strings, or the file of a text, read for the kind of model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triptych.errors import UsageError
from triptych.literals import Documents
from triptych.running.opening.reader import Reader
from triptych.running.text.documents import (
    LanguageCorpusSpec,
    read_documents,
    whole_documents,
)
from triptych.running.text.given import as_lines, refuse_file_name
from triptych.running.text.lines import read_lines


def read_texts(reader: Reader, path: Path, documents: Documents = "file") -> list[str]:
    """Read the documents of a file or a folder; an encoder-decoder has the lines of a file."""
    if reader.translates:
        if documents != "file":
            raise UsageError(
                "documents is for language models: of a translator each line is a sentence"
            )
        return read_lines(path)
    spec = LanguageCorpusSpec(files=(str(path),), documents=documents)
    return [*whole_documents(read_documents(spec))]


def given_texts(
    reader: Reader, text: Any, documents: Documents = "file"
) -> Sequence[str]:
    """Return the documents of a file, a text, or several documents."""
    if isinstance(text, Path):
        return read_texts(reader, text, documents)
    if documents != "file":
        raise UsageError(
            "documents says what a document is in a file: give Path(FILE), or leave it out"
        )
    return as_lines(refuse_file_name(text, or_path=True))


def given_lines(lines: Any) -> Sequence[str]:
    """Return the lines of a file, one line, or several lines."""
    return (
        read_lines(lines)
        if isinstance(lines, Path)
        else as_lines(refuse_file_name(lines, or_path=True))
    )
