"""An inspection for people: a summary in words, a map and outliers for the terminal, and the page."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from triptych.algebra.chance import (
    random_closeness,
    random_copying_spread,
    random_spectra,
    random_symmetric_share,
)
from triptych.inspection.checkpoint import NEAR, Inspection
from triptych.inspection.layers import FOLD, InspectedLayer
from triptych.inspection.measures import LOOKS, LOSSES, MEASURES, Measure
from triptych.reports import HeadLayer, HeadMeasure, HeadsReport, Table

_PAIRS = {"qk": "W_Q and W_K", "qv": "W_Q and W_V", "kv": "W_K and W_V"}
_RARE = 0.001
_MOST_SHOWN = 12
_SHADES = " ░▒▓█"


class Value(NamedTuple):
    """A figure of one head."""

    value: float
    layer: InspectedLayer
    head: int

    @property
    def place(self) -> str:
        """For people."""
        return f"{self.layer.name}, head {self.head}"


def values_of(inspection: Inspection, measure: str, kind: str = "") -> list[Value]:
    """A measure of every head for which there is one, of layers of a kind if it is given."""
    return [
        Value(value, layer, head)
        for layer in inspection.layers
        if not kind or layer.kind == kind
        for head, value in zip(layer.heads, layer.figures[measure], strict=True)
        if value is not None
    ]


def summary(inspection: Inspection) -> tuple[str, ...]:
    """What stands out, in sentences with their numbers."""
    return tuple(sentence for part in _SENTENCES for sentence in part(inspection) if sentence) or (
        "There is nothing to say: no head has finite weights.",
    )


def _what_it_is(inspection: Inspection) -> Iterator[str]:
    layers = inspection.layers
    heads = sum(len(layer.heads) for layer in layers)
    widths = sorted({layer.d_k for layer in layers})
    groups = {(layer.num_heads, layer.num_key_heads) for layer in layers}
    shared = "; ".join(f"{h} query heads on {g} of keys" for h, g in sorted(groups) if g != h)
    yield (
        f"{_counted(heads, 'head')} in {_counted(len(layers), 'attention layer')} of {inspection.family} "
        f"(d_model {_listed(sorted({layer.d_model for layer in layers}))}, d_k {_listed(widths)}"
        + (f"; {shared}" if shared else "")
        + f"), known by {inspection.known_by}."
    )
    if any(layer.planes is not None for layer in layers):
        yield (
            "Queries and keys turn with their position, so W_Q W_Kᵀ is no form of its own: for where a head "
            "looks, energies of rotary planes stand in place of singular values, and symmetry is left out."
        )
    caveats: dict[str, int] = {}
    for layer in layers:
        for caveat in layer.caveats:
            caveats[caveat] = caveats.get(caveat, 0) + 1
    for caveat, count in caveats.items():
        yield f"In {count} of {_counted(len(layers), 'layer')} {caveat}."
    if inspection.absent:
        yield f"The configuration has more stacks, which are not in the file: {', '.join(inspection.absent)}."
    if inspection.unread:
        named = "; ".join(
            f"{name} ({why})" for why, name in {w: n for n, w in inspection.unread.items()}.items()
        )
        yield f"Not read: {_counted(len(inspection.unread), 'tensor')}, such as {named}."
    if inspection.ignores_rotary and any(layer.turns for layer in layers):
        yield "As asked, rotary positions are ignored: figures of W_QK hold at distance 0 only."


def _likeness(inspection: Inspection) -> Iterator[str]:
    parts = []
    for pair, both in _PAIRS.items():
        times = _distinct(inspection, pair, "times_chance", "subspaces")
        if not times:
            continue
        overlap = _mean(_distinct(inspection, pair, "overlap", "subspaces"))
        p_values = _distinct(inspection, pair, "p_value", "subspaces")
        rare = sum(v.value < _RARE / len(times) for v in p_values)
        grouped = len(times) < len(values_of(inspection, f"{pair}_times_chance"))
        parts.append(
            f"{both} {_mean(times):.2f} times chance (mean squared cosine {overlap:.3f}; "
            f"{rare} of {_counted(len(times), 'pair' if grouped else 'head')} above chance)"
        )
    if parts:
        yield (
            f"How alike what the maps of a head read is: {'; '.join(parts)}. Chance is what random subspaces "
            f"of these sizes have, and a head counts as above it at p < {_RARE} shared among all."
        )
    cosines = {pair: _distinct(inspection, pair, "cosine", "maps") for pair in _PAIRS}
    said = [f"{_PAIRS[pair]} {_mean(found):+.3f}" for pair, found in cosines.items() if found]
    if said:
        yield (
            f"Entry by entry, the mean cosine is: {', '.join(said)}. That depends on the basis that training "
            "happened to choose within each head, and says nothing of what the heads do."
        )
    apart, rotated = (values_of(inspection, f"qkv_apart{how}") for how in ("", "_rotated"))
    if apart:
        random = statistics.fmean(_random_distance(v.layer, v.layer.heads.index(v.head)) for v in apart)
        yield (
            f"From one shared matrix the three are {_mean(apart):.3f} away on average (0 if equal, 0.667 if "
            f"unrelated), and at least {_mean(rotated):.3f} however each is rotated (random ones of these "
            f"sizes: {random:.3f})."
        )


def _distinct(
    inspection: Inspection, pair: str, measure: str, of: Literal["maps", "subspaces"]
) -> list[Value]:
    """A figure of a pair of maps, or of what they read; of a pair that several heads share, once."""
    found, seen = [], set[tuple[str, int, int]]()
    for value in values_of(inspection, f"{pair}_{measure}"):
        layer = value.layer
        copies = layer.maps if of == "maps" else layer.subspaces
        one, other = (value.head * copies[side] // layer.num_heads for side in pair)
        key = layer.module, one, other
        if key not in seen:
            seen.add(key)
            found.append(value)
    return found


def _random_distance(layer: InspectedLayer, place: int) -> float:
    """What `qkv_apart_rotated` is for random maps of the sizes and norms of a head."""
    q, k, v = (layer.figures[f"{side}_norm"][place] or 0.0 for side in "qkv")
    close = random_closeness(layer.d_model, layer.d_k)
    return 2 / 3 * (1 - close * (q * k + q * v + k * v) / (q**2 + k**2 + v**2))


def _ranks(inspection: Inspection) -> Iterator[str]:
    for form, title in (("qk", "W_QK"), ("ov", "W_OV")):
        # Planes are not to be averaged with directions, nor heads of one width with those of another.
        groups: dict[tuple[bool, int], list[Value]] = {}
        for value in values_of(inspection, f"{form}_effective_rank"):
            turns = form == "qk" and value.layer.planes is not None
            groups.setdefault((turns, max(map(len, value.layer.spectra[form]))), []).append(value)
        for (turns, full), found in groups.items():
            which = (
                "" if len(groups) == 1 else f" of {_counted(len({v.layer.module for v in found}), 'layer')}"
            )
            yield _rank_of(form, f"{title}{which}", full, found, turns=turns)


def _rank_of(form: str, title: str, full: int, found: Sequence[Value], *, turns: bool) -> str:
    least = min(found, key=_size)
    ranks = [v.layer.figures[f"{form}_rank_95"][v.layer.heads.index(v.head)] for v in found]
    kept = statistics.median(rank for rank in ranks if rank is not None)
    what = "rotary planes and fixed directions" if turns else "directions"
    random, of_kept = "", ""
    if not turns:
        spectra = [random_spectra(v.layer.d_model, full) for v in found]
        random = f"; random ones {statistics.fmean(float(s.effective_rank.mean()) for s in spectra):.1f}"
        half = statistics.median(int(s.rank_within(0.05).median()) for s in spectra)
        of_kept = f" (random ones: {half:.0f})"
    return (
        f"{title} uses {_mean(found):.1f} of {full} {what} on average (effective rank{random}), least in "
        f"{least.place} ({least.value:.1f}); in half of the heads rank {kept:.0f} keeps 95 %{of_kept}."
    )


def _lost(inspection: Inspection) -> Iterator[str]:
    for form, title in (("qk", "W_QK"), ("ov", "W_OV")):
        conditions = values_of(inspection, f"{form}_condition")
        lost = [value for value in conditions if math.isinf(value.value)]
        if lost:
            yield (
                f"{title} lacks full rank (condition ∞) in {len(lost)} of "
                f"{_counted(len(conditions), 'head')}, first in {lost[0].place}."
            )


def _symmetry(inspection: Inspection) -> Iterator[str]:
    shares = values_of(inspection, "qk_symmetric_share")
    if shares:
        most, least = max(shares, key=_size), min(shares, key=_size)
        random = statistics.fmean(random_symmetric_share(v.layer.d_model) for v in shares)
        yield (
            f"{_mean(shares):.3f} of ‖W_QK‖² is symmetric on average (random ones: {random:.3f}), most in "
            f"{most.place} ({most.value:.3f}), least in {least.place} ({least.value:.3f})."
        )


def _copying(inspection: Inspection) -> Iterator[str]:
    found = values_of(inspection, "ov_copying")
    if found:
        back, away = sum(v.value > 0.5 for v in found), sum(v.value < -0.5 for v in found)
        spreads = [random_copying_spread(v.layer.d_model, v.layer.d_v) for v in found]
        of_mean = math.sqrt(sum(spread**2 for spread in spreads)) / len(found)
        yield (
            f"Of {_counted(len(found), 'head')} of self-attention, {back} write what they read (copying "
            f"score above 0.5) and {away} take it away (below −0.5); the mean is {_mean(found):+.3f} "
            f"(that of as many random ones: 0 ± {of_mean:.3f})."
        )


def _copies(inspection: Inspection) -> Iterator[str]:
    for form, title in (("qk", "look alike"), ("ov", "move the same")):
        pairs = [pair for pair in inspection.copies if pair.form == form]
        if pairs:
            first = pairs[0]
            more = "At least " if inspection.more_copies else ""
            yield (
                f"{more}{_counted(len(pairs), 'pair')} of heads {title} (cosine of the forms at least {NEAR} "
                f"or at most −{NEAR}), first {first.one} and {first.other} ({first.cosine:+.3f})."
            )
    turning = sum(layer.planes is not None for layer in inspection.layers)
    if turning:
        yield (
            f"Whether heads look alike is not compared in {_counted(turning, 'layer')}: what their queries "
            "and keys give depends on the distance."
        )


def _saved(inspection: Inspection) -> Iterator[str]:
    total = sum(layer.parameters for layer in inspection.layers)
    parts = []
    for name, what in (
        ("drop the key bias", "key biases"),
        ("fold the value bias", "value biases, folded into output biases"),
        (FOLD, "maps in a row, folded into one"),
    ):
        saved = [layer.foldable.get(name) for layer in inspection.layers]
        numbers = sum(value for value in saved if isinstance(value, int))
        if numbers:
            parts.append(f"{numbers:,} of {what}")
    if parts:
        yield f"Exactly redundant: {'; '.join(parts)}, of {total:,} numbers of attention."


def _cut(inspection: Inspection) -> Iterator[str]:
    total = sum(layer.parameters for layer in inspection.layers)
    cuts = [cut for layer in inspection.layers for cut in layer.cut.values()]
    if cuts and all(len(layer.heads) == layer.num_heads for layer in inspection.layers):
        forms = {form for layer in inspection.layers for form in layer.cut}
        which = "every form" if len(forms) == 2 else "every W_OV"
        losses = ", ".join(f"{100 * loss:.0f}" for loss in LOSSES)
        saved = ", ".join(f"{100 * sum(cut[i] for cut in cuts) / total:.1f}" for i in range(len(LOSSES)))
        yield (
            f"Cutting {which} to the rank that loses at most {losses} % of its energy would save {saved} % "
            "of the numbers of attention; what that does to the model has to be measured."
        )


def _broken(inspection: Inspection) -> Iterator[str]:
    broken = {name: count for layer in inspection.layers for name, count in layer.broken.items()}
    if broken:
        first = ", ".join(f"{name} ({count:,} entries)" for name, count in [*broken.items()][:4])
        more = " …" if len(broken) > 4 else ""
        yield f"Not finite, and left out with the heads that use them: {first}{more}."


_SENTENCES: tuple[Callable[[Inspection], Iterator[str]], ...] = (
    _what_it_is,
    _broken,
    _likeness,
    _ranks,
    _lost,
    _symmetry,
    _copying,
    _copies,
    _saved,
    _cut,
)


def outliers(inspection: Inspection) -> Table:
    """The heads furthest out, by the measures one asks for first."""
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
        of_pairs = figure == "times_chance"
        values = (
            _distinct(inspection, pair, figure, "subspaces") if of_pairs else values_of(inspection, measure)
        )
        found = sorted(values, key=_size, reverse=largest)[:3]
        if found:
            title = next(m.title for m in MEASURES if m.name == measure)
            heads = "; ".join(f"{value.place}: {value.value:.3g}" for value in found)
            rows.append((f"{'highest' if largest else 'lowest'} {title}", heads))
    return Table(title="Outliers", columns=("", "heads"), rows=tuple(rows))


def near_copies(inspection: Inspection) -> Table:
    """Heads that look, or move, nearly the same; no rows if there are none."""
    titles = {"qk": "look alike (W_QK)", "ov": "move the same (W_OV)"}
    rows = [(titles[p.form], p.one, p.other, f"{p.cosine:+.3f}") for p in inspection.copies[:_MOST_SHOWN]]
    left = len(inspection.copies) - len(rows)
    if left:
        rows.append((f"and {left:,} more", "", "", ""))
    return Table(
        title="Nearly the same", columns=("nearly the same", "head", "and", "cosine"), rows=tuple(rows)
    )


def side_by_side(one: Inspection, other: Inspection) -> Table:
    """Means over the heads of two checkpoints, and their difference."""
    rows: list[tuple[str, ...]] = []
    of = [", ".join(sorted({layer.qk_of for layer in i.layers})) for i in (one, other)]
    if of[0] != of[1]:
        rows.append(("figures of W_QK are those of the", *of, "not to be compared"))
    for measure in MEASURES:
        if of[0] != of[1] and _is_by_qk(measure):
            continue
        found = [values_of(inspection, measure.name) for inspection in (one, other)]
        if all(found):
            first, second = map(_mean, found)
            apart = "–" if math.isinf(first) and math.isinf(second) else _shown(second - first, "+.3g")
            rows.append((measure.title, _shown(first, ".4g"), _shown(second, ".4g"), apart))
    columns = ("mean over the heads", one.name, other.name, "difference")
    return Table(title="Side by side", columns=columns, rows=tuple(rows))


def shaded_map(inspection: Inspection, measure: str) -> list[str]:
    """Layers × heads in shades, from the lowest to the highest finite value; a dot where there is none.

    Layers whose W_QK is measured another way have a scale of their own.
    """
    if not values_of(inspection, measure):
        return []
    about = next(m for m in MEASURES if m.name == measure)
    kinds = [layer.qk_of if _is_by_qk(about) else "" for layer in inspection.layers]
    scales: dict[str, tuple[float, float]] = {}
    for kind in dict.fromkeys(kinds):
        of = [
            layer.figures[measure] for layer, own in zip(inspection.layers, kinds, strict=True) if own == kind
        ]
        finite = [value for values in of for value in values if value is not None and math.isfinite(value)]
        scales[kind] = min(finite, default=0.0), max(finite, default=0.0)
    width = max(len(layer.name) for layer in inspection.layers)
    chosen = {layer.heads for layer in inspection.layers if len(layer.heads) < layer.num_heads}
    which = f"; heads {', '.join(map(str, sorted({h for of in chosen for h in of})))}" if chosen else ""
    said = "; ".join(
        f"{_SHADES[0]!r} {low:.3g} to {_SHADES[-1]!r} {high:.3g}" + (f" ({kind})" if len(scales) > 1 else "")
        for kind, (low, high) in scales.items()
    )
    lines = [f"{about.title}: {said}{which}"]
    for layer, kind in zip(inspection.layers, kinds, strict=True):
        cells = "".join(_shade(value, *scales[kind]) * 2 for value in layer.figures[measure])
        lines.append(f"{layer.name:>{width}} │{cells}│")
    return lines


def _shade(value: float | None, low: float, high: float) -> str:
    if value is None:
        return "·"
    if math.isinf(value):
        return "∞"
    share = (value - low) / (high - low) if high > low else 0.5
    return _SHADES[min(len(_SHADES) - 1, int(share * len(_SHADES)))]


def heads_page(inspections: Sequence[Inspection], command: str) -> HeadsReport:
    """The page of one checkpoint, or of several side by side."""
    names = [inspection.name for inspection in inspections]
    facts = [("command", command)]
    if len(inspections) == 1:
        layers = inspections[0].layers
        facts = [
            ("family", inspections[0].family),
            ("heads", f"{sum(len(layer.heads) for layer in layers):,}"),
            ("numbers of attention", f"{sum(layer.parameters for layer in layers):,}"),
            *facts,
        ]
    return HeadsReport(
        title=" and ".join(names),
        summary=tuple((i.name if len(names) > 1 else "", summary(i)) for i in inspections),
        facts=tuple(facts),
        measures=tuple(
            HeadMeasure(m.name, m.title, m.meaning, m.group, of_basis=m.of_basis, by_qk=_is_by_qk(m))
            for m in MEASURES
        ),
        models=tuple((i.name, tuple(map(_layer, i.layers))) for i in inspections),
    )


def _layer(layer: InspectedLayer) -> HeadLayer:
    sizes = f"d_model {layer.d_model}, d_k {layer.d_k}, d_v {layer.d_v}, positions {layer.positions}"
    groups = f", {layer.num_heads} heads on {layer.num_key_heads} of keys"
    planes = ""
    if layer.planes is not None:
        planes = f", {layer.planes[0]} rotary planes that turn and {layer.planes[1]} too slow to"
    return HeadLayer(
        name=layer.name,
        about=f"{layer.module}: {sizes}{groups}{planes}",
        num_heads=layer.num_heads,
        heads=layer.heads,
        figures=layer.figures,
        spectra=layer.spectra,
        angles=layer.angles,
        qk_of=layer.qk_of,
    )


def _is_by_qk(measure: Measure) -> bool:
    """Whether a figure of W_QK itself and one of its rotary planes are not to be compared."""
    return measure.name.startswith("qk_") and measure.group == LOOKS


def _shown(number: float, form: str) -> str:
    return format(number, form).replace("inf", "∞")


def _size(value: Value) -> float:
    return value.value


def _mean(values: Sequence[Value]) -> float:
    return statistics.fmean(value.value for value in values)


def _counted(number: int, name: str) -> str:
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def _listed(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))
