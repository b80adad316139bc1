"""Plans: what a rewrite of a checkpoint would do, layer by layer, before anything is written."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple, final

import torch

from triptych.algebra.cost import writing_cost
from triptych.algebra.forms import are_finite
from triptych.algebra.moments import Moments
from triptych.algebra.rewrites import Layer, Rewrite, RewriteRefusedError, ToLatent, Truncate
from triptych.algebra.weights import AttentionWeights
from triptych.checkpoints.checkpoint import open_checkpoint
from triptych.checkpoints.family import Family
from triptych.checkpoints.layer import AttentionLayer, AttentionSource, Site
from triptych.checkpoints.source import Source, find_source
from triptych.checkpoints.writing import WrittenLayer
from triptych.errors import DataError, UsageError
from triptych.printable import table_html
from triptych.rewriting.calibration import gather_moments, measure_head_losses
from triptych.rewriting.certificate import (
    Cost,
    LayerRecord,
    NormRecord,
    StepRecord,
    in_lines,
    shown_rewrite,
)
from triptych.rewriting.formats import Format, format_of
from triptych.rewriting.layers import RewrittenLayer, applies_to, rewrite_layer, shape_of
from triptych.rewriting.other_norms import OtherNorms
from triptych.rewriting.recipe import RewriteRecipe, require_calibration
from triptych.storage.untrusted import shown


@final
@dataclass(frozen=True, eq=False)
class Prepared:
    """A recipe, prepared with all layers and the calibration text."""

    steps: tuple[Rewrite, ...]  # ready for each layer
    moments: dict[str, dict[int, Moments]]  # by layer and number of the step
    skip_refused: bool  # as in the recipe
    norms: OtherNorms  # those that maps outside the attention read

    def through(
        self, source: AttentionSource, read: AttentionLayer, upto: int | None = None
    ) -> RewrittenLayer:
        """Apply all steps, or the first `upto`, to a layer."""
        _require_finite(source, read)
        return rewrite_layer(
            read,
            self.steps[:upto],
            skip_refused=self.skip_refused,
            longest_text=source.longest_text(read.site),
            moments=self.moments.get(read.site.name),
            others=self.norms.others(read.site),
        )


def _require_finite(source: AttentionSource, read: AttentionLayer) -> None:
    """Refuse a layer whose maps, or the norms before it, hold NaN or infinity, naming the tensor."""
    norms = [norm for norm in (read.inputs.x, read.inputs.memory) if norm is not None]
    of_norms = [part for norm in norms for part in (norm.weight, norm.bias) if part is not None]
    learned = read.weights.semantics.learned().values()
    if all(map(are_finite, (*read.weights.tensors(), *learned, *of_norms))):
        return
    for name, count in source.broken(read).items():
        raise DataError(
            f"{source.name}: tensor {shown(name)} has {count:,} numbers that are not finite (NaN or "
            "infinite): repair the checkpoint first"
        )
    raise DataError(f"{source.name}: the norm before {read.site.name} has numbers that are not finite")


def prepare(source: AttentionSource, folder: Path, recipe: RewriteRecipe) -> Prepared:
    """Prepare a recipe: gather moments over the text, and distribute budgets over layers."""
    source.require_layers({layer for step in recipe.step for layer in step.layers or ()})
    require_calibration(recipe)
    norms = OtherNorms(format_of(source), recipe.step, recipe.skip_refused)
    prepared = Prepared(recipe.step, {}, recipe.skip_refused, norms)
    for number, step in enumerate(recipe.step):
        if step.needs_text and recipe.calibration is not None:
            # As the layers are when it is this step's turn, so a pass for each such step.
            sites = [site for site in source.sites if applies_to(step, site.layer)]
            if step.needs_losses:
                _require_all_heads(source, prepared, number, sites)
                step = step.with_losses(measure_head_losses(folder, sites, recipe.calibration))
            else:
                before = partial(_weights_before, prepared, source, number)
                served = isinstance(step, ToLatent)
                found = gather_moments(source, folder, sites, before, recipe.calibration, served=served)
                moments = {
                    site.name: {**prepared.moments.get(site.name, {}), number: found[site.name]}
                    for site in sites
                }
                prepared = replace(prepared, moments={**prepared.moments, **moments})
        ready = step.prepare(_layers(source, prepared, number, step), skip_refused=recipe.skip_refused)
        steps = (*prepared.steps[:number], ready, *prepared.steps[number + 1 :])
        prepared = replace(prepared, steps=steps)
    return prepared


def _require_all_heads(
    source: AttentionSource, prepared: Prepared, number: int, sites: Sequence[Site]
) -> None:
    """Check that the steps before one leave heads where the original model has them."""
    for site in sites:
        read = source.read(site)
        kept = prepared.through(source, read, number).kept
        if kept is not None and list(kept) != list(range(read.weights.num_heads)):
            raise UsageError(
                f"{site.name}: heads are gone or in another order, and the loss is that of the original "
                "model: put the step that looks at the loss first"
            )


def _weights_before(
    prepared: Prepared, source: AttentionSource, number: int, read: AttentionLayer
) -> AttentionWeights:
    return prepared.through(source, read, number).weights


def _layers(source: AttentionSource, prepared: Prepared, number: int, step: Rewrite) -> Iterator[Layer]:
    """Yield the layers that a step applies to, after the steps before it."""
    for site in source.sites:
        if applies_to(step, site.layer):
            weights = _weights_before(prepared, source, number, source.read(site))
            moments = prepared.moments.get(site.name, {}).get(number)
            yield Layer(site.name, weights, source.longest_text(site), moments)


@final
@dataclass(frozen=True)
class Plan:
    """What a rewrite would do.

    Attributes:
        source: the checkpoint.
        family: how it is written.
        layers: what would be done to each, and what refused.
        norms: likewise, of norms that maps outside the attention read.
        before: cost of all attention layers as read; `after`: as they would be written.
        unpadded: as in `Certificate`.
        settings: what would change in the configuration.
        bytes_before: of the attention layers' tensors as stored; likewise `bytes_after`.
        notes: what a reader should know: where the format keeps widths that the weights no longer need, say.
    """

    source: str
    family: str
    layers: tuple[LayerRecord, ...]
    norms: tuple[NormRecord, ...]
    before: Cost
    after: Cost
    unpadded: Cost | None
    settings: dict[str, Any]
    bytes_before: int
    bytes_after: int
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return in_lines(*self._shown())

    def _repr_html_(self) -> str:
        return table_html(*self._shown())

    def _shown(self) -> tuple[str, list[tuple[str, str]]]:
        rows = shown_rewrite((*self.layers, *self.norms), self.before, self.after)
        rows.append(("bytes of attention in the file", f"{self.bytes_before:,} → {self.bytes_after:,}"))
        return f"Plan {self.source}: {self.family}, {len(self.layers)} attention layers", rows


def total(costs: Sequence[Cost]) -> Cost:
    """The sum of costs; nothing for none."""
    return reduce(Cost.plus, costs, Cost(parameters=0, flops_per_token=0, kv_bytes_per_token=0))


class Costs(NamedTuple):
    """Of one layer, or all."""

    before: Cost  # as read
    after: Cost  # as written
    maps: Cost  # of the new maps alone, without what a format fills up

    @property
    def unpadded(self) -> Cost | None:
        """That of the maps, where it is not what is written."""
        return None if self.maps == self.after else self.maps


def costs_of(read: AttentionLayer, done: RewrittenLayer, written: AttentionWeights | None = None) -> Costs:
    """Of a layer; `written` as its format has it, if that is not as the new maps are."""
    return Costs(
        *(
            Cost.of(writing_cost(weights), read.cache_bytes)
            for weights in (read.weights, done.weights if written is None else written, done.weights)
        )
    )


def local_folder(checkpoint: Source | str) -> Path:
    """The folder of a checkpoint; one of the Hub is fetched into its cache first."""
    path = find_source(checkpoint).path
    if path.is_file():
        raise UsageError(f"{path} is one file of a checkpoint: give its folder")
    return path


def plan_rewrite(checkpoint: Source | str, recipe: RewriteRecipe, *, family: Family | None = None) -> Plan:
    """Compute what a rewrite would do, without writing anything."""
    files = find_source(checkpoint)
    folder = local_folder(files)
    source = open_checkpoint(folder, family)
    prepared = prepare(source, folder, recipe)
    layers, way = list[LayerRecord](), WayThrough(source, prepared)
    bytes_after, turned, padded, notes = 0, 0, False, dict.fromkeys(source.warnings)
    for site in source.sites:
        read = source.read(site)
        done, written, costs = way.layer(source, read)
        layers.append(LayerRecord(module=site.module, steps=done.records))
        bytes_after += way.form.bytes_of(read, written)
        turned += _cut_under_rotation(prepared.steps, read, done)
        padded |= costs.unpadded is not None
    costs = way.costs()
    if turned:
        notes[_CHANNELS_STAY.format(share=f"{turned / costs.before.parameters:.0%}")] = None
    if turned or padded:
        notes |= dict.fromkeys(way.form.note_on_padding())
    return Plan(
        source=files.name,
        family=source.written_as,
        layers=tuple(layers),
        norms=way.norms(),
        before=costs.before,
        after=costs.after,
        unpadded=costs.unpadded,
        settings=way.settings,
        bytes_before=sum(source.bytes_of(site) for site in source.sites),
        bytes_after=bytes_after,
        notes=tuple(notes),
    )


_CHANNELS_STAY = (
    "W_Q and W_K ({share} of the attention's parameters) get lower ranks and keep all channels, which rotary "
    'positions turn: that saves nothing; rotary = "pairs" (--rotary pairs) takes channels out and loses more'
)


def _cut_under_rotation(steps: Sequence[Rewrite], read: AttentionLayer, done: RewrittenLayer) -> int:
    """Parameters of W_Q and W_K if their rank is lowered before a rotation, which keeps their sizes."""
    cut = any(
        isinstance(step, Truncate)
        and "qk" in step.forms
        and step.rotary == "maps"
        and applies_to(step, read.site.layer)
        for step in steps
    )
    refused = any(record.rewrite == Truncate.name and record.refused for record in done.records)
    if not cut or refused or read.weights.semantics.rotary is None:
        return 0
    links = {id(link): link for side in ("q", "k") for link in read.weights.chain(side)}
    return sum(link.num_parameters for link in links.values())


@final
class WayThrough:
    """One way through a checkpoint: layers rewritten, as their format has them, and their sums."""

    def __init__(self, source: AttentionSource, prepared: Prepared) -> None:
        self.prepared, self.form = prepared, format_of(source)
        self.settings: dict[str, Any] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._costs: list[Costs] = []
        self._folded: set[Site] = set()
        self._stay = fixed_sizes(self.form, prepared)

    def layer(
        self, source: AttentionSource, read: AttentionLayer
    ) -> tuple[RewrittenLayer, WrittenLayer, Costs]:
        """A layer; as it was, and said so, if the format refuses and that is skipped."""
        done = self.prepared.through(source, read)
        try:
            same_sizes = read.site.name in self._stay
            written = format_of(source).written(read, done.weights, done.kept, same_sizes=same_sizes)
        except RewriteRefusedError as refused:
            if not self.prepared.skip_refused:
                raise
            records = tuple(
                record if record.refused else StepRecord(rewrite=record.rewrite, refused=refused.reason)
                for record in done.records
            )
            done = RewrittenLayer(read.weights, None, records)
            written = WrittenLayer({}, {}, shape_of(read.weights))
        if done.took_up_norm:
            self._folded.add(read.site)
        costs = costs_of(read, done, written.shapes)
        self._costs.append(costs)
        if len(self._costs) > 1 and self.settings.get("model_type") != written.settings.get("model_type"):
            why = "a file has one format, and other layers are rewritten into another"
            raise RewriteRefusedError("write", why).at(read.site.name)
        self.settings |= written.settings
        self.dtypes[read.site.name] = read.weights.dtype
        return done, written, costs

    def costs(self) -> Costs:
        """The sums over layers, each by itself."""
        return Costs(*(total(of_one) for of_one in zip(*self._costs, strict=True)))

    def norms(self) -> tuple[NormRecord, ...]:
        """What was done to norms that maps outside the attention read."""
        return self.prepared.norms.records(self._folded.__contains__)


def fixed_sizes(form: Format, prepared: Prepared) -> set[str]:
    """Names of the layers that keep their sizes after the steps that resize; none without such steps."""
    sized = [number for number, step in enumerate(prepared.steps, start=1) if step.resizes]
    if not sized:
        return set()
    return form.fixed_sizes(lambda read: prepared.through(form.source, read, sized[-1]).weights)
