"""The first pages and the tutorials as notebooks, where they have Python.

`python docs/notebooks.py site` (`make docs`) writes them next to the pages. What a reader saves becomes
`%%writefile`, a command `!triptych …`. The tests run the blocks of the pages.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$\n?", re.DOTALL | re.MULTILINE)
_SAVED = re.compile(r"`([\w-]+\.(?:toml|py))`")


def notebook(page: str) -> dict[str, Any]:
    """A page as the tree of an `.ipynb` file."""
    cells, end = [], 0
    for number, fence in enumerate(_FENCE.finditer(page)):
        before = page[end : fence.start()].strip()
        source = _code(fence[1], fence[2], before)
        if source is not None:
            cells += [_cell(number, "markdown", before)] if before else []
            cells.append(_cell(number, "code", source))
            end = fence.end()
    rest = page[end:].strip()
    cells += [_cell(len(cells), "markdown", rest)] if rest else []
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _code(language: str, block: str, before: str) -> str | None:
    """What a code cell holds; None for a block that nobody runs."""
    named = _SAVED.findall(before.rpartition("\n\n")[2])
    if language == "toml" and named:
        return f"%%writefile {named[-1]}\n{block.rstrip()}"
    if language == "python":
        saved = before.rpartition("\n\n")[2].lower().startswith("save this") and named
        return f"%%writefile {named[-1]}\n{block.rstrip()}" if saved else block.rstrip()
    if language == "console":
        commands = [line[2:].partition("   # ")[0] for line in block.splitlines() if line.startswith("$ ")]
        return "\n".join(f"!{command}" for command in commands)
    return None


def _cell(number: int, kind: str, source: str) -> dict[str, Any]:
    code = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "id": f"{kind}-{number}", "metadata": {}, "source": source, **code}


def main(site: Path) -> None:
    """Write the notebooks."""
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if page.relative_to(DOCS).parts[0] in ("start", "tutorials") and "\n```python\n" in text:
            target = (site / page.relative_to(DOCS)).with_suffix(".ipynb")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(notebook(text), ensure_ascii=False, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
