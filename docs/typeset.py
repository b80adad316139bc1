r"""Formulas of the pages, typeset while the site is built: an extension of Python-Markdown (`mkdocs.yml`).

A fenced block `math` and a formula in a line, $`W_Q W_K^\top`$, are LaTeX, as on GitHub; they become MathML,
which browsers draw without a script. Names of matrices and widths in the text, W_Q and d_k, get subscripts.
Their underscores stay in the text, so that anchors, the search, and copied sentences have them.
"""

import re
from typing import Any
from xml.etree import ElementTree as ET

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor

_FENCE = re.compile(r"^```math\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_IN_A_LINE = r"\$`([^`\n]+)`\$"
# A letter with a subscript, a superscript, or both: W_Q, d_model, W_i^Q, W^D.
_NAME = (
    r"(?<![\w\\./#-])(?P<letter>[A-Za-zΣσ])"
    r"(?=[_^])(?:_(?P<sub>[A-Za-z]{1,5}|\d))?(?:\^(?P<sup>[A-Z]))?"
    r"(?![A-Za-z0-9_/(^])(?!\.\w)"
)
# Priorities: other fenced blocks have 25, code in a line 190, and links 160 to 110.
_BEFORE_FENCES = 28
_BEFORE_CODE = 195
_AFTER_LINKS = 65


class Blocks(Preprocessor):
    """Replaces fenced blocks of formulas by MathML."""

    def run(self, lines: list[str]) -> list[str]:
        """Return the lines of a page with places of its formulas."""
        return _FENCE.sub(self._typeset, "\n".join(lines)).split("\n")

    def _typeset(self, found: re.Match[str]) -> str:
        drawn = "".join(convert(line, display="block") for line in found[1].splitlines() if line.strip())
        place = self.md.htmlStash.store(f'<div class="formula">{drawn}</div>')
        return f"\n\n{place}\n\n"


class Formulas(InlineProcessor):
    """Replaces formulas in a line by MathML."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:
        """Return the place of a formula."""
        return self.md.htmlStash.store(convert(m[1])), m.start(0), m.end(0)


class Names(InlineProcessor):
    """Gives names such as W_Q their subscripts."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[ET.Element, int, int]:
        """Return the element of a name."""
        name = ET.Element("span", {"class": "name"})
        ET.SubElement(name, "i").text = m["letter"]
        for sign, tag in (("_", "sub"), ("^", "sup")):
            if text := m[tag]:
                ET.SubElement(name, "span").text = sign
                place = ET.SubElement(name, tag)
                is_index = len(text) == 1 and text.islower()
                (ET.SubElement(place, "i") if is_index else place).text = text
        return name, m.start(0), m.end(0)


class Typesetting(Extension):
    """Blocks, formulas and names."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register what replaces them."""
        md.preprocessors.register(Blocks(md), "formula_blocks", _BEFORE_FENCES)
        md.inlinePatterns.register(Formulas(_IN_A_LINE, md), "formulas", _BEFORE_CODE)
        md.inlinePatterns.register(Names(_NAME, md), "names_of_matrices", _AFTER_LINKS)


def makeExtension(**options: Any) -> Typesetting:
    """Return the extension."""
    return Typesetting(**options)
