"""Codes of errors, and the sections of `explained.md` about them."""

from collections.abc import Mapping
from pathlib import Path

# The page about errors, from which `triptych explain` prints sections.
EXPLAINED = Path(__file__).with_name("explained.md")
# Codes of errors, the same in all versions, with the headings of their sections.
CODES: Mapping[str, str] = {
    "error": "Errors and exit codes",
    "request": "A request cannot be carried out",
    "refused": "A rewrite is refused",
    "file": "A file cannot be used",
    "unsupported": "A checkpoint is not supported",
    "damaged": "A file is damaged or hostile",
    "fault": "Faults, disks and limits",
}


def explain_code(code: str) -> str:
    """Return the section about a code in Markdown, with its sub-sections."""
    lines = EXPLAINED.read_text(encoding="utf-8").splitlines()
    (start,) = (
        number
        for number, line in enumerate(lines)
        if line.startswith("#") and line.lstrip("# ") == CODES[code]
    )
    # A section ends at the next heading of its level or above; the page's title belongs to its first section.
    level = max(len(lines[start].partition(" ")[0]), 2)
    ends = tuple("#" * above + " " for above in range(1, level + 1))
    section = [lines[start]]
    for line in lines[start + 1 :]:
        if line.startswith(ends):
            break
        section.append(line)
    return "\n".join(section).strip() + "\n"
