"""The table of families in docs/families.md: what is read, rewritten and run, and the test that shows it.

python -m triptych.checkpoints.family_table docs/families.md
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from triptych.checkpoints.family import Family, families
from triptych.files import write_text

START, END = "<!-- families -->\n", "<!-- end of families -->\n"
_TESTS = {
    "decoder": "test_models_run.py",
    "encoder": "test_encoders_run.py",
    "encoder-decoder": "test_encoder_decoders_run.py",
}


def with_table(page: str) -> str:
    """A page with the table between its two marks brought up to date.

    Raises:
        ValueError: the marks are not there.
    """
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the page has no {START.strip()} with {END.strip()} after it")
    return before + start + "".join(f"{row}\n" for row in _rows()) + end + after


def _rows() -> Iterator[str]:
    yield "| family | `model_type` | read | rewritten | run | shown by, in `tests/checkpoints/` |"
    yield "|---|---|---|---|---|---|"
    for family in sorted(families(), key=lambda family: family.name.lower()):
        if family.attention:
            yield _row(family)


def _row(family: Family) -> str:
    types = ", ".join(f"`{name}`" for name in family.model_types)
    kept = [spec for spec in family.attention if spec.why_kept]
    rewritten = "no" if len(kept) == len(family.attention) else "in part" if kept else "yes"
    model = family.model
    run = "no" if model is None else "encoder-decoder" if model.encoder else model.kind
    shown = ["test_families.py", *([_TESTS[run]] if run in _TESTS else [])]
    return f"| {family.name} | {types} | yes | {rewritten} | {run} | {', '.join(f'`{t}`' for t in shown)} |"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    write_text(page, with_table(page.read_text(encoding="utf-8")))
