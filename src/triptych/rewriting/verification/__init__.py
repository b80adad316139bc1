"""Verification of the claims of a certificate."""

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from triptych.checkpoints.checkpoint import open_checkpoint
from triptych.checkpoints.family import Family, read_family
from triptych.checkpoints.layer import AttentionSource
from triptych.errors import DataError, UsageError
from triptych.files import file_hash
from triptych.opening import read_whole_text
from triptych.rewriting.certificate import Certificate, Probes, read_certificate
from triptych.rewriting.inputs import INPUTS, read_inputs
from triptych.rewriting.measuring import PROBES
from triptych.rewriting.planning import local_folder
from triptych.rewriting.verification.check import Claim, listed, stated
from triptych.rewriting.verification.files import files_as_written, hashes, nothing_else
from triptych.rewriting.verification.layers import (
    CheckpointPair,
    inputs_of_text,
    layers_again,
    layers_on_text,
)
from triptych.rewriting.verification.models import models_again, not_compared, on_random_tokens
from triptych.rewriting.verification.recipe import recipe_again
from triptych.storage.tensors import open_tensors
from triptych.storage.untrusted import shown

__all__ = ["Claim", "verify"]


def verify(
    folder: str | Path,
    against: str | Path | None = None,
    text: str | Path | None = None,
    family: Family | str | Path | None = None,
    calibration: str | Path | None = None,
) -> list[Claim]:
    """Verify the claims of the certificate in a folder.

    Args:
        folder: a rewritten checkpoint: its folder or its certificate.json.
        against: the original, local or on the Hub. Default: the folder that the certificate names, if it
            exists. Without it, fewer claims are checked.
        text: the text that the models were compared on. They are compared on it again.
        family: a family file that describes both checkpoints.
        calibration: the calibration text of the rewrite. The steps that used it are repeated.

    Raises:
        DataError: there is no certificate, or it was changed after it was written.
        UsageError: `text` is given without an original, cannot be read, or is not the text that the models
            were compared on; the original cannot be run on it; likewise for `calibration`.
    """
    folder, text = Path(folder), None if text is None else Path(text)
    calibration = None if calibration is None else Path(calibration)
    family = read_family(family) if isinstance(family, str | Path) else family
    for given in (text, calibration):
        if given is not None:
            read_whole_text(given)
    certificate = read_certificate(folder)
    original = None if against is None else local_folder(str(against))
    if original is None and Path(certificate.source).is_dir():
        original = Path(certificate.source)
    if text is not None:
        if original is None:
            raise UsageError("--text needs the original: give it with --against")
        _require_text(certificate, text)
    if calibration is not None:
        _require_calibration(certificate, original, calibration)
    folder = folder.parent if folder.is_file() else folder
    if not _as_hard(certificate.probes):
        raise DataError(
            f"{folder}: its probes are {certificate.probes}, and layers are tried on {PROBES} at least"
        )
    checks = [Claim("the certificate is as it was written", True, f"sha256 {certificate.sha256[:16]}…")]
    checks.append(files_as_written(certificate, folder))
    checks.append(hashes(certificate, open_tensors(folder), "written", "tensors as written"))
    if original is None:
        return [*checks, *_not_tried(certificate, "give the original with --against")]
    checks.append(hashes(certificate, open_tensors(original), "read", f"tensors of {original}"))
    if not all(check.held for check in checks):
        return [*checks, *_not_tried(certificate, "these are other files than those certified")]
    one, other = open_checkpoint(original, family), open_checkpoint(folder, family)
    pair, words = CheckpointPair(certificate, one, other, folder), certificate.tool == _tool()
    checks += [
        _origin(certificate, one),
        nothing_else(certificate, original, folder, pair.form, pair.written_form),
    ]
    checks += layers_again(pair)
    checks += recipe_again(pair, original, calibration, words=words)
    if INPUTS in certificate.files:
        inputs = read_inputs(folder / INPUTS)
        checks.append(layers_on_text(pair, inputs))
        if text is not None:
            checks.append(inputs_of_text(inputs, original, one, text))
    checks += _only_stated(certificate, words)
    return [*checks, *models_again(certificate, original, folder, one, text)]


def _tool() -> str:
    return f"triptych {version('triptych')}"


def _not_tried(certificate: Certificate, reason: str) -> Iterator[Claim]:
    yield stated("all that the original tells", reason)
    yield from not_compared(certificate, reason)


def _only_stated(certificate: Certificate, words: bool) -> Iterator[Claim]:
    """Entries of a certificate that neither checkpoint can confirm."""
    yield stated("tool", shown(certificate.tool))
    yield stated("source, as it was named", shown(certificate.source))
    if not words:
        yield stated("checked, choice, notes of steps", f"another version wrote them, this is {_tool()}")
    if certificate.not_compared:
        yield stated("not_compared", shown(certificate.not_compared))
    if certificate.not_on_text:
        yield stated("not_on_text", shown(certificate.not_on_text))
    if (found := certificate.end_to_end) is not None:
        yield stated("what ran whole models, and on what", f"{shown(found.by)}, {shown(found.text)}")


def _origin(certificate: Certificate, source: AttentionSource) -> Claim:
    dtype = str(source.read(source.sites[0]).weights.dtype).removeprefix("torch.")
    wrong = [
        f"{name} is {shown(said)}, and the original's is {found}"
        for name, said, found in (
            ("family", certificate.family, source.written_as),
            ("dtype", certificate.dtype, dtype),
        )
        if said != found
    ]
    return listed("family and dtype", wrong, f"{source.written_as}, {dtype}")


def _require_calibration(certificate: Certificate, original: Path | None, calibration: Path) -> None:
    """Check that a text is the calibration text of the certificate."""
    if original is None:
        raise UsageError("--calibrate needs the original: give it with --against")
    if certificate.calibration is None:
        raise UsageError(f"{calibration}: no step used a text: leave out --calibrate")
    if certificate.calibration != file_hash(calibration):
        raise UsageError(
            f"{calibration} is not the calibration text, whose sha256 is "
            f"{shown(certificate.calibration)[:16]}…"
        )


def _require_text(certificate: Certificate, text: Path) -> None:
    """Check that a text is the one that both models were compared on."""
    found = certificate.end_to_end
    if found is None:
        raise UsageError(
            f"{text}: no whole models were compared ({certificate.not_compared}): leave out --text"
        )
    if on_random_tokens(found):
        raise UsageError(f"{text}: the models were compared on random tokens: leave out --text")
    if found.text_sha256 is not None and found.text_sha256 != file_hash(text):
        raise UsageError(
            f"{text} is another text than both models were compared on: that was {shown(found.text)}, with "
            f"sha256 {shown(found.text_sha256)[:16]}…"
        )


def _as_hard(probes: Probes) -> bool:
    """Whether layers were tried on no less than they would be now."""
    return probes.seed == PROBES.seed and probes.count >= PROBES.count and probes.length >= PROBES.length
