"""Measure layers and norms again, and compare them with their tiers and bounds."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from triptych.checkpoints.layer import AttentionLayer, AttentionSource
from triptych.errors import TriptychError
from triptych.opening import Seen, open_text_model
from triptych.rewriting.calibration import MOST_TOKENS
from triptych.rewriting.certificate import Certificate, LayerRecord, Measured, NormRecord, StepRecord
from triptych.rewriting.formats import format_of
from triptych.rewriting.inputs import gather_inputs
from triptych.rewriting.measuring import (
    Rounding,
    measure_change,
    measure_change_on,
    measure_map,
    move_of_forms,
    rounding_of,
    rounding_of_forms,
    rounding_of_maps,
    total_errors,
)
from triptych.rewriting.rounding import MOST_TIMES_OF_LAYER, coarsest_changed
from triptych.rewriting.verification.check import Claim, listed, near
from triptych.storage.tensors import open_tensors

# Measured again on another machine, float64 sums come out in another order, and products of the checkpoint's
# own dtype by another kernel.
_SAME, _SAME_RATIO = 1e-6, 0.5
# Of inputs that the original made in float32 once more.
_SAME_INPUTS = 1e-3
# Exact steps after which biases, which are rows of the forms, stand elsewhere or are gone.
_MOVE_FORMS = ("drop_key_bias", "fold_value_bias")


class CheckpointPair:
    """The layers of the original and of the rewritten checkpoint, by their modules."""

    def __init__(
        self, certificate: Certificate, original: AttentionSource, written: AttentionSource, folder: Path
    ) -> None:
        self.certificate, self.original, self.written = certificate, original, written
        self.before = {site.module: site for site in original.sites}
        self.after = {site.module: site for site in written.sites}
        self.form, self.written_form = format_of(original), format_of(written)
        self._tensors = open_tensors(folder)

    def read(self, module: str) -> tuple[AttentionLayer, AttentionLayer]:
        return self.original.read(self.before[module]), self.written.read(self.after[module])

    def stored(self, layer: LayerRecord) -> torch.dtype | None:
        """The coarsest dtype of what a layer changed; None where numbers only changed their places."""
        if layer.tier == "bit-exact":
            return None
        names = self.form.rewritable_names(self.before[layer.module])
        known = self._tensors.infos if names is None else set(names)
        records = {name: record for name, record in self.certificate.tensors.items() if name in known}
        return coarsest_changed(records, self._tensors)


def layers_again(pair: CheckpointPair) -> Iterator[Claim]:
    """Errors on the probes, tiers and bounds."""
    certificate = pair.certificate
    off, outside = list[str](), list[str]()
    worst, counted = 0.0, 0
    for layer in certificate.layers:
        if layer.module not in pair.before or layer.module not in pair.after:
            off.append(f"{layer.module} is not there")
            continue
        if layer.measured is None:
            continue
        one, other = pair.read(layer.module)
        found = measure_change(one, other, certificate.probes, bounded=layer.tier == "bounded")
        counted += 1
        worst = max(worst, found.relative)
        off += _unlike(layer.module, layer.measured, found)
        if layer.tier == "bounded":
            outside += _beyond_bound(layer, one, other, pair.stored(layer))
        else:
            rounding = rounding_of(one, other, pair.stored(layer), probes=certificate.probes)
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
            off += _unlike(norm.module, norm.measured, found)
        outside += _beyond_tier(norm, found, rounding)
    counted_norms = f" and {len(norms)} norms" if norms else ""
    yield listed(
        "errors measured on the probes",
        off,
        f"{counted} layers{counted_norms}, at most {worst:.3g} of the output",
    )
    yield listed("what was done is of its tier, and within its bounds", outside, f"{certificate.tier}")


def layers_on_text(pair: CheckpointPair, inputs: Mapping[str, Seen]) -> Claim:
    """Layers on what the original was given for some positions of the text, with no model around them."""
    wrong, worst, counted = list[str](), 0.0, 0
    for layer in pair.certificate.layers:
        if layer.module not in pair.before or layer.module not in pair.after:
            continue  # said by `layers_again`
        certified, given = layer.measured_on_text, inputs.get(pair.before[layer.module].name)
        if layer.measured is not None and (certified is None) != (given is None):
            wrong.append(f"{layer.module}: inputs or what was measured on them are missing")
        if certified is None or given is None:
            continue
        one, other = pair.read(layer.module)
        found = measure_change_on(one, other, given)
        counted += 1
        worst = max(worst, found.relative)
        wrong += _unlike(layer.module, certified, found)
        if layer.tier != "bounded":
            wrong += _beyond_tier(layer, found, rounding_of(one, other, pair.stored(layer), given))
    said = f"{counted} layers, at most {worst:.3g} of the output"
    return listed("errors measured on what the text gives", wrong, said)


def _unlike(module: str, certified: Measured, found: Measured) -> Iterator[str]:
    """Measurements that differ from the certificate."""
    for name in Measured.model_fields:
        one, other = getattr(certified, name), getattr(found, name)
        if isinstance(one, str):
            same = one == other
        elif name == "error_ratio":
            same = near(one, other, _SAME_RATIO, _SAME_RATIO)
        else:
            same = near(one, other, _SAME, 1e-13)
        if not same:
            yield f"{module}: {name} {_shown(other)}, certified {_shown(one)}"


def _shown(value: float | str | None) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _beyond_tier(layer: LayerRecord | NormRecord, found: Measured, rounding: Rounding) -> Iterator[str]:
    """Why a layer moved more than its exact tier allows."""
    if not rounding.explains(found):
        yield (
            f"{layer.module}: {found.relative:.3g} of the output, and {found.error_ratio:.3g} times the "
            f"original's error, is more than {layer.tier} allows: rounding moves it by "
            f"{rounding.of_weights:.3g}"
        )


def _keeps_forms(step: StepRecord) -> bool:
    """Whether a step's bound is all by which a form may move, each head in its place."""
    if step.rewrite in ("sort_heads", "permute_heads", "prune_heads"):
        return bool(step.refused) or not step.choice
    return step.rewrite not in _MOVE_FORMS or bool(step.refused) or step.tier == "bit-exact"


def _beyond_bound(
    layer: LayerRecord, one: AttentionLayer, other: AttentionLayer, stored: torch.dtype | None
) -> Iterator[str]:
    """Why forms moved farther than the steps' bounds, where heads can be compared one by one."""
    moved = move_of_forms(one, other) if all(map(_keeps_forms, layer.steps)) else None
    if moved is None:
        return
    allowed = sum(step.bound for step in layer.steps)
    rounding = MOST_TIMES_OF_LAYER * rounding_of_forms(one, other, stored)
    if moved > allowed * (1 + _SAME) + rounding:
        yield f"{layer.module}: a form moves by {moved:.4g}, bounded by {allowed:.4g}"


def inputs_of_text(inputs: Mapping[str, Seen], original: Path, source: AttentionSource, text: Path) -> Claim:
    """Check that the stored inputs are the original's inputs for this text."""
    claim = "inputs kept of the text"
    try:
        model = open_text_model(original)
        found = gather_inputs(model, source, model.windows(text, MOST_TOKENS))
    except TriptychError as error:
        return Claim(claim, False, str(error))
    wrong = [
        f"those of {name} are others"
        for name in inputs.keys() | found.keys()
        if name not in inputs or name not in found or not _are_near(inputs[name], found[name])
    ]
    return listed(claim, sorted(wrong), f"{len(found)} layers")


def _are_near(one: Seen, other: Seen) -> bool:
    """Whether inputs are equal up to the order of float32 sums."""
    for a, b in ((one.x, other.x), (one.memory, other.memory)):
        if a is None or b is None:
            if a is not b:
                return False
        elif a.shape != b.shape or float((a - b).norm()) > _SAME_INPUTS * float(b.norm()):
            return False
    return True


def _norm_again(norm: NormRecord, pair: CheckpointPair) -> tuple[Measured, Rounding] | None:
    """What the maps that took up a norm do now; None if there is no such norm."""
    site = next((site for site in pair.form.norm_sites() if site.module == norm.module), None)
    if site is None or not site.readers or {reader.module for reader in site.readers} != set(norm.maps):
        return None
    one, other = pair.form.tensors, pair.written_form.tensors
    if (
        one is None
        or other is None
        or any(name in one.infos and name not in other.infos for name in site.all_tensors)
    ):
        return None
    before, after = site.read(one), site.read(other)
    errors = [
        measure_map(before, after, reader.read(one), reader.read(other), pair.certificate.probes)
        for reader in site.readers
    ]
    return total_errors(errors), rounding_of_maps(errors)
