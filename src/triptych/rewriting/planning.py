"""Plans: previews of the rewrite of a checkpoint."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from triptych.core.algebra.cost import writing_cost
from triptych.core.algebra.forms import are_finite
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.weights import AttentionWeights
from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.core.checkpoints.family import Family
from triptych.core.checkpoints.source import Source, find_source
from triptych.core.checkpoints.stored_layers import (
    AttentionLayer,
    AttentionSource,
    Site,
)
from triptych.errors import DataError, UsageError
from triptych.printable import table_html
from triptych.rewriting.calibration import gather_moments, measure_head_losses
from triptych.rewriting.certificate import (
    Cost,
    LayerRecord,
    NormRecord,
    StepRecord,
    in_lines,
    said_layers,
    shown_rewrite,
)
from triptych.rewriting.driver import Driver, RewrittenLayer, StepOutcome, applies_to
from triptych.rewriting.folder_formats import storage_format
from triptych.rewriting.functions.latent import ToLatent
from triptych.rewriting.functions.moments import Moments
from triptych.rewriting.functions.rewrite import (
    LayerToRewrite,
    Rewrite,
)
from triptych.rewriting.functions.truncation import Truncate
from triptych.rewriting.other_norms import OtherNorms
from triptych.rewriting.recipe import RewriteRecipe, require_calibration
from triptych.rewriting.writing import WrittenLayer
from triptych.untrusted import shown


def _require_finite_layer(source: AttentionSource, read: AttentionLayer) -> None:
    """Refuse a layer with NaN or infinity in its maps or in the norms before it, naming the tensor."""
    # All learned tensors of the layer, and the norms before it.
    of_norms = list[Tensor]()
    for norm in (read.inputs.x, read.inputs.memory):
        if norm is not None:
            of_norms += [norm.weight] if norm.bias is None else [norm.weight, norm.bias]
    learned = read.weights.semantics.learned().values()
    if all(map(are_finite, (*read.weights.tensors(), *learned, *of_norms))):
        return
    for name, count in source.broken(read).items():
        raise DataError(
            f"{source.name}: tensor {shown(name)} has {count:,} numbers that are not finite (NaN or "
            "infinite): repair the checkpoint first"
        )
    raise DataError(
        f"{source.name}: the norm before {read.site.name} is not finite (NaN or infinite): repair it"
    )


@final
@dataclass(frozen=True)
class Plan:
    """A preview of a rewrite.

    Attributes:
        source: name of the checkpoint.
        family: storage format.
        layers: planned and refused steps per layer.
        norms: planned and refused steps per norm read by maps outside the attention.
        before: cost of all original attention layers; `after`: as they would be written.
        unpadded: cost without padding, as in `Certificate`.
        settings: changed entries of the configuration.
        bytes_before: bytes of the attention layers' tensors as stored; `bytes_after`: as they would be
            written.
        notes: remarks for the reader, for example on widths fixed by the format.
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
        rows.append(
            (
                "bytes of attention in the file",
                f"{self.bytes_before:,} → {self.bytes_after:,}",
            )
        )
        return f"Plan {self.source}: {self.family}, {said_layers(self.layers)}", rows


def total(costs: Sequence[Cost]) -> Cost:
    """Return the sum of costs; zeros for an empty list."""
    return reduce(
        Cost.plus, costs, Cost(parameters=0, flops_per_token=0, kv_bytes_per_token=0)
    )


class Costs(NamedTuple):
    """Costs of one layer, or of all layers."""

    before: Cost  # cost of the original layers
    after: Cost  # cost as written
    maps: Cost  # new maps alone, without padding

    @property
    def unpadded(self) -> Cost | None:
        """Cost of the maps if it differs from the written cost."""
        return None if self.maps == self.after else self.maps


def local_folder(checkpoint: Source | str) -> Path:
    """Return the folder of a checkpoint; a checkpoint on the Hub is first fetched into its cache."""
    path = find_source(checkpoint).path
    if path.is_file():
        raise UsageError(f"{path} is one file of a checkpoint: give its folder")
    return path


def plan_rewrite(
    checkpoint: Source | str, recipe: RewriteRecipe, *, family: Family | None = None
) -> Plan:
    """Compute the effect of a rewrite without writing."""
    files = find_source(checkpoint, family=family)
    local = files.at(local_folder(files))
    source = open_checkpoint(local)
    rewriting = Rewriting(source, local, recipe)
    layers = list[LayerRecord]()
    steps = rewriting.driver.steps
    bytes_after = 0
    turned = 0
    padded = False
    notes = dict.fromkeys(source.warnings)
    for site in source.sites:
        read = source.read(site)
        done = rewriting.layer(source, read)
        layers.append(done.record)
        bytes_after += rewriting.form.written_bytes(read, done.written)
        turned += _cut_under_rotation(steps, read, done.record)
        padded |= done.costs.unpadded is not None
    # Explain unchanged sizes: ranks lowered before a rotation, and padding.
    costs = rewriting.costs()
    if turned:
        notes[
            _CHANNELS_STAY.format(share=f"{turned / costs.before.parameters:.0%}")
        ] = None
    if turned or padded:
        notes |= dict.fromkeys(rewriting.form.note_on_padding())
    return Plan(
        source=files.name,
        family=source.written_as,
        layers=tuple(layers),
        norms=rewriting.norms(),
        before=costs.before,
        after=costs.after,
        unpadded=costs.unpadded,
        settings=rewriting.settings,
        bytes_before=sum(source.bytes_of(site) for site in source.sites),
        bytes_after=bytes_after,
        notes=tuple(notes),
    )


_CHANNELS_STAY = (
    "W_Q and W_K ({share} of the attention's parameters) get lower ranks and keep all channels, which rotary "
    'positions turn: that saves nothing; truncate with rotary="pairs" takes channels out and loses more'
)


def _cut_under_rotation(
    steps: Sequence[Rewrite], read: AttentionLayer, done: LayerRecord
) -> int:
    """Count parameters of W_Q and W_K if their rank is lowered before a rotation, at unchanged sizes."""
    cut = any(
        isinstance(step, Truncate)
        and "qk" in step.forms
        and step.rotary == "maps"
        and applies_to(step, read.site.numbers)
        for step in steps
    )
    refused = any(
        record.rewrite == Truncate.name and record.refused for record in done.steps
    )
    if not cut or refused or read.weights.semantics.rotary is None:
        return 0
    links = {id(link): link for link in (*read.weights.q, *read.weights.k)}
    return sum(link.num_parameters for link in links.values())


class FinishedLayer(NamedTuple):
    """A layer after a recipe, in its original format."""

    layer: RewrittenLayer
    written: WrittenLayer
    record: LayerRecord
    costs: Costs


@final
class Rewriting:
    """A recipe applied to a checkpoint: layers in its storage format, and total costs."""

    def __init__(
        self, source: AttentionSource, files: Source | Path, recipe: RewriteRecipe
    ) -> None:
        source.require_layers(
            {*itertools.chain.from_iterable(step.layers or () for step in recipe.step)}
        )
        require_calibration(recipe)
        self.form = storage_format(source)
        self._source = source
        self._files = files
        self._text = recipe.calibration
        self._skip_refused = recipe.skip_refused
        self.other_norms = OtherNorms(self.form, recipe.step, recipe.skip_refused)
        self.driver = Driver(
            [(site.numbers, partial(self._read, site)) for site in source.sites],
            recipe.step,
            skip_refused=recipe.skip_refused,
            look=self._look,
        )
        self.settings: dict[str, Any] = {}
        self.folded: set[Site] = (
            set()
        )  # layers with the preceding norm folded into their maps
        self._costs: list[Costs] = []
        # Layers keeping their sizes after resizing steps; empty without such steps.
        self._stay: set[str] = set()
        if sized := [
            number
            for number, step in enumerate(self.driver.steps, start=1)
            if step.resizes
        ]:
            self._stay = self.form.fixed_sizes(
                lambda read: (
                    self.driver.rewritten(self._layer(source, read), sized[-1]).weights
                )
            )

    def _read(self, site: Site) -> LayerToRewrite:
        return self._layer(self._source, self._source.read(site))

    def _layer(self, source: AttentionSource, read: AttentionLayer) -> LayerToRewrite:
        _require_finite_layer(source, read)
        site = read.site
        wide = read.weights.to(torch.float64)
        others = self.other_norms.others(site)
        return LayerToRewrite(
            site.name,
            wide,
            source.longest_text(site),
            others=others,
            numbers=site.numbers,
        )

    def _look(
        self, driver: Driver, step: Rewrite
    ) -> tuple[Rewrite, Mapping[str, Moments]]:
        """Return a step with its head losses, and moments of the layers after the previous steps."""
        assert self._text is not None, "the recipe was looked at"
        sites = [site for site in self._source.sites if applies_to(step, site.numbers)]

        def before(read: AttentionLayer) -> AttentionWeights:
            return driver.rewritten(self._layer(self._source, read)).weights

        # Moments are of the rewritten layers; losses of the original model.
        if not step.needs_losses:
            served = isinstance(step, ToLatent)
            args = self._source, self._files, sites, before, self._text
            return step, gather_moments(*args, served=served)
        for site in sites:
            layer = self._read(site)
            kept = driver.rewritten(layer).kept
            if kept is not None and list(kept) != list(range(layer.weights.num_heads)):
                raise UsageError(
                    f"{site.name}: heads are gone or in another order, and the loss is that of the original "
                    "model: put the step that looks at the loss first"
                )
        return step.with_losses(measure_head_losses(self._files, sites, self._text)), {}

    def layer(self, source: AttentionSource, read: AttentionLayer) -> FinishedLayer:
        """Rewrite a layer; if the format refuses and refusals are skipped, keep it and record the reason."""
        done = self.driver.rewritten(self._layer(source, read))
        site = read.site
        try:
            same_sizes = site.name in self._stay
            written = storage_format(source).written(
                read, done.weights, done.kept, same_sizes=same_sizes
            )
        except RewriteRefusedError as refused:
            if not self._skip_refused:
                raise
            outcomes = (
                outcome
                if outcome.refused
                else StepOutcome(outcome.step, refused=refused.reason)
                for outcome in done.outcomes
            )
            done = RewrittenLayer(read.weights, None, tuple(outcomes))
            written = WrittenLayer({}, {}, read.weights)
        costs = Costs(
            *(
                Cost.from_writing(writing_cost(weights), read)
                for weights in (read.weights, written.shapes, done.weights)
            )
        )
        self._costs.append(costs)
        # A checkpoint has one format for all layers.
        if len(self._costs) > 1 and self.settings.get(
            "model_type"
        ) != written.settings.get("model_type"):
            why = "a file has one format, and other layers are rewritten into another"
            raise RewriteRefusedError("write", why).at(site.name)
        self.settings |= written.settings
        steps = tuple(
            StepRecord.from_outcome(outcome, read) for outcome in done.outcomes
        )
        heads = _other_numbers(
            done.kept, read.weights.num_heads, written.shapes.num_heads
        )
        numbers = site.numbers if site.also else ()
        record = LayerRecord(
            module=site.module, layers=numbers, steps=steps, heads=heads
        )
        if record.took_up_norm:
            self.folded.add(site)
        return FinishedLayer(done, written, record, costs)

    def costs(self) -> Costs:
        """Return the sums of costs over layers."""
        return Costs(
            *(
                total([one[part] for one in self._costs])
                for part in range(len(Costs._fields))
            )
        )

    def norms(self) -> tuple[NormRecord, ...]:
        """Return the records of norms read by maps outside the attention."""
        return self.other_norms.records(self.folded.__contains__)


def _other_numbers(
    kept: tuple[int, ...] | None, before: int, written: int
) -> tuple[int, ...] | None:
    """Return the former number of each head of a written layer; None if their order is unchanged.

    Formats of fixed sizes keep the remaining heads at their old positions.
    """
    in_old_places = kept is not None and len(kept) < before == written
    return None if in_old_places or kept == tuple(range(before)) else kept
