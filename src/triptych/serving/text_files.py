"""Files to translate: text, HTML and SubRip subtitles, with everything besides their text unchanged."""

import html
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple, final

from triptych.serving.limits import RequestError

_MOST_KEPT = 64  # files
_MOST_BYTES = 1 << 25
_SECONDS_KEPT = 600.0
_TIMES = re.compile(r"\s*\d+:\d+:\d+[,.]\d+\s*-->\s*\d+:\d+:\d+[,.]\d+.*")
_POSITION = re.compile(r"\s*(?:\{[^}]*\}\s*)*")  # {\an8}
_DASH = re.compile(r"\s*(?:<[^>]*>|\{[^}]*\})*\s*[-–—‐]")
_WORD = re.compile(r"(?:<[^>]*>|\S)+")


class TextFile(ABC):
    """File with its texts to translate.

    Attributes:
        texts: texts to translate.
        is_html: True if the texts, and their translations, are HTML.
    """

    texts: list[str]
    is_html: bool

    def __init__(self, name: str) -> None:
        self._name = name

    @staticmethod
    def read(name: str, content: bytes) -> "TextFile":
        """Read a file by its name's ending; raise `RequestError` for unknown endings and invalid text."""
        path = PurePath(name)
        kind = _KINDS.get(path.suffix.lower())
        if kind is None:
            what = path.suffix or "a name without an ending"
            raise RequestError(
                400, f"file: {what} is not translated; what is: {', '.join(ENDINGS)}"
            )
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise RequestError(
                400, f"file: byte {error.start:,} is no text in UTF-8"
            ) from None
        return kind(path.name, text)

    def name_in(self, language: str) -> str:
        """Return the name of the translated file."""
        path = PurePath(self._name)
        return f"{path.stem}_{language}{path.suffix}"

    @abstractmethod
    def translated(self, texts: Sequence[str]) -> str:
        """Return the file with its texts replaced by their translations."""


@final
class _WholeFile(TextFile):
    def __init__(self, name: str, text: str) -> None:
        super().__init__(name)
        self.is_html = not name.lower().endswith(".txt")
        self.texts = [text]

    def translated(self, texts: Sequence[str]) -> str:
        return texts[0]


class _Spoken(NamedTuple):
    """Lines of a subtitle, translated as one text."""

    before: str  # position on the picture
    lines: list[str]
    number: int  # index of the text

    def filled(self, text: str) -> list[str]:
        """Return a translation in as many lines, of about the same shares of the text."""
        words = _WORD.findall(text)
        length = sum(map(len, self.lines))
        own = sum(map(len, words))
        filled: list[list[str]] = [[] for _ in self.lines]
        at = 0
        done = 0
        share = len(self.lines[0])
        for word in words:
            while (
                at + 1 < len(self.lines)
                and (done + len(word) / 2) * length > share * own
            ):
                at += 1
                share += len(self.lines[at])
            filled[at].append(word)
            done += len(word)
        return [" ".join(line) for line in filled if line]


@final
class _Subtitles(TextFile):
    """SubRip subtitles. The lines of a subtitle are one text, unless they begin with dashes of a dialogue.

    The texts are HTML, in which SubRip writes italics and colours.
    """

    is_html = True

    def __init__(self, name: str, text: str) -> None:
        super().__init__(name)
        self.texts = []
        self._parts: list[str | _Spoken] = []
        self._end = "\r\n" if "\r\n" in text else "\n"
        lines = text.replace("\r\n", "\n").split("\n")
        spoken = list[str]()
        is_spoken = False
        for line in lines:
            if is_spoken and line.strip():
                spoken.append(line)
                continue
            self._say(spoken)
            spoken = []
            is_spoken = bool(_TIMES.fullmatch(line))
            self._parts.append(line)
        self._say(spoken)

    def _say(self, lines: list[str]) -> None:
        is_dialogue = len(lines) > 1 and all(map(_DASH.match, lines))
        for own in (
            [[line] for line in lines] if is_dialogue else [lines] if lines else []
        ):
            found = _POSITION.match(own[0])
            before = found[0] if found else ""
            own[0] = own[0].removeprefix(before)
            self._parts.append(_Spoken(before, own, len(self.texts)))
            self.texts.append(
                " ".join(line.strip() for line in own).replace("&", "&amp;")
            )

    def translated(self, texts: Sequence[str]) -> str:
        lines = list[str]()
        for part in self._parts:
            if isinstance(part, str):
                lines.append(part)
                continue
            first, *others = part.filled(html.unescape(texts[part.number])) or [""]
            lines += [part.before + first, *others]
        return self._end.join(lines)


_KINDS = {
    ".txt": _WholeFile,
    ".html": _WholeFile,
    ".htm": _WholeFile,
    ".srt": _Subtitles,
}
ENDINGS = tuple(_KINDS)


class KeptFile(NamedTuple):
    """Translated file."""

    name: str
    content: bytes


@final
class KeptFiles:
    """Translated files in memory: a file expires after ten minutes, or when newer files exceed the limit."""

    def __init__(self) -> None:
        self._files = OrderedDict[str, tuple[float, KeptFile]]()

    def keep(self, file: KeptFile) -> str:
        """Keep a file and return the token to find it by."""
        token = secrets.token_urlsafe(16)
        self._files[token] = time.monotonic(), file
        self._forget()
        return token

    def find(self, token: str) -> KeptFile | None:
        """Return a file; None if it is not kept any more."""
        self._forget()
        found = self._files.get(token)
        return None if found is None else found[1]

    def _forget(self) -> None:
        oldest = time.monotonic() - _SECONDS_KEPT
        size = sum(len(file.content) for _, file in self._files.values())
        while self._files:
            token, (kept, file) = next(iter(self._files.items()))
            if (
                kept >= oldest
                and len(self._files) <= _MOST_KEPT
                and size <= _MOST_BYTES
            ):
                return
            size -= len(file.content)
            del self._files[token]
