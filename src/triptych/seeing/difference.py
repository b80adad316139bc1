"""The comparison of two models in a few lines, as a page, as JSON, and as a JUnit report."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any, final

from triptych.errors import UsageError
from triptych.files import write_text
from triptych.literals import Requirement, check_choices
from triptych.printable import printable, shortened, table_html
from triptych.progress import Progress, untold
from triptych.rewriting.differences.comparing_models import compare
from triptych.rewriting.differences.difference_records import (
    ChainStep,
    Change,
    PartDifference,
    SettingDifference,
    TextDifference,
    Verdict,
    holds,
)
from triptych.rewriting.differences.difference_records import Difference as Found
from triptych.running.opened_source import Opened
from triptych.seeing.reports.html import make_page
from triptych.seeing.reports.records import Table

_LINES = 8
_WIDTH = 160
# Number of reasons shown with named kinds of change.
_MOST_REASONS = 2
_MOST_OF_PARTS = 3
_MEANING = {
    "same bytes": "the same tensors under the same names",
    "same numbers": "the same numbers, stored in another way",
    "same function": "exact rewrites lead from A to B",
    "near": "another function",
    "different": "other models",
}
# Signs in the cells of a page, for readers without colours.
_SIGNS: dict[Verdict, str] = {
    "same bytes": "=",
    "same numbers": "=",
    "same function": "≅",
    "near": "≈",
    "different": "≠",
}
_REQUIRED: dict[Requirement, Verdict] = {
    "numbers": "same numbers",
    "function": "same function",
    "near": "near",
}


@final
class Difference:
    """The comparison of two models A and B.

    Attributes:
        found: the comparison as a record.
        a: name of the first model.
        b: name of the second model.
        verdict: "same bytes", "same numbers", "same function", "near" or "different".
        parts: all parts, with embeddings and head.
        layers: the parts of layers, attention and feed-forward, in the order of the model.
        first: name of the first differing part; "" if all are equal.
        chain: exact rewrites from A to B, if the verdict is "same function".
        changes: named kinds of change, with their evidence.
        settings: differing fields of the configurations, if they change the computation.
        reasons: sentences on the verdict.
        text: the difference on a text; None without a text, or for equal functions.
        texts: differences of tokenizers, chat templates and generation settings. The verdict, on the
            weights and the configuration, is independent of these differences.
        notes: sentences on the scope of the comparison.
    """

    def __init__(self, found: Found) -> None:
        self.found = found
        self.a: str = found.a
        self.b: str = found.b
        self.verdict: Verdict = found.verdict
        self.parts: tuple[PartDifference, ...] = found.parts
        self.layers: tuple[PartDifference, ...] = tuple(
            part for part in found.parts if part.layer
        )
        self.first: str = found.first
        self.chain: tuple[ChainStep, ...] = found.chain
        self.changes: tuple[Change, ...] = found.changes
        self.settings: tuple[SettingDifference, ...] = found.settings
        self.reasons: tuple[str, ...] = found.reasons
        self.text: TextDifference | None = found.text
        self.texts: tuple[str, ...] = found.texts
        self.notes: tuple[str, ...] = found.notes

    @check_choices
    def why_not(
        self, require: Requirement = "function", within: float | None = None
    ) -> str:
        """Return the reason why the models are further apart than required; "" if they are not.

        Args:
            require: "numbers", "function" or "near".
            within: upper bound of the KL divergence on the text in nats, with "near".

        Raises:
            UsageError: `within` is given without "near", or the models were not compared on a text.
        """
        if within is not None and require != "near":
            raise UsageError(
                "--within bounds the KL divergence of models that are near: add --require near"
            )
        if within is not None and not 0 <= within < math.inf:
            raise UsageError(
                f"--within {within}: a KL divergence is a number of nats from 0 on"
            )
        needed = _REQUIRED[require]
        # Stronger verdicts pass without a bound: equal functions have a KL divergence of 0.
        if not holds(self.verdict, needed):
            first = f", first in {self.first}" if self.first else ""
            return f"the verdict is {self.verdict}{first}; required is {needed}"
        if within is None or holds(self.verdict, "same function"):
            return ""
        if self.text is None:
            raise UsageError(
                "--within needs a text that both models can be run on: give it with --text"
            )
        _, _, high = self.text.kl
        return (
            ""
            if high <= within
            else f"the KL divergence is up to {high:.3g} nats; required is {within:g}"
        )

    def summary(self) -> list[str]:
        """Return at most 8 lines: verdict, first differing part, kinds of change, chain."""
        lines = [f"{self.verdict}: {self.a} and {self.b} ({_MEANING[self.verdict]})"]
        lines += [f"  {line}" for line in self._found_in_words()]
        shown = (
            lines
            if len(lines) <= _LINES
            else [*lines[: _LINES - 1], f"  … {len(lines) - _LINES + 1} more"]
        )
        return [shortened(line, _WIDTH) for line in shown]

    def _found_in_words(self) -> Iterator[str]:
        # The most telling lines first: the last ones may be cut off.
        differing = [
            part for part in self.parts if part.verdict in ("near", "different")
        ]
        if differing:
            yield f"first in {self._first_in_words()}; {len(differing)} of {len(self.parts)} parts differ"
        if self.text is not None:
            yield text_in_words(self.text)
        for change in self.changes:
            where = f": {', '.join(change.where)}" if change.where else ""
            yield f"{change.kind}: {change.evidence}{where}"
        if self.chain:
            count = (
                "1 rewrite" if len(self.chain) == 1 else f"{len(self.chain)} rewrites"
            )
            layers: dict[str, list[str]] = {}
            for step in self.chain:
                layers.setdefault(step_in_words(step), []).extend(step.layers)
            yield f"{count}: {'; '.join(words + _of_layers(own) for words, own in layers.items())}"
        yield from (f"texts: {sentence}" for sentence in self.texts)
        reasons = self.reasons[:_MOST_REASONS] if self.changes else self.reasons
        yield from reasons
        if left := len(self.reasons) - len(reasons):
            yield f"{left} more reasons"
        yield from self.notes

    def _first_in_words(self) -> str:
        part = next(part for part in self.parts if part.name == self.first)
        heads = [
            head.head for head in part.heads if head.verdict in ("near", "different")
        ]
        head = f" (head {part.layer}.{heads[0]})" if heads else ""
        size = "" if not part.relative else f", relative size {part.relative:.2g}"
        return f"{part.name}{head}{size}"

    def record(self) -> dict[str, Any]:
        """Return the comparison as one record for JSON; an infinite figure is a word."""
        return {name: _plain(value) for name, value in asdict(self.found).items()}

    def to_json(self, path: str | Path) -> None:
        """Write the comparison as JSON.

        Args:
            path: output file.
        """
        write_text(
            Path(path),
            json.dumps(self.record(), ensure_ascii=False, allow_nan=False) + "\n",
        )

    @check_choices
    def to_junit(
        self,
        path: str | Path,
        require: Requirement = "function",
        within: float | None = None,
    ) -> None:
        """Write a report in JUnit's format, with a test per part and a test of the whole model.

        Args:
            path: output file.
            require: "numbers", "function" or "near".
            within: bound of `why_not`.
        """
        write_text(Path(path), _junit(self, require, within))

    def page(self, path: str | Path) -> None:
        """Write an offline page: a row for each layer, a cell for each head.

        Args:
            path: output file.
        """
        write_text(Path(path), _page(self))

    def __repr__(self) -> str:
        first, *others = self.summary()
        return "\n".join((f"Difference, {first}", *others))

    def _repr_html_(self) -> str:
        said = "".join(f"<p>{escape(line)}</p>" for line in self.summary())
        table = _parts_table(self.parts[:_LINES])
        return said + table_html(table.title, table.rows, table.columns)


def difference(
    a: Opened,
    b: Opened,
    *,
    text: str | Path | None,
    also: Opened | None,
    progress: Progress = untold,
) -> Difference:
    """Compare two opened models; see `triptych.diff`."""
    return Difference(
        compare(
            a,
            b,
            text=None if text is None else Path(text),
            also=also,
            progress=progress,
        )
    )


def _of_layers(layers: Sequence[str]) -> str:
    if not layers:
        return ""
    return (
        f" ({layers[0]})"
        if len(layers) == 1
        else f" ({len(layers)} layers, {layers[0]} to {layers[-1]})"
    )


def step_in_words(step: ChainStep) -> str:
    """Return the words of a step of a chain, with its direction."""
    return f"{step.words} (from B to A)" if step.inverse else step.words


def text_in_words(found: TextDifference) -> str:
    """Return the difference on a text in one line."""
    mean, low, high = found.kl
    change, least, most = found.loss_change
    said = f"on {found.tokens:,} tokens: KL {mean:.3g} nats ({low:.3g} to {high:.3g})"
    return (
        f"{said}, loss {found.loss_a:.4g} {change:+.3g} ({least:+.3g} to {most:+.3g})"
    )


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {str(name): _plain(own) for name, own in value.items()}
        case list() | tuple():
            return [_plain(own) for own in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value


def _junit(found: Difference, require: Requirement, within: float | None) -> str:
    needed = _REQUIRED[require]
    # XML cannot represent control characters.
    name = escape(printable(f"triptych diff {found.a} {found.b}"))
    cases = []
    for part in found.parts:
        why = (
            ""
            if holds(part.verdict, needed)
            else "; ".join(part.reasons) or f"it is {part.verdict}"
        )
        cases.append((part.name, part.verdict, why))
    cases.append(("whole model", found.verdict, found.why_not(require, within)))
    failures = sum(bool(why) for _, _, why in cases)
    lines = [
        JUNIT_START.decode(),
        f'<testsuites tests="{len(cases)}" failures="{failures}">',
        f'<testsuite name="{name}" tests="{len(cases)}" failures="{failures}">',
    ]
    for case, verdict, why in cases:
        start = f'<testcase classname="triptych.diff" name="{escape(printable(case))}"'
        if why:
            said = escape(printable(why))
            lines.append(
                f'{start}><failure type="{verdict}" message="{said}">{said}</failure></testcase>'
            )
        else:
            lines.append(f"{start}/>")
    return "\n".join([*lines, "</testsuite>", "</testsuites>", ""])


JUNIT_START = b'<?xml version="1.0" encoding="utf-8"?>\n<!-- Made by triptych diff. -->'


def _parts_table(parts: Sequence[PartDifference]) -> Table:
    rows = tuple(
        (
            part.name,
            part.verdict,
            "" if part.relative is None else f"{part.relative:.2g}",
            "; ".join((*part.steps, *part.reasons)),
        )
        for part in parts
    )
    return Table(
        "Parts", ("part", "verdict", "relative size", "found"), rows, numeric=(2,)
    )


def _page(found: Difference) -> str:
    names: dict[str, list[PartDifference]] = {}
    for part in found.layers:
        names.setdefault(part.layer, []).append(part)
    rows = [(layer, [_cells(part) for part in parts]) for layer, parts in names.items()]
    differing = [part for part in found.parts if part.verdict in ("near", "different")]
    facts = [
        ("A", found.a),
        ("B", found.b),
        ("verdict", found.verdict),
        ("parts that differ", f"{len(differing)} of {len(found.parts)}"),
    ]
    counts = [
        (sign, verdict, sum(part.verdict == verdict for part in found.parts))
        for verdict, sign in _SIGNS.items()
    ]
    # Make the words here to keep logic out of the template.
    chain = [step_in_words(step) for step in found.chain]
    tables = [_parts_table(found.parts)]
    if found.settings:
        rows_of_settings = tuple((one.name, one.a, one.b) for one in found.settings)
        tables.append(
            Table("Settings that differ", ("setting", "A", "B"), rows_of_settings)
        )
    return make_page(
        "difference.html",
        title=f"{found.verdict[0].upper()}{found.verdict[1:]}: {_MEANING[found.verdict]}",
        facts=facts,
        rows=rows,
        counts=[one for one in counts if one[2]],
        changes=found.changes,
        effects=_effects_table(found.changes),
        chain=chain,
        reasons=_reasons_of_page(found),
        texts=found.texts,
        notes=found.notes,
        tables=tables,
    )


def _reasons_of_page(found: Difference) -> list[str]:
    """Return the reasons outside parts, and the first reasons of parts; the table of parts has them all."""
    of_parts = set[str]()
    for part in found.parts:
        of_parts |= {f"{part.name}: {reason}" for reason in part.reasons}
    reasons = [] if found.text is None else [text_in_words(found.text)]
    reasons += [reason for reason in found.reasons if reason not in of_parts]
    rest = [reason for reason in found.reasons if reason in of_parts]
    reasons += rest[:_MOST_OF_PARTS]
    if len(rest) > _MOST_OF_PARTS:
        reasons.append(f"{len(rest) - _MOST_OF_PARTS} more, in the table of parts")
    return reasons


def _effects_table(changes: Sequence[Change]) -> Table | None:
    """Return the heads that a change of low rank changes most."""
    heads: dict[str, tuple[float, float]] = {}
    for change in changes:
        heads |= change.heads
    if not heads:
        return None
    most = sorted(heads.items(), key=lambda item: -max(item[1]))[:12]
    rows = tuple((head, f"{qk:.3g}", f"{ov:.3g}") for head, (qk, ov) in most)
    columns = ("head", "‖ΔW_QK‖ / ‖W_QK‖", "‖ΔW_OV‖ / ‖W_OV‖")
    return Table("Heads that change most", columns, rows, numeric=(1, 2))


def _cells(part: PartDifference) -> dict[str, Any]:
    """Return one part of a layer for the page, with a cell per head, or a single cell."""
    cells = [
        {
            "sign": _SIGNS[head.verdict],
            "kind": head.verdict.replace(" ", "-"),
            "share": _share(max(head.qk or 0.0, head.ov or 0.0)),
            "about": _head_in_words(part, head),
        }
        for head in part.heads
    ]
    size = "" if part.relative is None else f", relative size {part.relative:.2g}"
    whole = {
        "sign": _SIGNS[part.verdict],
        "kind": part.verdict.replace(" ", "-"),
        "share": _share(part.relative or 0.0),
        "about": f"{part.name}: {part.verdict}{size}",
    }
    kind = part.name.removeprefix(part.layer).strip() or part.kind
    return {"kind": kind, "cells": cells or [whole]}


def _head_in_words(part: PartDifference, head: Any) -> str:
    moved = "" if head.other in (None, head.head) else f", is {head.other} in B"
    sizes = [
        f", Δ{form} {size:.2g}"
        for form, size in (("W_QK", head.qk), ("W_OV", head.ov))
        if size is not None
    ]
    return f"{part.layer}.{head.head}: {head.verdict}{moved}{''.join(sizes)}"


def _share(relative: float) -> float:
    """Return a share of colour between 0 and 1: logarithmic, from 10⁻⁴ to 1."""
    if not relative > 0:
        return 0.0
    return round(min(max(1 + math.log10(min(relative, 1.0)) / 4, 0.0), 1.0), 2)
