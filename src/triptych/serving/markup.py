"""HTML whose text is translated and whose tags stay."""

import html
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import final

# What is inside them is no text to translate.
_LEFT_ALONE = frozenset({"script", "style", "code", "pre", "textarea", "svg", "math"})
_VOID = frozenset(
    {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
)


@final
class Markup(HTMLParser):
    """The pieces of a document: `texts`, to be translated, and what is between them.

    A text is what is between two tags. Text in elements such as `code`, or with `translate="no"`, stays.
    """

    def __init__(self, document: str) -> None:
        super().__init__(convert_charrefs=True)
        self.texts: list[str] = []
        self._pieces: list[str | int] = []
        self._open: list[tuple[str, bool]] = []  # elements, and whether each leaves its text alone
        self.feed(document)
        self.close()

    def translated(self, texts: Sequence[str]) -> str:
        """The document with other texts in place of its own."""
        return "".join(
            html.escape(texts[piece], quote=False) if isinstance(piece, int) else piece
            for piece in self._pieces
        )

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._pieces.append(self.get_starttag_text() or "")
        if tag not in _VOID:
            stays = tag in _LEFT_ALONE or ("translate", "no") in attrs or self._stays
            self._open.append((tag, stays))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._pieces.append(self.get_starttag_text() or "")

    def handle_endtag(self, tag: str) -> None:
        self._pieces.append(f"</{tag}>")
        places = [place for place, (name, _) in enumerate(self._open) if name == tag]
        if places:
            del self._open[places[-1] :]

    def handle_data(self, data: str) -> None:
        if self._stays or not data.strip():
            raw = bool(self._open) and self._open[-1][0] in ("script", "style")
            self._pieces.append(data if raw else html.escape(data, quote=False))
            return
        core = data.strip()
        before, after = data[: data.index(core)], data[data.index(core) + len(core) :]
        self._pieces += [before, len(self.texts), after]
        self.texts.append(" ".join(core.split()))

    def handle_comment(self, data: str) -> None:
        self._pieces.append(f"<!--{data}-->")

    def handle_decl(self, decl: str) -> None:
        self._pieces.append(f"<!{decl}>")

    def handle_pi(self, data: str) -> None:
        self._pieces.append(f"<?{data}>")

    def unknown_decl(self, data: str) -> None:
        self._pieces.append(f"<![{data}]>")

    @property
    def _stays(self) -> bool:
        return bool(self._open) and self._open[-1][1]
