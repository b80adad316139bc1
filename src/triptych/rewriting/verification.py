"""The claims of a certificate, tried again."""

import hashlib
import math
from collections.abc import Iterator
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
from triptych.rewriting.certificate import (
    CERTIFICATE,
    MODEL_CARD,
    Certificate,
    LayerRecord,
    Measured,
    NormRecord,
    Probes,
    card,
    read_certificate,
)
from triptych.rewriting.measuring import (
    PROBES,
    measure_change,
    measure_map,
    move_of_forms,
    total_errors,
)
from triptych.rewriting.running import compared, open_model, read_whole_text

# Measured again on another machine, float64 sums come out in another order, and products of the checkpoint's
# own dtype by another kernel.
_SAME, _SAME_RATIO = 1e-6, 0.5
_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_MOST_NAMED = 3
# Sums of the same numbers in another order, in float64.
_ONLY_ORDER = 1e-11
# Of a rounding-exact rewrite: it stays near 1.
_MOST_TIMES_ROUNDING = 20.0


class Check(NamedTuple):
    """One claim: whether it held, and what was found."""

    claim: str
    held: bool
    found: str


def verify_certificate(
    folder: Path, against: Path | None = None, text: Path | None = None, family: Family | None = None
) -> list[Check]:
    """Try the claims of the certificate in a folder again.

    Args:
        folder: of the rewritten checkpoint, or the certificate in it.
        against: the original; the folder that the certificate names, if it is there, if None.
        text: what both models were compared on, to compare them again.
        family: how both are written, for a family that was given by hand.

    Raises:
        DataError: there is no certificate, or it was changed since it was written.
        UsageError: `text` without an original, or none that can be read.
    """
    if text is not None:
        read_whole_text(text)
    certificate = read_certificate(folder)
    folder = folder.parent if folder.is_file() else folder
    if not _as_hard(certificate.probes):
        raise DataError(
            f"{folder}: its probes are {certificate.probes}, and layers are tried on {PROBES} at least"
        )
    checks = [Check("the certificate is as it was written", True, f"sha256 {certificate.sha256[:16]}…")]
    checks += _files(certificate, folder)
    checks.append(_hashes(certificate, open_tensors(folder), "written", "tensors as written"))
    original = against
    if original is None and Path(certificate.source).is_dir():
        original = Path(certificate.source)
    if original is None:
        if text is not None:
            raise UsageError("--text compares two models: give the original with --against")
        return checks
    checks.append(_hashes(certificate, open_tensors(original), "read", f"tensors of {original}"))
    if all(check.held for check in checks):
        one, other = open_checkpoint(original, family), open_checkpoint(folder, family)
        checks += [*_nothing_else(certificate, original, folder, one), *_layers(certificate, one, other)]
    if text is not None:
        checks.append(_end_to_end(certificate, original, folder, text))
    return checks


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
        elif hashlib.sha256(path.read_bytes()).hexdigest() != wanted:
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
            if name != CONFIG
            and stays_in_folder(name)
            and not name.endswith(".index.json")
            and _hash_of(original / name) != digits
        ]
    yield _listed("nothing else is other than it was", wrong, f"{len(measured)} layers were changed")


def _was_changed(certificate: Certificate, name: str) -> bool:
    record = certificate.tensors.get(name)
    return record is not None and record.read != record.written


def _hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


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


def _end_to_end(certificate: Certificate, original: Path, folder: Path, text: Path) -> Check:
    certified = certificate.end_to_end
    if certified is None:
        return Check("whole models compared", False, "the certificate has no such comparison")
    try:
        one, other = open_model(original), open_model(folder)
        tokens, worst, divergence, before, after = compared(one, other, one.windows(text, certified.tokens))
    except TriptychError as error:
        return Check("whole models compared", False, str(error))
    said = f"{tokens:,} tokens, logits within {worst:.3g}, {divergence:.3g} nats"
    if before is not None and after is not None:
        said += f", loss {before:.4f} → {after:.4f}"
    held = tokens == certified.tokens and math.isclose(
        worst, certified.worst_logit, rel_tol=_SAME_RATIO, abs_tol=1e-4
    )
    for wanted, got in ((certified.loss_before_nats, before), (certified.loss_after_nats, after)):
        held = held and (wanted is None or (got is not None and math.isclose(wanted, got, abs_tol=1e-3)))
    return Check("whole models compared", held, said)
