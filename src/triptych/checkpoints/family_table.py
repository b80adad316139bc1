"""The table of families in docs/reference/families.md: what is read, rewritten, run, written and tested.

python -m triptych.checkpoints.family_table docs/reference/families.md
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
    """A page with the table between its two marks brought up to date."""
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the page has no {START.strip()} with {END.strip()} after it")
    return before + start + "".join(f"{row}\n" for row in _rows()) + end + after


def _rows() -> Iterator[str]:
    yield "| family | `model_type` | read | rewritten | run | written | shown by, in `tests/checkpoints/` |"
    yield "|---|---|---|---|---|---|---|"
    for family in sorted(families(), key=lambda family: family.name.lower()):
        if family.attention:
            yield _row(family)


def _row(family: Family) -> str:
    types = ", ".join(f"`{name}`" for name in family.model_types)
    kept = [spec for spec in family.attention if spec.why_kept]
    rewritten = "no" if len(kept) == len(family.attention) else "in part" if kept else "yes"
    model = family.model
    run = "no" if model is None else "encoder-decoder" if model.encoder else model.kind
    positions = (position.kind for spec in family.attention for position in spec.positions)
    products = "disentangled" in positions
    written = "no" if model is None else "in part" if products else "yes"
    shown = ["test_families.py", *([_TESTS[run], "test_model_writing.py"] if run in _TESTS else [])]
    tests = ", ".join(f"`{test}`" for test in shown)
    return f"| {family.name} | {types} | yes | {rewritten} | {run} | {written} | {tests} |"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    write_text(page, with_table(page.read_text(encoding="utf-8")))
