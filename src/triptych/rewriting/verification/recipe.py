"""Repeat the recipe on the original, and compare with the certificate."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from triptych.algebra.rewrites.registry import read_rewrite
from triptych.checkpoints.layer import AttentionLayer
from triptych.errors import TriptychError
from triptych.opening import first_line
from triptych.rewriting.certificate import Cost, LayerRecord, NormRecord, StepRecord
from triptych.rewriting.layers import RewrittenLayer
from triptych.rewriting.measuring import measure_change, rounding_of
from triptych.rewriting.planning import (
    Costs,
    Prepared,
    costs_of,
    fixed_sizes,
    prepare,
    total,
    total_costs,
    written_layer,
)
from triptych.rewriting.recipe import RewriteRecipe
from triptych.rewriting.rounding import MOST_TIMES_OF_LAYER
from triptych.rewriting.verification.check import Claim, listed, near, same_words, stated
from triptych.rewriting.verification.layers import CheckpointPair

_CLAIM = "the recipe, done again"
# Singular values come out in another order of sums on another machine; inputs that a text makes in float32.
_SAME, _SAME_ON_TEXT = 1e-6, 1e-2


def recipe_again(
    pair: CheckpointPair, folder: Path, calibration: Path | None, *, words: bool
) -> Iterator[Claim]:
    """Check steps, costs, settings and bounded layers by repeating the recipe on the original."""
    certificate = pair.certificate
    try:
        steps = tuple(read_rewrite(step) for step in certificate.recipe)
        recipe = RewriteRecipe(step=steps, skip_refused=True, calibration=calibration)
        needs_text = any(step.needs_text for step in steps)
        if needs_text != (certificate.calibration is not None):
            wanted = "a" if needs_text else "no"
            yield Claim(_CLAIM, False, f"its steps look at {wanted} text, and calibration says otherwise")
            return
        if needs_text and calibration is None:
            yield stated(_CLAIM, "its steps look at a text: give it with --calibrate")
            yield _without_text(pair)
            return
        yield from _Again(pair, prepare(pair.original, folder, recipe), words, needs_text).checks()
    except (TriptychError, ValidationError, ValueError) as error:
        yield Claim(_CLAIM, False, first_line(error))


def _without_text(pair: CheckpointPair) -> Claim:
    """Check what needs no text: the steps of each layer, and its cost before."""
    certificate, wrong, before = pair.certificate, list[str](), list[Cost]()
    for layer in certificate.layers:
        if layer.module not in pair.before:
            continue
        site = pair.before[layer.module]
        read = pair.original.read(site)
        before.append(costs_of(read, RewrittenLayer(read.weights, None, ())).before)
        wanted = [
            str(step["rewrite"])
            for step in certificate.recipe
            if step["rewrite"] != "fold_other_norms"
            and (step.get("layers") is None or site.layer in step["layers"])
        ]
        if [step.rewrite for step in layer.steps] != wanted:
            wrong.append(f"{layer.module}: its steps are not those of the recipe")
    if total(before) != certificate.before:
        wrong.append(f"before is {certificate.before}, and the original has {total(before)}")
    return listed("steps of the recipe, and costs before", wrong, f"{len(certificate.layers)} layers")


class _Again:
    """Repeats a recipe layer by layer."""

    def __init__(self, pair: CheckpointPair, prepared: Prepared, words: bool, on_text: bool) -> None:
        self._pair, self._prepared, self._words, self._on_text = pair, prepared, words, on_text
        self._steps, self._costs, self._functions = list[str](), list[str](), list[str]()
        self._all_costs = list[Costs]()
        self._settings: dict[str, object] = {}
        self._folded = set[str]()

    def checks(self) -> Iterator[Claim]:
        pair, certificate = self._pair, self._pair.certificate
        stay = fixed_sizes(pair.form, self._prepared)
        for layer in certificate.layers:
            if layer.module in pair.before and layer.module in pair.after:
                self._look_at(layer, stay)
        norms = self._prepared.norms.records(lambda site: site.module in self._folded)
        self._steps += self._unlike_norms(norms)
        costs = total_costs(self._all_costs)
        for name in ("before", "after", "unpadded"):
            if getattr(certificate, name) != getattr(costs, name):
                self._costs.append(
                    f"{name} is {getattr(certificate, name)}, and comes out as {getattr(costs, name)}"
                )
        if dict(certificate.settings) != self._settings:
            self._steps.append(f"settings are {certificate.settings}, and come out as {self._settings}")
        number = len(certificate.layers)
        yield listed(_CLAIM, self._steps, f"{len(certificate.recipe)} steps of {number} layers")
        yield listed(
            "costs", self._costs, f"{certificate.before.parameters:,} → {certificate.after.parameters:,}"
        )
        yield listed("layers compute what the recipe makes", self._functions, f"{number} layers")

    def _look_at(self, layer: LayerRecord, stay: set[str]) -> None:
        pair = self._pair
        one, other = pair.read(layer.module)
        done = self._prepared.through(pair.original, one)
        done, written = written_layer(pair.form, one, done, True, one.site.name in stay)
        self._settings |= written.settings
        if done.took_up_norm:
            self._folded.add(layer.module)
        self._all_costs.append(costs_of(one, done, written.shapes))
        self._steps += self._unlike_steps(layer.module, layer.steps, done.records)
        if layer.measured is not None and done.bounded:
            self._functions += self._other_function(layer, one, other, done)
        elif done.changed != (layer.measured is not None):
            self._functions.append(f"{layer.module}: measured is {'missing' if done.changed else 'too much'}")

    def _other_function(
        self, layer: LayerRecord, one: AttentionLayer, other: AttentionLayer, done: RewrittenLayer
    ) -> Iterator[str]:
        """Why a bounded layer differs from the result of the recipe."""
        expected = replace(one, weights=done.weights)
        found = measure_change(expected, other, self._pair.certificate.probes).relative
        rounding = rounding_of(
            one, other, self._pair.stored(layer), probes=self._pair.certificate.probes
        ).of_weights
        if not found <= MOST_TIMES_OF_LAYER * rounding + (_SAME_ON_TEXT if self._on_text else 0.0):
            yield (
                f"{layer.module}: {found:.3g} of the output is other than the recipe makes it, and rounding "
                f"moves it by {rounding:.3g}"
            )

    def _unlike_steps(
        self, module: str, certified: Sequence[StepRecord], found: Sequence[StepRecord]
    ) -> Iterator[str]:
        if [step.rewrite for step in certified] != [step.rewrite for step in found]:
            yield f"{module}: its steps are not those of the recipe"
            return
        for one, other in zip(certified, found, strict=True):
            wrong = [name for name in StepRecord.model_fields if not self._alike(name, one, other)]
            if wrong:
                yield (
                    f"{module}, {one.rewrite}: {wrong[0]} is {getattr(one, wrong[0])!r}, and comes out as "
                    f"{getattr(other, wrong[0])!r}"
                )

    def _alike(self, name: str, one: StepRecord, other: StepRecord) -> bool:
        mine, theirs = getattr(one, name), getattr(other, name)
        if name in ("bound", "error"):
            return near(mine, theirs, _SAME_ON_TEXT if self._on_text else _SAME, 1e-12)
        if name in ("choice", "refused", "notes", "checked"):
            if not self._words:
                return bool(mine) == bool(theirs) or name != "refused"
            mine, theirs = ((found,) if isinstance(found, str) else found for found in (mine, theirs))
            return len(mine) == len(theirs) and all(map(same_words, mine, theirs))
        return bool(mine == theirs)

    def _unlike_norms(self, found: Sequence[NormRecord]) -> Iterator[str]:
        certified = self._pair.certificate.norms
        if [(norm.module, norm.maps) for norm in certified] != [(norm.module, norm.maps) for norm in found]:
            yield "norms are not those that come out"
            return
        for one, other in zip(certified, found, strict=True):
            yield from self._unlike_steps(one.module, one.steps, other.steps)
