"""The claims of a certificate, tried again."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from triptych.checkpoints.checkpoint import Checkpoint, open_checkpoint
from triptych.checkpoints.copying import CONFIG, set_entry
from triptych.checkpoints.family import Family
from triptych.checkpoints.layer import AttentionSource
from triptych.checkpoints.norms import norm_sites
from triptych.checkpoints.shards import tensor_hash
from triptych.checkpoints.tensors import Tensors, open_tensors, read_json, shown, stays_in_folder
from triptych.errors import DataError, TriptychError, UsageError
from triptych.files import file_hash
from triptych.rewriting.calibration import MOST_TOKENS
from triptych.rewriting.certificate import (
    CERTIFICATE,
    MODEL_CARD,
    RANDOM_TOKENS,
    Certificate,
    EndToEnd,
    LayerRecord,
    Measured,
    NormRecord,
    Probes,
    card,
    read_certificate,
)
from triptych.rewriting.comparing import why_no_rounding
from triptych.rewriting.inputs import INPUTS, gather_inputs, read_inputs
from triptych.rewriting.measuring import (
    PROBES,
    measure_change,
    measure_change_on,
    measure_map,
    move_of_forms,
    total_errors,
)
from triptych.rewriting.rounding import coarsest_changed
from triptych.rewriting.running import (
    Compared,
    Seen,
    can_run,
    compared,
    first_line,
    open_model,
    read_whole_text,
)

# Measured again on another machine, float64 sums come out in another order, and products of the checkpoint's
# own dtype by another kernel.
_SAME, _SAME_RATIO = 1e-6, 0.5
# Of inputs that the original made in float32 once more.
_SAME_INPUTS = 1e-3
_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# Whole models run in float32. A loss and a divergence are means over tokens, in which the rounding of another
# machine's kernels cancels; the largest difference of a logit is one number and does not. Where nothing but
# rounding moves, that difference is rounding itself: only its size can be held against.
_SAME_LOSS_NATS = 1e-4
_SAME_DIVERGENCE, _DIVERGENCE_NATS = 1e-3, 1e-7
_SAME_LOGIT, _LOGIT = 1e-3, 1e-3
_SAME_LOGIT_IF_EXACT, _LOGIT_IF_EXACT = 0.5, 1e-4
_WHOLE_MODELS = "whole models compared"
_MOST_NAMED = 3
# Sums of the same numbers in another order, in float64.
_ONLY_ORDER = 1e-11
# Of a rounding-exact rewrite: it stays near 1.
_MOST_TIMES_ROUNDING = 20.0


class Check(NamedTuple):
    """One claim: whether it held (None if it was not tried again), and what was found."""

    claim: str
    held: bool | None
    found: str


def verify_certificate(
    folder: Path, against: Path | None = None, text: Path | None = None, family: Family | None = None
) -> list[Check]:
    """Try the claims of the certificate in a folder again.

    Args:
        folder: of the rewritten checkpoint, or the certificate in it.
        against: the original; the folder that the certificate names, if it is there, if None.
        text: what both models were compared on, to compare them again. Random tokens are drawn again
            without being asked for.
        family: how both are written, for a family that was given by hand.

    Raises:
        DataError: there is no certificate, or it was changed since it was written.
        UsageError: `text` without an original, none that can be read, or another than the models were
            compared on; the original cannot be run on it.
    """
    if text is not None:
        read_whole_text(text)
    certificate = read_certificate(folder)
    original = against
    if original is None and Path(certificate.source).is_dir():
        original = Path(certificate.source)
    if text is not None:
        if original is None:
            raise UsageError("--text compares two models: give the original with --against")
        _require_text(certificate, text)
    folder = folder.parent if folder.is_file() else folder
    if not _as_hard(certificate.probes):
        raise DataError(
            f"{folder}: its probes are {certificate.probes}, and layers are tried on {PROBES} at least"
        )
    checks = [Check("the certificate is as it was written", True, f"sha256 {certificate.sha256[:16]}…")]
    checks += _files(certificate, folder)
    checks.append(_hashes(certificate, open_tensors(folder), "written", "tensors as written"))
    if original is None:
        return [*checks, *_not_compared(certificate, "give the original with --against")]
    checks.append(_hashes(certificate, open_tensors(original), "read", f"tensors of {original}"))
    if not all(check.held for check in checks):
        return [*checks, *_not_compared(certificate, "these are other files than those certified")]
    one, other = open_checkpoint(original, family), open_checkpoint(folder, family)
    checks += [*_nothing_else(certificate, original, folder, one), *_layers(certificate, one, other)]
    if INPUTS in certificate.files:
        inputs = read_inputs(folder / INPUTS)
        checks.append(_on_text(certificate, inputs, one, other))
        if text is not None:
            checks.append(_inputs_of_text(inputs, original, one, text))
    return [*checks, *_end_to_end(certificate, original, folder, one, text)]


def _require_text(certificate: Certificate, text: Path) -> None:
    """It is the text that both models were compared on, as far as the certificate says.

    Raises:
        UsageError: it is another, or there is none.
    """
    found = certificate.end_to_end
    if found is None:
        raise UsageError(
            f"{text}: no whole models were compared ({certificate.not_compared}): leave out --text"
        )
    if _on_random_tokens(found):
        raise UsageError(
            f"{text}: both models were compared on random tokens, not on a text: leave out --text"
        )
    if found.text_sha256 is not None and found.text_sha256 != _hash_of(text):
        raise UsageError(
            f"{text} is another text than both models were compared on: that was {shown(found.text)}, with "
            f"sha256 {shown(found.text_sha256)[:16]}…"
        )


def _on_random_tokens(certified: EndToEnd) -> bool:
    return certified.text == RANDOM_TOKENS and certified.text_sha256 is None


def _as_hard(probes: Probes) -> bool:
    """Whether layers were tried on no less than they would be now."""
    return probes.seed == PROBES.seed and probes.count >= PROBES.count and probes.length >= PROBES.length


def _files(certificate: Certificate, folder: Path) -> Iterator[Check]:
    wrong = []
    for name, wanted in certificate.files.items():
        path = folder / name
        if not stays_in_folder(name) or not path.resolve().is_relative_to(folder.resolve()):
            wrong.append(f"{shown(name)} leads out of the folder")
        elif not path.is_file():
            wrong.append(f"{shown(name)} is missing")
        elif file_hash(path) != wanted:
            wrong.append(f"{shown(name)} was changed")
    wrong += [
        f"{shown(name)} is not in the certificate"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and (name := path.relative_to(folder).as_posix()) not in certificate.files
        and name not in (CERTIFICATE, MODEL_CARD)
        and not (path.suffix == ".safetensors" and path.parent == folder)
    ]
    readme = folder / MODEL_CARD
    text = readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""
    if card(certificate).strip() not in text:
        wrong.append(f"{MODEL_CARD} does not say what the certificate does")
    yield _listed("other files as written", wrong, f"{len(certificate.files)} files")


def _nothing_else(
    certificate: Certificate, original: Path, folder: Path, source: AttentionSource
) -> Iterator[Check]:
    """Nothing but the layers that were measured, and the settings that are named, is other than it was."""
    measured = {layer.module for layer in certificate.layers if layer.measured is not None}
    sites = {site.module: site for site in source.sites}
    wrong = [
        f"{module} is not in the certificate"
        for module in sites
        if module not in {layer.module for layer in certificate.layers}
    ]
    if isinstance(source, Checkpoint):
        own = {name for module in measured & sites.keys() for name in source.read_names(sites[module])}
        norms = {norm.module: norm for norm in certificate.norms if norm.measured is not None}
        for norm in norm_sites(source):
            if norm.module in norms:
                own.update(norm.all_tensors)
            elif any(_was_changed(certificate, name) for name in norm.own_tensors):
                wrong.append(f"{norm.module} was changed, and what reads it is not in the certificate")
        wrong += [
            f"{shown(name)} was changed, and is in no layer that was measured"
            for name in certificate.tensors
            if _was_changed(certificate, name) and name not in own
        ]
        wanted = read_json(original / CONFIG)
        for path, value in certificate.settings.items():
            set_entry(wanted, path, value)
        if read_json(folder / CONFIG) != wanted:
            wrong.append(f"{CONFIG} is other than the original's with what was set")
        wrong += [
            f"{shown(name)} is other than the original's"
            for name, digits in certificate.files.items()
            if name not in (CONFIG, INPUTS)
            and stays_in_folder(name)
            and not name.endswith(".index.json")
            and _hash_of(original / name) != digits
        ]
    yield _listed("nothing else is other than it was", wrong, f"{len(measured)} layers were changed")


def _was_changed(certificate: Certificate, name: str) -> bool:
    record = certificate.tensors.get(name)
    return record is not None and record.read != record.written


def _hash_of(path: Path) -> str:
    return file_hash(path) if path.is_file() else ""


def _hashes(certificate: Certificate, tensors: Tensors, which: str, claim: str) -> Check:
    wanted = {
        name: found
        for name, record in certificate.tensors.items()
        if (found := getattr(record, which)) is not None
    }
    wrong = [f"{name} is missing" for name in wanted if name not in tensors.infos]
    wrong += [f"{name} is not in the certificate" for name in tensors.infos if name not in wanted]
    for name in wanted:
        if name in tensors.infos and tensor_hash(tensors.read(name)) != wanted[name]:
            wrong.append(f"{name} was changed")
    return _listed(claim, wrong, f"{len(wanted)} tensors")


def _listed(claim: str, wrong: list[str], right: str) -> Check:
    said = "; ".join(wrong[:_MOST_NAMED]) + (f"; {len(wrong)} in all" if len(wrong) > _MOST_NAMED else "")
    return Check(claim, not wrong, said or right)


def _layers(certificate: Certificate, original: AttentionSource, written: AttentionSource) -> Iterator[Check]:
    before = {site.module: site for site in original.sites}
    after = {site.module: site for site in written.sites}
    off, outside = list[str](), list[str]()
    worst, counted = 0.0, 0
    for layer in certificate.layers:
        if layer.module not in before or layer.module not in after:
            off.append(f"{layer.module} is not there")
            continue
        if layer.measured is None:
            continue
        one, other = original.read(before[layer.module]), written.read(after[layer.module])
        found = measure_change(one, other, certificate.probes, bounded=layer.tier == "bounded")
        counted += 1
        worst = max(worst, found.relative)
        if not _alike(layer.measured, found):
            off.append(
                f"{layer.module}: {found.relative:.3g} of the output, certified {layer.measured.relative:.3g}"
            )
        outside += _outside(layer, found, one.weights.dtype)
        if layer.tier != "bounded" or not _same_order(layer):
            continue
        moved, allowed = move_of_forms(one, other), sum(step.bound for step in layer.steps)
        if moved is not None and moved > allowed * (1 + 1e-3) + _slack(one.weights.dtype):
            outside.append(f"{layer.module}: a form moves by {moved:.4g}, bounded by {allowed:.4g}")
    norms = [norm for norm in certificate.norms if norm.measured is not None]
    for norm in norms:
        again = _measured_again(norm, original, written, certificate.probes)
        if again is None:
            off.append(f"{norm.module} is no norm that maps outside the attention read")
            continue
        found, dtype = again
        worst = max(worst, found.relative)
        if norm.measured is not None and not _alike(norm.measured, found):
            off.append(
                f"{norm.module}: {found.relative:.3g} of the output, certified {norm.measured.relative:.3g}"
            )
        outside += _outside(norm, found, dtype)
    counted_norms = f" and {len(norms)} norms" if norms else ""
    yield _listed(
        "errors measured on the probes",
        off,
        f"{counted} layers{counted_norms}, at most {worst:.3g} of the output",
    )
    yield _listed("what was done is of its tier, and within its bounds", outside, f"{certificate.tier}")


def _on_text(
    certificate: Certificate,
    inputs: Mapping[str, Seen],
    original: AttentionSource,
    written: AttentionSource,
) -> Check:
    """Layers on what the original was given for some positions of the text, with no model around them."""
    names = {site.module: site.name for site in original.sites}
    before = {site.module: site for site in original.sites}
    after = {site.module: site for site in written.sites}
    wrong, worst, counted = list[str](), 0.0, 0
    for layer in certificate.layers:
        certified, given = layer.measured_on_text, inputs.get(names.get(layer.module, ""))
        if layer.measured is not None and (certified is None) != (given is None):
            wrong.append(f"{layer.module}: inputs or what was measured on them are missing")
        if certified is None or given is None:
            continue
        one, other = original.read(before[layer.module]), written.read(after[layer.module])
        found = measure_change_on(one, other, given)
        counted += 1
        worst = max(worst, found.relative)
        if not _alike(certified, found):
            wrong.append(
                f"{layer.module}: {found.relative:.3g} of the output, certified {certified.relative:.3g}"
            )
        wrong += _outside(layer, found, one.weights.dtype)
    said = f"{counted} layers, at most {worst:.3g} of the output"
    return _listed("errors measured on what the text gives", wrong, said)


def _inputs_of_text(inputs: Mapping[str, Seen], original: Path, source: AttentionSource, text: Path) -> Check:
    """What was kept is what the original is given for this text."""
    claim = "inputs kept of the text"
    try:
        model = open_model(original)
        found = gather_inputs(model, source, model.windows(text, MOST_TOKENS))
    except TriptychError as error:
        return Check(claim, False, str(error))
    wrong = [
        f"those of {name} are others"
        for name in inputs.keys() | found.keys()
        if name not in inputs or name not in found or not _are_near(inputs[name], found[name])
    ]
    return _listed(claim, sorted(wrong), f"{len(found)} layers")


def _are_near(one: Seen, other: Seen) -> bool:
    """Whether inputs are the same but for the order of float32 sums."""
    for a, b in ((one.x, other.x), (one.memory, other.memory)):
        if a is None or b is None:
            if a is not b:
                return False
        elif a.shape != b.shape or float((a - b).norm()) > _SAME_INPUTS * float(b.norm()):
            return False
    return True


def _measured_again(
    norm: NormRecord, original: AttentionSource, written: AttentionSource, probes: Probes
) -> tuple[Measured, torch.dtype] | None:
    """What the maps that took up a norm do now, and their coarsest dtype; None if there is no such norm."""
    if not isinstance(original, Checkpoint) or not isinstance(written, Checkpoint):
        return None
    site = next((site for site in norm_sites(original) if site.module == norm.module), None)
    if site is None or not site.readers or {reader.module for reader in site.readers} != set(norm.maps):
        return None
    one, other = original.tensors, written.tensors
    if any(name in one.infos and name not in other.infos for name in site.all_tensors):
        return None
    before, after = site.read(one), site.read(other)
    errors = [
        measure_map(before, after, reader.read(one), reader.read(other), probes) for reader in site.readers
    ]
    dtypes = [one.infos[reader.weight].dtype for reader in site.readers]
    return total_errors(errors), max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _alike(certified: Measured, found: Measured) -> bool:
    pairs = (
        (certified.worst_absolute, found.worst_absolute),
        (certified.relative, found.relative),
        (certified.score_bound, found.score_bound),
        (certified.output_bound, found.output_bound),
    )
    for one, other in pairs:
        if (one is None) != (other is None):
            return False
        if (
            one is not None
            and other is not None
            and not math.isclose(one, other, rel_tol=_SAME, abs_tol=1e-13)
        ):
            return False
    return math.isclose(certified.error_ratio, found.error_ratio, rel_tol=_SAME_RATIO, abs_tol=_SAME_RATIO)


def _outside(layer: LayerRecord | NormRecord, found: Measured, dtype: torch.dtype) -> Iterator[str]:
    if layer.tier == "bounded":
        return
    slack = _ONLY_ORDER if layer.tier == "bit-exact" else _slack(dtype)
    if not found.relative <= slack:
        yield f"{layer.module}: {found.relative:.3g} of the output is more than {layer.tier} allows"
    if dtype != torch.float64 and not found.error_ratio <= _MOST_TIMES_ROUNDING:
        yield f"{layer.module}: {found.error_ratio:.3g} times the rounding of the original"


def _slack(dtype: torch.dtype) -> float:
    return _ROUNDING.get(dtype, 1e-1)


def _same_order(layer: LayerRecord) -> bool:
    """Whether heads are where they were, so that their forms can be compared one by one."""
    return not any(
        step.rewrite in ("sort_heads", "prune_heads") and not step.refused and step.choice
        for step in layer.steps
    )


def _not_compared(certificate: Certificate, reason: str) -> Iterator[Check]:
    """Says that whole models were not run again, if the certificate has something to say of them."""
    if certificate.end_to_end is not None:
        yield Check(_WHOLE_MODELS, None, f"not tried again: {reason}")


def _end_to_end(
    certificate: Certificate, original: Path, folder: Path, source: AttentionSource, text: Path | None
) -> Iterator[Check]:
    certified = certificate.end_to_end
    if certified is None:
        return
    if text is None and not _on_random_tokens(certified):
        yield from _not_compared(certificate, f"give the text, {shown(certified.text)}, with --text")
        return
    if text is None and (reason := can_run(original)):
        yield from _not_compared(certificate, reason)
        return
    try:
        one = open_model(original)
    except TriptychError as error:
        if text is not None:
            raise
        yield from _not_compared(certificate, str(error))
        return
    try:
        windows = (
            one.random_windows(certificate.probes.seed) if text is None else one.windows(text, MOST_TOKENS)
        )
        other = open_model(folder)
        found = compared(one, other, windows)
    except (TriptychError, RuntimeError, ValueError, LookupError, TypeError) as error:
        yield Check(_WHOLE_MODELS, False, first_line(error))
        return
    exact = certificate.tier != "bounded"
    wrong = list(_other_than(certified, found, exact=exact))
    if exact:
        stored = coarsest_changed(certificate.tensors, open_tensors(folder))
        if reason := why_no_rounding(found, one, other, source, stored):
            wrong.insert(0, reason)
    said = f"{found.tokens:,} tokens, logits within {found.worst_logit:.3g}, {found.divergence_nats:.3g} nats"
    if found.loss_before_nats is not None and found.loss_after_nats is not None:
        said += f", loss {found.loss_before_nats:.4f} → {found.loss_after_nats:.4f}"
    yield _listed(_WHOLE_MODELS, wrong, said)


def _other_than(certified: EndToEnd, found: Compared, *, exact: bool) -> Iterator[str]:
    """What was found of whole models and is not as certified."""
    if certified.tokens != found.tokens:
        yield f"{found.tokens:,} tokens, certified {certified.tokens:,}"
    relative, absolute = (_SAME_LOGIT_IF_EXACT, _LOGIT_IF_EXACT) if exact else (_SAME_LOGIT, _LOGIT)
    for name, wanted, got, share, most in (
        ("logits", certified.worst_logit, found.worst_logit, relative, absolute),
        (
            "divergence",
            certified.divergence_nats,
            found.divergence_nats,
            _SAME_DIVERGENCE,
            _DIVERGENCE_NATS,
        ),
        ("loss before", certified.loss_before_nats, found.loss_before_nats, 0.0, _SAME_LOSS_NATS),
        ("loss after", certified.loss_after_nats, found.loss_after_nats, 0.0, _SAME_LOSS_NATS),
    ):
        if wanted is None and got is None:
            continue
        if wanted is None or got is None or not math.isclose(wanted, got, rel_tol=share, abs_tol=most):
            yield f"{name} {_number(got)}, certified {_number(wanted)}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"
