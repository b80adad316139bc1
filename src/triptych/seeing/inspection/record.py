"""An inspection: every figure of every head, a summary, tables, files and a page."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

from triptych.files import write_text
from triptych.printable import table_html
from triptych.seeing.chance import (
    random_closeness,
    random_copying_spread,
    random_spectra,
    random_symmetric_share,
)
from triptych.seeing.inspection.drawing import render_heads, shaded_map
from triptych.seeing.inspection.layer_records import FOLD, InspectedLayer
from triptych.seeing.inspection.measures import LOSSES, MEASURES
from triptych.seeing.reports.html import short_name
from triptych.seeing.reports.records import Table
from triptych.seeing.reports.rows import data_frame, write_csv

# Minimum absolute cosine of the forms of nearly equal heads.
NEAR = 0.9
_PAIRS = {"qk": "W_Q and W_K", "qv": "W_Q and W_V", "kv": "W_K and W_V"}
_RARE = 0.001
_MOST_SHOWN = 12
# Measures drawn as maps in a terminal.
_MAPPED = (
    "qk_effective_rank",
    "ov_effective_rank",
    "qk_times_chance",
    "qk_symmetric_share",
    "ov_copying",
)


@final
@dataclass(frozen=True)
class NearCopy:
    """Two heads with nearly equal W_QK or W_OV and separate maps."""

    form: str  # "qk" or "ov"
    one: str  # a head, such as "encoder 0, head 3"
    other: str
    cosine: float  # cosine of their forms; negative if opposite


@final
@dataclass(frozen=True)
class Inspection:
    """The measures of a checkpoint.

    Attributes:
        name: name of the checkpoint.
        family: family of the checkpoint.
        known_by: evidence for the family.
        layers: measured layers.
        ignores_rotary: True if figures of rotary heads describe W_Q W_Kᵀ without the rotation.
        num_tensors: number of tensors; tensors in `left_over` do not belong to attention.
        seconds: duration of the measurement.
        copies: nearly equal heads, in descending order of similarity.
        more_copies: True if further nearly equal heads may exist.
        unread: recognised but unread attention tensors, with the reason.
        others: description of attention layers and other layers; "" if all layers are attention.
        absent: stacks in the configuration missing from the file.
        warnings: sentences on ignored fields of the configuration, and on layers read but not run.
    """

    name: str
    family: str
    known_by: str
    layers: tuple[InspectedLayer, ...]
    ignores_rotary: bool
    num_tensors: int
    left_over: tuple[str, ...]
    seconds: float
    copies: tuple[NearCopy, ...]
    more_copies: bool
    unread: dict[str, str]
    others: str = ""
    absent: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat record per head: its position, then every measure."""
        return [
            {
                "stack": layer.stack,
                "layer": layer.layer,
                "kind": layer.kind,
                "head": head,
                "module": layer.module,
                "positions": layer.positions,
                "qk_of": layer.qk_of,
                **{
                    measure.name: layer.figures[measure.name][place]
                    for measure in MEASURES
                },
            }
            for layer in self.layers
            for place, head in enumerate(layer.heads)
        ]

    @property
    def num_heads(self) -> int:
        """The number of measured heads."""
        return sum(len(layer.heads) for layer in self.layers)

    def shown(self, *, with_maps: bool = True) -> tuple[list[str], list[Table]]:
        """Return the output for a terminal: lines, with maps of layers × heads or without, and tables."""
        lines = [self.name, *(f"  {sentence}" for sentence in findings(self))]
        for measure in _MAPPED if with_maps else ():
            if found := shaded_map(self.layers, measure):
                lines += ["", *found]
        return [*lines, ""], [
            averages(self),
            outliers(self),
            *([near_copies(self)] if self.copies else []),
        ]

    def record(self) -> dict[str, Any]:
        """Return all results as a JSON object."""
        found = asdict(self)
        for layer in found["layers"]:
            del layer["pictures"]
            layer["figures"] = {
                name: [
                    "Infinity" if value == math.inf else value for value in values
                ]  # unsupported by JSON
                for name, values in layer["figures"].items()
            }
        found["summary"] = (*findings(self), *average_lines(self))
        return found | {
            "measures": {measure.name: measure.meaning for measure in MEASURES}
        }

    def page(self, path: str | Path) -> None:
        """Write an offline page with a map of layers × heads for each measure.

        Args:
            path: output file.
        """
        write_text(Path(path), heads_page([self], f"inspect {self.name}"))

    def to_csv(self, path: str | Path) -> None:
        """Write one row per head as CSV, with the columns of `docs/reference/columns.md`.

        Args:
            path: output file.
        """
        write_csv(self.rows(), Path(path))

    def to_json(self, path: str | Path) -> None:
        """Write every figure, spectra included, as JSON.

        Args:
            path: output file.
        """
        write_text(Path(path), json.dumps(self.record(), allow_nan=False) + "\n")

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with one row per head.

        Raises:
            UsageError: pandas is not installed.
        """
        return data_frame(self.rows(), "rows() gives the same")

    def __repr__(self) -> str:
        lines = [
            f"Inspection of {self.name}",
            *(f"  {line}" for line in findings(self)[:5]),
        ]
        return "\n".join(
            (*lines, "  rows(), page(path), to_csv(path), to_json(path), to_pandas()")
        )

    def _repr_html_(self) -> str:
        said = "".join(f"<p>{escape(line)}</p>" for line in findings(self))
        table = averages(self)
        return said + table_html(table.title, table.rows, table.columns)


class Value(NamedTuple):
    """A measure of one head."""

    value: float
    layer: InspectedLayer
    head: int

    @property
    def place(self) -> str:
        return f"{self.layer.name}, head {self.head}"


def values_of(inspection: Inspection, measure: str) -> list[Value]:
    """Return the values of a measure for all heads with this measure."""
    return [
        Value(value, layer, head)
        for layer in inspection.layers
        for head, value in zip(layer.heads, layer.figures[measure], strict=True)
        if value is not None
    ]


def findings(inspection: Inspection) -> tuple[str, ...]:
    """Return a few one-line findings, then notes on the figures."""
    return (*_what_it_is(inspection), *_findings(inspection), *_notes(inspection))


def _what_it_is(inspection: Inspection) -> Iterator[str]:
    layers = inspection.layers
    heads = sum(len(layer.heads) for layer in layers)
    sizes = [
        f"{name} {' or '.join(map(str, sorted({getattr(layer, name) for layer in layers})))}"
        for name in ("d_model", "d_k")
    ]
    groups = sorted({(layer.num_heads, layer.num_key_heads) for layer in layers})
    sizes += [f"{h} query heads share {g} key heads" for h, g in groups if g != h]
    yield (
        f"{_count_of(heads, 'head')} in {_count_of(len(layers), 'attention layer')} of {inspection.family} "
        f"({', '.join(sizes)}), known by {inspection.known_by}."
    )


def _findings(inspection: Inspection) -> Iterator[str]:
    # Only the first pair of maps is reported.
    for both, times, above in [*_overlaps(inspection)][:1]:
        yield f"{both} overlap: {times}× chance, {above}."
    if ranks := [f"{title} {mean}" for title, mean, _ in _effective_ranks(inspection)]:
        yield f"Effective rank: {', '.join(ranks)}."
    if found := values_of(inspection, "ov_copying"):
        back = sum(v.value > 0.5 for v in found)
        away = sum(v.value < -0.5 for v in found)
        removed = f"{away} remove{'s' * (away == 1)} it"
        yield f"Copying: {back} of {_count_of(len(found), 'head')} write what they read, {removed}."
    for form, title in (("qk", "look alike"), ("ov", "move the same")):
        if pairs := [pair for pair in inspection.copies if pair.form == form]:
            least = "At least " if inspection.more_copies else ""
            yield f"{least}{_count_of(len(pairs), 'pair')} of heads {title} (|cosine| of the forms ≥ {NEAR})."
    redundant = _redundant(inspection)
    cuts = _percent_saved(inspection)
    if redundant:
        yield f"Redundant: {sum(redundant.values()):,} parameters; `triptych rewrite --exact` removes them."
    if cuts:
        yield (
            f"Ranks that keep 95 % of the energy save {cuts[0.05]:.1f} % of the parameters: try "
            "`triptych rewrite --energy 0.95`, and measure the loss with --text."
        )


def _notes(inspection: Inspection) -> Iterator[str]:
    layers = inspection.layers
    broken = dict(chain.from_iterable(layer.broken.items() for layer in layers))
    if broken:
        first = ", ".join(
            f"{name} ({count:,} entries)" for name, count in [*broken.items()][:4]
        )
        yield f"Not finite, left out: {first}{' …' if len(broken) > 4 else ''}."
    # Centring affects all figures of the layer.
    if num_centred := sum(layer.centred for layer in layers):
        yield (
            f"Centred in {_count_of(num_centred, 'layer')}: the mean, which LayerNorm removes, is taken out "
            "of what maps read and of what W_O writes."
        )
    turning = sum(layer.rotary_pairs is not None for layer in layers)
    if turning:
        yield (
            f"Rotary positions in {_count_of(turning, 'layer')}: W_QK is measured by rotary pairs. Symmetry "
            "and near-copies of W_QK are left out."
        )
    if inspection.ignores_rotary and any(layer.turns for layer in layers):
        yield "Rotary positions are ignored: figures of W_QK hold at distance 0 only."
    for caveat, count in Counter(
        chain.from_iterable(layer.caveats for layer in layers)
    ).items():
        yield f"In {count} of {_count_of(len(layers), 'layer')} {caveat}."
    for form, title in (("qk", "W_QK"), ("ov", "W_OV")):
        conditions = values_of(inspection, f"{form}_condition")
        if lost := [value for value in conditions if math.isinf(value.value)]:
            of = _count_of(len(conditions), "head")
            yield f"{title} lacks full rank in {len(lost)} of {of}, first in {lost[0].place}."
    if inspection.others:
        yield f"{inspection.others[0].upper()}{inspection.others[1:]}."
    if inspection.absent:
        yield f"Not in the file, though in the configuration: {', '.join(inspection.absent)}."
    if inspection.unread:
        named = "; ".join(
            f"{name} ({why})"
            for why, name in {w: n for n, w in inspection.unread.items()}.items()
        )
        yield f"Not read: {_count_of(len(inspection.unread), 'tensor')}, such as {named}."


def averages(inspection: Inspection) -> Table:
    """Tabulate means over the heads, compared with random weights of the same sizes."""
    rows = [
        (f"overlap of {both}", f"{times}×", "1×", above)
        for both, times, above in _overlaps(inspection)
    ]
    for pair, both in _PAIRS.items():
        if found := _distinct(inspection, pair, "excess", "subspaces"):
            rows.append(
                (
                    f"excess over chance of {both}",
                    f"{_mean(found):+.3f}",
                    "0",
                    "1 at most",
                )
            )
    for pair, both in _PAIRS.items():
        if found := _distinct(inspection, pair, "cosine", "maps"):
            rows.append((f"cosine of {both}", f"{_mean(found):+.3f}", "0", _BY_BASIS))
    # Basis-dependent figures are marked as such.
    apart, rotated = (
        values_of(inspection, f"qkv_apart{how}") for how in ("", "_rotated")
    )
    if apart:
        random = statistics.fmean(_random_distance(v) for v in apart)
        rows.append(
            ("distance from one matrix", f"{_mean(apart):.3f}", "0.667", _BY_BASIS)
        )
        rows.append(
            (
                "the same, each rotated",
                f"{_mean(rotated):.3f}",
                f"{random:.3f}",
                "at least this",
            )
        )
    for title, mean, random_mean in _effective_ranks(inspection):
        rows.append((f"effective rank of {title}", mean, random_mean, ""))
    rows += _kept_ranks(inspection)
    if shares := values_of(inspection, "qk_symmetric_share"):
        random = statistics.fmean(
            random_symmetric_share(v.layer.d_model) for v in shares
        )
        rows.append(
            ("symmetric share of W_QK", f"{_mean(shares):.3f}", f"{random:.3f}", "")
        )
    if found := values_of(inspection, "ov_copying"):
        spreads = [random_copying_spread(v.layer.d_model, v.layer.d_v) for v in found]
        spread = math.sqrt(sum(spread**2 for spread in spreads)) / len(found)
        rows.append(
            ("copying score of W_OV", f"{_mean(found):+.3f}", f"0 ± {spread:.3f}", "")
        )
    for what, numbers in _redundant(inspection).items():
        rows.append((what, f"{numbers:,}", "", "parameters, redundant"))
    for loss, share in _percent_saved(inspection).items():
        rows.append(
            (
                f"saved by ranks for {1 - loss:.0%}",
                f"{share:.1f} %",
                "",
                "of the parameters",
            )
        )
    return Table(
        title="Averages",
        columns=("mean over the heads", "here", "random", ""),
        rows=tuple(rows),
    )


def average_lines(inspection: Inspection) -> tuple[str, ...]:
    """Return the table of averages as lines of text."""
    lines = []
    for title, here, random, said in averages(inspection).rows:
        more = "; ".join(
            part for part in (f"random: {random}" if random else "", said) if part
        )
        lines.append(f"{title}: {here}" + (f" ({more})" if more else ""))
    return tuple(lines)


_BY_BASIS = "depends on the basis"


def _overlaps(inspection: Inspection) -> Iterator[tuple[str, str, str]]:
    """Yield for each pair of maps its name, the mean overlap over chance, and the heads above chance."""
    for pair, both in _PAIRS.items():
        times = _distinct(inspection, pair, "times_chance", "subspaces")
        if times:
            p_values = _distinct(inspection, pair, "p_value", "subspaces")
            rare = sum(v.value < _RARE / len(times) for v in p_values)
            grouped = len(times) < len(values_of(inspection, f"{pair}_times_chance"))
            above = f"{rare} of {_count_of(len(times), 'pair' if grouped else 'head')} above chance"
            yield both, f"{_mean(times):.2f}", above


def _distinct(
    inspection: Inspection, pair: str, measure: str, of: Literal["maps", "subspaces"]
) -> list[Value]:
    """Return the values of a measure of two maps; a pair shared by several heads counts once."""
    found = []
    seen = set[tuple[str, int, int]]()
    for value in values_of(inspection, f"{pair}_{measure}"):
        layer = value.layer
        copies = layer.maps if of == "maps" else layer.subspaces
        one, other = (value.head * copies[side] // layer.num_heads for side in pair)
        key = layer.module, one, other
        if key not in seen:
            seen.add(key)
            found.append(value)
    return found


def _random_distance(of: Value) -> float:
    """Return the value of `qkv_apart_rotated` for random maps with the sizes and norms of a head."""
    layer = of.layer
    place = of.layer.heads.index(of.head)
    q, k, v = (layer.figures[f"{side}_norm"][place] or 0.0 for side in "qkv")
    close = random_closeness(layer.d_model, layer.d_k)
    return 2 / 3 * (1 - close * (q * k + q * v + k * v) / (q**2 + k**2 + v**2))


def _by_width(
    inspection: Inspection, form: str
) -> Iterator[tuple[str, int, bool, list[Value]]]:
    """Yield effective ranks of a form, grouped by width and by rotary pairs or not."""
    groups: dict[tuple[bool, int], list[Value]] = {}
    for value in values_of(inspection, f"{form}_effective_rank"):
        turns = form == "qk" and value.layer.rotary_pairs is not None
        groups.setdefault((turns, max(map(len, value.layer.spectra[form]))), []).append(
            value
        )
    for (turns, full), found in groups.items():
        of = _count_of(len({v.layer.module for v in found}), "layer")
        yield (
            f"W_{form.upper()}" + ("" if len(groups) == 1 else f" in {of}"),
            full,
            turns,
            found,
        )


def _effective_ranks(inspection: Inspection) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each form, the mean effective rank, and the mean of random forms."""
    for form in ("qk", "ov"):
        for title, full, turns, found in _by_width(inspection, form):
            spectra = (
                [] if turns else [random_spectra(v.layer.d_model, full) for v in found]
            )
            random = (
                f"{statistics.fmean(float(s.effective_rank.mean()) for s in spectra):.1f}"
                if spectra
                else ""
            )
            yield (
                f"{title}{' (rotary pairs)' * turns}",
                f"{_mean(found):.1f} of {full}",
                random,
            )


def _kept_ranks(inspection: Inspection) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rank for 95 % of the energy in half of the heads, for each form."""
    for form in ("qk", "ov"):
        for title, full, turns, found in _by_width(inspection, form):
            ranks = [
                v.layer.figures[f"{form}_rank_95"][v.layer.heads.index(v.head)]
                for v in found
            ]
            kept = (
                f"{statistics.median(rank for rank in ranks if rank is not None):.0f}"
            )
            random = ""
            if not turns:
                spectra = [random_spectra(v.layer.d_model, full) for v in found]
                random = f"{statistics.median(int(s.rank_within(0.05).median()) for s in spectra):.0f}"
            yield f"rank for 95% of {title}", kept, random, "median"


def _redundant(inspection: Inspection) -> dict[str, int]:
    """Count the parameters removable by exact rewrites, by kind."""
    found = {}
    for name, what in (
        ("drop the key bias", "key biases"),
        ("fold the value bias", "value biases"),
        (FOLD, "maps in a row"),
    ):
        saved = [layer.foldable.get(name) for layer in inspection.layers]
        if numbers := sum(value for value in saved if isinstance(value, int)):
            found[what] = numbers
    return found


def _percent_saved(inspection: Inspection) -> dict[float, float]:
    """Return the parameters saved by truncation in percent, by the energy loss of every form."""
    total = sum(layer.parameters for layer in inspection.layers)
    cuts = [*chain.from_iterable(layer.cut.values() for layer in inspection.layers)]
    if not cuts or any(
        len(layer.heads) < layer.num_heads for layer in inspection.layers
    ):
        return {}
    return {
        loss: 100 * sum(cut[i] for cut in cuts) / total for i, loss in enumerate(LOSSES)
    }


def outliers(inspection: Inspection) -> Table:
    """Tabulate the most extreme heads by the main measures."""
    rows: list[tuple[str, ...]] = []
    for measure, largest in (
        ("qk_effective_rank", False),
        ("ov_effective_rank", False),
        ("qk_times_chance", True),
        ("kv_times_chance", True),
        ("qk_symmetric_share", True),
        ("qk_symmetric_share", False),
        ("ov_copying", True),
        ("ov_copying", False),
        ("qk_spectral_norm", True),
    ):
        pair, _, figure = measure.partition("_")
        # Heads sharing both maps count once in pairs of maps.
        of_pairs = figure == "times_chance"
        values = (
            _distinct(inspection, pair, figure, "subspaces")
            if of_pairs
            else values_of(inspection, measure)
        )
        found = sorted(values, key=lambda value: value.value, reverse=largest)[:3]
        if found:
            title = next(m.title for m in MEASURES if m.name == measure)
            heads = "; ".join(f"{value.place}: {value.value:.3g}" for value in found)
            rows.append((f"{'highest' if largest else 'lowest'} {title}", heads))
    return Table(title="Outliers", columns=("", "heads"), rows=tuple(rows))


def telling_heads(inspection: Inspection, count: int) -> Table:
    """Tabulate the heads that differ most from the mean of all heads, by the measures of the maps.

    Differences are in standard deviations of a measure over the heads; the largest of a head decides.
    """
    found = dict[tuple[str, int], dict[str, float]]()
    differs = dict[tuple[str, int], float]()
    measures = list[str]()
    for measure in _MAPPED:
        values = [
            value
            for value in values_of(inspection, measure)
            if math.isfinite(value.value)
        ]
        if not values:
            continue
        measures.append(measure)
        # Figures of W_QK of different kinds are not comparable: each kind has its mean.
        by_qk = next(one for one in MEASURES if one.name == measure).by_qk
        kinds = dict[str, list[Value]]()
        for value in values:
            kinds.setdefault(value.layer.qk_of if by_qk else "", []).append(value)
        for own in kinds.values():
            mean = _mean(own)
            spread = statistics.pstdev(value.value for value in own) or math.inf
            for value in own:
                place = (value.layer.name, value.head)
                found.setdefault(place, {})[measure] = value.value
                moved = abs(value.value - mean) / spread
                differs[place] = max(differs.get(place, 0.0), moved)
    chosen = sorted(differs, key=lambda place: -differs[place])[:count]
    titles = [
        next(one.title for one in MEASURES if one.name == name) for name in measures
    ]
    rows = tuple(
        (
            f"{layer}, head {head}",
            f"{differs[layer, head]:.1f}",
            *(
                f"{found[layer, head][name]:.3g}" if name in found[layer, head] else ""
                for name in measures
            ),
        )
        for layer, head in chosen
    )
    columns = ("head", "tells", *titles)
    numeric = tuple(range(1, len(columns)))
    return Table("Heads that tell most", columns, rows, numeric=numeric)


def near_copies(inspection: Inspection) -> Table:
    """Return the table of nearly equal heads, possibly empty."""
    titles = {"qk": "look alike (W_QK)", "ov": "move the same (W_OV)"}
    rows = [
        (titles[p.form], p.one, p.other, f"{p.cosine:+.3f}")
        for p in inspection.copies[:_MOST_SHOWN]
    ]
    left = len(inspection.copies) - len(rows)
    if left:
        rows.append((f"and {left:,} more", "", "", ""))
    return Table(
        title="Nearly the same",
        columns=("nearly the same", "head", "and", "cosine"),
        rows=tuple(rows),
    )


def side_by_side(*inspections: Inspection) -> Table:
    """Tabulate the means over the heads of several checkpoints, and the difference between two."""
    rows: list[tuple[str, ...]] = []
    of = [", ".join(sorted({layer.qk_of for layer in i.layers})) for i in inspections]
    of_two = len(inspections) == 2
    # Figures of W_QK are comparable only if they describe the same object.
    alike = len(set(of)) == 1
    if not alike:
        rows.append(
            ("figures of W_QK describe the", *of, *["not to be compared"] * of_two)
        )
    for measure in MEASURES:
        if measure.by_qk and not alike:
            continue
        found = [values_of(inspection, measure.name) for inspection in inspections]
        if all(found):
            means = [*map(_mean, found)]
            apart = (
                "–"
                if all(map(math.isinf, means))
                else _formatted(means[1] - means[0], "+.3g")
            )
            rows.append(
                (
                    measure.title,
                    *(_formatted(mean, ".4g") for mean in means),
                    *[apart] * of_two,
                )
            )
    names = (inspection.name for inspection in inspections)
    columns = ("mean over the heads", *names, *["difference"] * of_two)
    return Table(title="Side by side", columns=columns, rows=tuple(rows))


def _formatted(number: float, form: str) -> str:
    return format(number, form).replace("inf", "∞")


def _mean(values: Sequence[Value]) -> float:
    return statistics.fmean(value.value for value in values)


def _count_of(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def heads_page(inspections: Sequence[Inspection], command: str) -> str:
    """Make the page of one checkpoint, or of several checkpoints in columns."""
    names = [short_name(inspection.name) for inspection in inspections]
    are_several = len(names) > 1
    facts = [("command", command), *(("checkpoint", one.name) for one in inspections)]
    # A single checkpoint is described in the heading.
    if not are_several:
        layers = inspections[0].layers
        facts = [
            ("family", inspections[0].family),
            ("heads", f"{sum(len(layer.heads) for layer in layers):,}"),
            ("attention parameters", f"{sum(layer.parameters for layer in layers):,}"),
            *facts,
        ]
    summary = []
    notes = []
    for name, inspection in zip(names, inspections, strict=True):
        heading = name if are_several else ""
        summary.append(
            (heading, " ".join(_what_it_is(inspection)), [*_findings(inspection)])
        )
        if said := [*_notes(inspection)]:
            notes.append((f"Notes on {name}" if are_several else "Notes", said))
    more = []
    if are_several:
        measured = side_by_side(*inspections)
        columns = (measured.columns[0], *names, *measured.columns[len(names) + 1 :])
        numeric = tuple(range(1, len(columns)))
        more = [replace(measured, title="All means", columns=columns, numeric=numeric)]
    return render_heads(
        f"Heads of {' and '.join(names)}",
        [*zip(names, (one.layers for one in inspections), strict=True)],
        summary,
        facts,
        tables=[_averages_together(inspections, names)],
        more_tables=more,
        notes=notes,
    )


def _averages_together(
    inspections: Sequence[Inspection], names: Sequence[str]
) -> Table:
    """Return the averages of one or several checkpoints as one table, with one column per checkpoint."""
    found = [averages(inspection) for inspection in inspections]
    if len(found) == 1:
        of_one = ("figure", "here", "random", "note")
        return replace(found[0], columns=of_one, numeric=(1, 2))
    by_title = [{row[0]: row[1:] for row in table.rows} for table in found]
    titles = dict.fromkeys(chain.from_iterable(by_title))
    nothing = ("", "", "")
    cells = {title: [of.get(title, nothing) for of in by_title] for title in titles}
    # Random weights of one shape have one value: a single column is then enough for all checkpoints.
    is_shared = all(
        len({random for _, random, _ in of if random}) <= 1 for of in cells.values()
    )
    rows = []
    for title, of in cells.items():
        randoms = [random for _, random, _ in of]
        shown = [max(randoms, key=len)] if is_shared else randoms
        rows.append((title, *(here for here, _, _ in of), *shown))
    columns = (
        "figure",
        *names,
        *(["random"] if is_shared else [f"random for {name}" for name in names]),
    )
    numeric = tuple(range(1, len(columns)))
    return Table("Side by side", columns, tuple(rows), numeric=numeric)
