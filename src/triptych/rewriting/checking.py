"""Checks of a certificate: repeating its recipe, and measuring its layers again."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError

from triptych.core.algebra.cost import writing_cost
from triptych.core.checkpoints.stored_layers import AttentionLayer, AttentionSource
from triptych.core.storage import open_tensors
from triptych.errors import TriptychError, first_line
from triptych.rewriting.calibration import MOST_TOKENS
from triptych.rewriting.certificate import (
    Certificate,
    Cost,
    LayerRecord,
    Measured,
    NormRecord,
    StepRecord,
)
from triptych.rewriting.folder_formats import storage_format
from triptych.rewriting.functions.registry import read_rewrite
from triptych.rewriting.inputs import gather_inputs
from triptych.rewriting.measuring import (
    Rounding,
    measure_change,
    measure_form_move,
    measure_form_rounding,
    measure_map,
    measure_rounding,
    total_errors,
    total_rounding,
)
from triptych.rewriting.planning import FinishedLayer, Rewriting, total
from triptych.rewriting.recipe import RewriteRecipe
from triptych.rewriting.rounding import MOST_TIMES_OF_LAYER, coarsest_changed
from triptych.running.opening import Seen, open_text_reader

_MOST_NAMED = 3
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


class Claim(NamedTuple):
    """A claim: confirmed, refuted or not checked (None), and the finding."""

    claim: str
    held: bool | None
    found: str


def as_claim(claim: str, wrong: list[str], right: str) -> Claim:
    """Return a claim, confirmed if the list of errors is empty."""
    said = "; ".join(wrong[:_MOST_NAMED]) + (
        f"; {len(wrong)} in all" if len(wrong) > _MOST_NAMED else ""
    )
    return Claim(claim, not wrong, said or right)


def as_stated(claim: str, what: str) -> Claim:
    """Return a claim stated in the certificate without a check."""
    return Claim(claim, None, f"stated, not checked: {what}")


def are_close(
    one: float | None, other: float | None, relative: float, absolute: float = 0.0
) -> bool:
    """Return True if two values are close, or both None."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=relative, abs_tol=absolute)


def same_words(one: str, other: str) -> bool:
    """Return True if two texts are equal up to one unit in the last digit of their figures."""
    if _NUMBER.split(one) != _NUMBER.split(other):
        return False
    return all(
        a == b or abs(float(a) - float(b)) <= 1.01 * max(_last_digit(a), _last_digit(b))
        for a, b in zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True)
    )


def _last_digit(number: str) -> float:
    """Return the value of one unit in the last printed digit; 0 for integers (counts)."""
    mantissa, _, exponent = number.partition("e")
    if "." not in mantissa and not exponent:
        return 0.0
    return float(10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2])))


# Float64 sums and singular values vary between machines by the order of summation, and products in the
# checkpoint's dtype by the kernel.
_SAME = 1e-6
_SAME_RATIO = 0.5
# Relative tolerance of the original's inputs, recomputed in float32.
_SAME_INPUTS = 1e-3
# Exact steps that move or remove biases (rows of the forms).
_MOVE_FORMS = ("drop_key_bias", "fold_value_bias")


class CheckpointPair:
    """Layers of the original and of the rewritten checkpoint, by module."""

    def __init__(
        self,
        certificate: Certificate,
        original: AttentionSource,
        written: AttentionSource,
        folder: Path,
    ) -> None:
        self.certificate = certificate
        self.original = original
        self.written = written
        self.before = {site.module: site for site in original.sites}
        self.after = {site.module: site for site in written.sites}
        self.form, self.written_form = storage_format(original), storage_format(written)
        self._tensors = open_tensors(folder)

    def read(self, module: str) -> tuple[AttentionLayer, AttentionLayer]:
        return self.original.read(self.before[module]), self.written.read(
            self.after[module]
        )

    def layers(self) -> Iterator[LayerRecord]:
        """Yield the certificate's layers present in both checkpoints."""
        for layer in self.certificate.layers:
            if layer.module in self.before and layer.module in self.after:
                yield layer

    def stored(self, layer: LayerRecord) -> torch.dtype | None:
        """Return the coarsest dtype of a layer's changed tensors; None if values only moved."""
        if layer.tier == "bit-exact":
            return None
        names = self.form.rewritable_names(self.before[layer.module])
        known = self._tensors.infos if names is None else set(names)
        records = {
            name: record
            for name, record in self.certificate.tensors.items()
            if name in known
        }
        return coarsest_changed(records, self._tensors)


def check_layers(pair: CheckpointPair) -> Iterator[Claim]:
    """Check the errors on the probes, tiers and bounds."""
    certificate = pair.certificate
    off = list[str]()
    outside = list[str]()
    worst = 0.0
    counted = 0
    there = {layer.module for layer in pair.layers()}
    off += [
        f"{layer.module} is not there"
        for layer in certificate.layers
        if layer.module not in there
    ]
    # Measure each changed layer again, and compare with the certificate and with its tier.
    for layer in pair.layers():
        if layer.measured is None:
            continue
        one, other = pair.read(layer.module)
        found = measure_change(
            one, other, certificate.probes, bounded=layer.tier == "bounded"
        )
        counted += 1
        worst = max(worst, found.relative)
        off += _unlike_figures(layer.module, layer.measured, found)
        if layer.tier == "bounded":
            outside += _beyond_bound(layer, one, other, pair.stored(layer))
        else:
            rounding = measure_rounding(
                one, other, pair.stored(layer), certificate.probes
            )
            outside += _beyond_tier(layer, found, rounding)
    norms = [norm for norm in certificate.norms if norm.measured is not None]
    for norm in norms:
        again = _norm_again(norm, pair)
        if again is None:
            off.append(f"{norm.module} is no norm that maps outside the attention read")
            continue
        found, rounding = again
        worst = max(worst, found.relative)
        if norm.measured is not None:
            off += _unlike_figures(norm.module, norm.measured, found)
        outside += _beyond_tier(norm, found, rounding)
    counted_norms = f" and {len(norms)} norms" if norms else ""
    yield as_claim(
        "errors measured on the probes",
        off,
        f"{counted} layers{counted_norms}, at most {worst:.3g} of the output",
    )
    yield as_claim(
        "what was done is of its tier, and within its bounds",
        outside,
        f"{certificate.tier}",
    )


def check_layers_on_text(pair: CheckpointPair, inputs: Mapping[str, Seen]) -> Claim:
    """Check layers on the original's inputs for some positions of the text, without running a model."""
    wrong = list[str]()
    worst = 0.0
    counted = 0
    for layer in pair.layers():
        certified = layer.measured_on_text
        given = inputs.get(pair.before[layer.module].name)
        # A changed layer has inputs if and only if it has certified figures.
        if layer.measured is not None and (certified is None) != (given is None):
            wrong.append(
                f"{layer.module}: inputs or what was measured on them are missing"
            )
        if certified is None or given is None:
            continue
        one, other = pair.read(layer.module)
        found = measure_change(one, other, given)
        counted += 1
        worst = max(worst, found.relative)
        wrong += _unlike_figures(layer.module, certified, found)
        if layer.tier != "bounded":
            wrong += _beyond_tier(
                layer, found, measure_rounding(one, other, pair.stored(layer), given)
            )
    said = f"{counted} layers, at most {worst:.3g} of the output"
    return as_claim("errors measured on what the text gives", wrong, said)


def _unlike_figures(module: str, certified: Measured, found: Measured) -> Iterator[str]:
    """Yield measurements that differ from the certificate."""
    for name in Measured.model_fields:
        one = getattr(certified, name)
        other = getattr(found, name)
        if isinstance(one, str):
            same = one == other
        elif name == "error_ratio":
            same = are_close(one, other, _SAME_RATIO, _SAME_RATIO)
        else:
            same = are_close(one, other, _SAME, 1e-13)
        if not same:
            yield f"{module}: {name} {format_figure(other)}, certified {format_figure(one)}"


def format_figure(value: float | str | None) -> str:
    """Format a figure of a certificate with six digits."""
    return f"{value:.6g}" if isinstance(value, float) else str(value or "none")


def _beyond_tier(
    layer: LayerRecord | NormRecord, found: Measured, rounding: Rounding
) -> Iterator[str]:
    """Yield the excess if a layer moved by more than its exact tier allows."""
    if not rounding.explains(found):
        yield (
            f"{layer.module}: {found.relative:.3g} of the output, and {found.error_ratio:.3g} times the "
            f"original's error, is more than {layer.tier} allows: rounding moves it by "
            f"{rounding.of_weights:.3g}"
        )


def _keeps_forms(step: StepRecord) -> bool:
    """Return True if the step's bound limits the move of every form, with heads in their old order."""
    if step.rewrite in ("sort_heads", "permute_heads", "prune_heads"):
        return bool(step.refused) or not step.choice
    return (
        step.rewrite not in _MOVE_FORMS
        or bool(step.refused)
        or step.tier == "bit-exact"
    )


def _beyond_bound(
    layer: LayerRecord,
    one: AttentionLayer,
    other: AttentionLayer,
    stored: torch.dtype | None,
) -> Iterator[str]:
    """Yield the excess if forms moved by more than the steps' bounds and heads are comparable."""
    moved = (
        measure_form_move(one, other) if all(map(_keeps_forms, layer.steps)) else None
    )
    if moved is None:
        return
    allowed = sum(step.bound for step in layer.steps)
    rounding = MOST_TIMES_OF_LAYER * measure_form_rounding(one, other, stored)
    if moved > allowed * (1 + _SAME) + rounding:
        yield f"{layer.module}: a form moves by {moved:.4g}, bounded by {allowed:.4g}"


def check_inputs(
    inputs: Mapping[str, Seen], original: Path, source: AttentionSource, text: Path
) -> Claim:
    """Check that the stored inputs are the original's inputs for this text."""
    claim = "inputs kept of the text"
    try:
        model = open_text_reader(original)
        found = gather_inputs(model, source, model.windows(text, MOST_TOKENS))
    except TriptychError as error:
        return Claim(claim, False, str(error))
    wrong = [
        f"the inputs of {name} differ"
        for name in inputs.keys() | found.keys()
        if name not in inputs
        or name not in found
        or not _are_near(inputs[name], found[name])
    ]
    return as_claim(claim, sorted(wrong), f"{len(found)} layers")


def _are_near(one: Seen, other: Seen) -> bool:
    """Return True if inputs are equal up to the order of float32 sums."""
    for a, b in ((one.x, other.x), (one.memory, other.memory)):
        if a is None or b is None:
            if a is not b:
                return False
        elif a.shape != b.shape or float((a - b).norm()) > _SAME_INPUTS * float(
            b.norm()
        ):
            return False
    return True


def _norm_again(
    norm: NormRecord, pair: CheckpointPair
) -> tuple[Measured, Rounding] | None:
    """Measure the maps that absorbed a norm again; None if the norm does not exist."""
    site = next(
        (site for site in pair.form.norm_sites() if site.module == norm.module), None
    )
    if (
        site is None
        or not site.readers
        or {reader.module for reader in site.readers} != set(norm.maps)
    ):
        return None
    one = pair.form.tensors
    other = pair.written_form.tensors
    if (
        one is None
        or other is None
        or any(
            name in one.infos and name not in other.infos for name in site.all_tensors
        )
    ):
        return None
    before = site.read(one)
    after = site.read(other)
    # Each reader is measured against the original norm and map.
    errors = [
        measure_map(
            before, after, reader.read(one), reader.read(other), pair.certificate.probes
        )
        for reader in site.readers
    ]
    return total_errors(errors), total_rounding(errors)


_CLAIM = "the recipe, done again"
# Inputs from a text are float32.
_SAME_ON_TEXT = 1e-2


def check_recipe(
    pair: CheckpointPair, folder: Path, calibration: Path | None, *, words: bool
) -> Iterator[Claim]:
    """Check steps, costs, settings and bounded layers by repeating the recipe on the original."""
    certificate = pair.certificate
    try:
        steps = tuple(read_rewrite(step) for step in certificate.recipe)
        recipe = RewriteRecipe(step=steps, skip_refused=True, calibration=calibration)
        # Certificate and recipe must agree on the use of a text.
        needs_text = any(step.needs_text for step in steps)
        if needs_text != (certificate.calibration is not None):
            wanted = "a" if needs_text else "no"
            yield Claim(
                _CLAIM,
                False,
                f"its steps look at {wanted} text, and calibration says otherwise",
            )
            return
        if needs_text and calibration is None:
            yield as_stated(
                _CLAIM, "its steps look at a text: give it with --calibrate"
            )
            yield _without_text(pair)
            return
        same = _SAME_ON_TEXT if needs_text else _SAME
        yield from _repeat_recipe(
            pair, Rewriting(pair.original, folder, recipe), words, same
        )
    except (TriptychError, ValidationError, ValueError) as error:
        yield Claim(_CLAIM, False, first_line(error))


def _without_text(pair: CheckpointPair) -> Claim:
    """Check the claims independent of a text: the steps of each layer, and the cost before."""
    certificate = pair.certificate
    wrong = list[str]()
    before = list[Cost]()
    for layer in certificate.layers:
        if layer.module not in pair.before:
            continue
        site = pair.before[layer.module]
        read = pair.original.read(site)
        before.append(Cost.from_writing(writing_cost(read.weights), read))
        # The certificate lists the recipe's steps applicable to the layer.
        wanted = [
            str(step["rewrite"])
            for step in certificate.recipe
            if step["rewrite"] != "fold_other_norms"
            and (
                step.get("layers") is None
                or not {*site.numbers}.isdisjoint(step["layers"])
            )
        ]
        if [step.rewrite for step in layer.steps] != wanted:
            wrong.append(f"{layer.module}: its steps are not the steps of the recipe")
    if total(before) != certificate.before:
        wrong.append(
            f"before is {certificate.before}, and the original has {total(before)}"
        )
    return as_claim(
        "steps of the recipe, and costs before",
        wrong,
        f"{len(certificate.layers)} layers",
    )


def _repeat_recipe(
    pair: CheckpointPair, rewriting: Rewriting, words: bool, same: float
) -> Iterator[Claim]:
    """Compare every layer, the norms and the costs with the repeated recipe."""
    certificate = pair.certificate
    steps = list[str]()
    functions = list[str]()
    for layer in pair.layers():
        one, other = pair.read(layer.module)
        done = rewriting.layer(pair.original, one)
        steps += _step_differences(
            layer.module, layer.steps, done.record.steps, words, same
        )
        # Certificates of older versions lack `heads`.
        if layer.heads != done.record.heads and (words or layer.heads is not None):
            steps.append(
                f"{layer.module}: heads are {layer.heads}, and come out as {done.record.heads}"
            )
        if layer.measured is not None and done.record.tier == "bounded":
            functions += _other_function(
                pair, layer, one, other, done, 0.0 if same == _SAME else same
            )
        elif done.record.changed != (layer.measured is not None):
            functions.append(
                f"{layer.module}: measured is {'missing' if done.record.changed else 'too much'}"
            )
    norms = rewriting.norms()
    if [(norm.module, norm.maps) for norm in certificate.norms] == [
        (norm.module, norm.maps) for norm in norms
    ]:
        for certified, found in zip(certificate.norms, norms, strict=True):
            steps += _step_differences(
                certified.module, certified.steps, found.steps, words, same
            )
    else:
        steps.append("norms are not those that come out")
    if dict(certificate.settings) != rewriting.settings:
        steps.append(
            f"settings are {certificate.settings}, and come out as {rewriting.settings}"
        )
    costs = rewriting.costs()
    wrong = [
        f"{name} is {getattr(certificate, name)}, and comes out as {getattr(costs, name)}"
        for name in ("before", "after", "unpadded")
        if getattr(certificate, name) != getattr(costs, name)
    ]
    number = len(certificate.layers)
    count = len(certificate.recipe)
    yield as_claim(
        _CLAIM, steps, f"{count} step{'s' * (count != 1)} of {number} layers"
    )
    parameters = f"{certificate.before.parameters:,} → {certificate.after.parameters:,}"
    yield as_claim("costs", wrong, parameters)
    yield as_claim(
        "layers compute what the recipe makes", functions, f"{number} layers"
    )


def _other_function(
    pair: CheckpointPair,
    layer: LayerRecord,
    one: AttentionLayer,
    other: AttentionLayer,
    done: FinishedLayer,
    allowed: float,
) -> Iterator[str]:
    """Yield the difference of a bounded layer from the result of the recipe."""
    probes = pair.certificate.probes
    # The repeated layer replaces the original in the comparison.
    found = measure_change(
        replace(one, weights=done.layer.weights), other, probes
    ).relative
    rounding = measure_rounding(one, other, pair.stored(layer), probes).of_weights
    if not found <= MOST_TIMES_OF_LAYER * rounding + allowed:
        yield (
            f"{layer.module}: {found:.3g} of the output is other than the recipe makes it, and rounding "
            f"moves it by {rounding:.3g}"
        )


def _step_differences(
    module: str,
    certified: Sequence[StepRecord],
    found: Sequence[StepRecord],
    words: bool,
    same: float,
) -> Iterator[str]:
    if [step.rewrite for step in certified] != [step.rewrite for step in found]:
        yield f"{module}: its steps are not the steps of the recipe"
        return
    for one, other in zip(certified, found, strict=True):
        for name in StepRecord.model_fields:
            mine = getattr(one, name)
            theirs = getattr(other, name)
            if not _same_value(name, mine, theirs, words, same):
                yield f"{module}, {one.rewrite}: {name} is {mine!r}, and comes out as {theirs!r}"
                break


def _same_value(name: str, mine: Any, theirs: Any, words: bool, same: float) -> bool:
    if name in ("bound", "error"):
        return are_close(mine, theirs, same, 1e-12)
    if name in ("choice", "refused", "notes", "checked"):
        if not words:
            return bool(mine) == bool(theirs) or name != "refused"
        mine, theirs = (
            (found,) if isinstance(found, str) else found for found in (mine, theirs)
        )
        return len(mine) == len(theirs) and all(map(same_words, mine, theirs))
    return bool(mine == theirs)
