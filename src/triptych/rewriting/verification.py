"""Verification of the claims of a certificate."""

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.core.checkpoints.family import Family, read_family
from triptych.core.checkpoints.source import WITH_ADAPTERS, find_source
from triptych.core.checkpoints.stored_layers import AttentionSource
from triptych.core.storage import (
    CERTIFICATE,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    Tensors,
    is_own,
    open_tensors,
    tensor_hash,
)
from triptych.core.storage import SUFFIX as GGUF
from triptych.errors import DataError, TriptychError, UsageError, first_line
from triptych.files import file_hash
from triptych.rewriting.calibration import MOST_TOKENS
from triptych.rewriting.certificate import (
    MODEL_CARD,
    RANDOM_TOKENS,
    Certificate,
    EndToEnd,
    card,
    former_card,
    read_certificate,
)
from triptych.rewriting.checking import (
    CheckpointPair,
    Claim,
    are_close,
    as_claim,
    as_stated,
    check_inputs,
    check_layers,
    check_layers_on_text,
    check_recipe,
    format_figure,
)
from triptych.rewriting.folder_formats import Format
from triptych.rewriting.inputs import INPUTS, read_inputs
from triptych.rewriting.measuring import PROBES
from triptych.rewriting.on_text import Deviations, compare_outputs
from triptych.rewriting.planning import local_folder
from triptych.rewriting.rounding import coarsest_changed
from triptych.rewriting.whole_models import why_not_rounding
from triptych.running.opening import open_text_reader, read_whole_text, why_not_run
from triptych.untrusted import (
    LONGEST_TEXT,
    read_json,
    read_limited,
    shown,
    stays_in_folder,
)


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
        family: a family file for the two checkpoints.
        calibration: the calibration text of the rewrite. The steps that used it are repeated.

    Raises:
        DataError: the certificate was changed after it was written, or a text is not UTF-8.
        UsageError: the certificate is missing; `text` is given without an original, does not exist, or is not
            the text that the models were compared on; the original cannot be run on it; the same for
            `calibration`.
    """
    folder = Path(folder)
    text = None if text is None else Path(text)
    calibration = None if calibration is None else Path(calibration)
    family = read_family(family) if isinstance(family, str | Path) else family
    for given in (text, calibration):
        if given is not None:
            read_whole_text(given)
    certificate = read_certificate(folder)
    # Keep the source alive until the end: it may own a temporary folder.
    found = None if against is None else find_source(str(against))
    named = Path(certificate.source)
    if found is None and (named.is_dir() or (named.is_file() and named.suffix == GGUF)):
        found = find_source(certificate.source)
    original = None if found is None else local_folder(found)
    if text is not None:
        if original is None:
            raise UsageError("--text needs the original: give it with --against")
        _require_text(certificate, text)
    if calibration is not None:
        _require_calibration(certificate, original, calibration)
    folder = folder.parent if folder.is_file() else folder
    probes = certificate.probes
    if (
        probes.seed != PROBES.seed
        or probes.count < PROBES.count
        or probes.length < PROBES.length
    ):
        raise DataError(
            f"{folder}: its probes are {probes}, and layers are tried on {PROBES} at least"
        )
    checks = [
        Claim(
            "the certificate is as it was written",
            True,
            f"sha256 {certificate.sha256[:16]}…",
        )
    ]
    checks.append(check_files(certificate, folder))
    checks.append(
        check_hashes(certificate, open_tensors(folder), "written", "tensors as written")
    )
    if original is None:
        how = "give the original with --against"
        if WITH_ADAPTERS in certificate.source:
            how += ": the merged model, which load(base, adapter=…).save(FOLDER) writes"
        return [*checks, *_claims_not_tried(certificate, how)]
    checks.append(
        check_hashes(
            certificate, open_tensors(original), "read", f"tensors of {original}"
        )
    )
    # Further checks are meaningless on changed files.
    if not all(check.held for check in checks):
        return [
            *checks,
            *_claims_not_tried(
                certificate, "these are other files than those certified"
            ),
        ]
    one = open_checkpoint(original, family)
    other = open_checkpoint(folder, family)
    pair = CheckpointPair(certificate, one, other, folder)
    words = certificate.tool == _tool()
    checks += [
        _check_origin(certificate, one),
        check_nothing_else(certificate, original, folder, pair.form, pair.written_form),
    ]
    checks += check_layers(pair)
    checks += check_recipe(pair, original, calibration, words=words)
    if INPUTS in certificate.files:
        inputs = read_inputs(folder / INPUTS)
        checks.append(check_layers_on_text(pair, inputs))
        if text is not None:
            checks.append(check_inputs(inputs, original, one, text))
    checks += _unchecked_claims(certificate, words)
    return [*checks, *check_models(certificate, original, folder, one, text)]


def _tool() -> str:
    return f"triptych {version('triptych')}"


def _claims_not_tried(certificate: Certificate, reason: str) -> Iterator[Claim]:
    yield as_stated("all that the original tells", reason)
    yield from claim_not_compared(certificate, reason)


def _unchecked_claims(certificate: Certificate, words: bool) -> Iterator[Claim]:
    """Yield the entries of a certificate beyond confirmation by checkpoints."""
    yield as_stated("tool", shown(certificate.tool))
    yield as_stated("source, as it was named", shown(certificate.source))
    if not words:
        yield as_stated(
            "checked, choice, notes of steps",
            f"another version wrote them, this is {_tool()}",
        )
    if certificate.not_compared:
        yield as_stated("not_compared", shown(certificate.not_compared))
    if certificate.not_on_text:
        yield as_stated("not_on_text", shown(certificate.not_on_text))
    if (found := certificate.end_to_end) is not None:
        yield as_stated(
            "what ran whole models, and on what",
            f"{shown(found.by)}, {shown(found.text)}",
        )


def _check_origin(certificate: Certificate, source: AttentionSource) -> Claim:
    dtype = str(source.read(source.sites[0]).weights.dtype).removeprefix("torch.")
    wrong = [
        f"{name} is {shown(said)}, and the original's is {found}"
        for name, said, found in (
            ("family", certificate.family, source.written_as),
            ("dtype", certificate.dtype, dtype),
        )
        if said != found
    ]
    return as_claim("family and dtype", wrong, f"{source.written_as}, {dtype}")


def _require_calibration(
    certificate: Certificate, original: Path | None, calibration: Path
) -> None:
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
    """Check that a text is the text of the comparison of both models."""
    found = certificate.end_to_end
    if found is None:
        raise UsageError(
            f"{text}: no whole models were compared ({certificate.not_compared}): leave out --text"
        )
    if on_random_tokens(found):
        raise UsageError(
            f"{text}: the models were compared on random tokens: leave out --text"
        )
    if found.text_sha256 is not None and found.text_sha256 != file_hash(text):
        raise UsageError(
            f"{text} is another text than both models were compared on: that was {shown(found.text)}, with "
            f"sha256 {shown(found.text_sha256)[:16]}…"
        )


def check_files(certificate: Certificate, folder: Path) -> Claim:
    """Check the hashes of all files except tensors, and the section of the model card."""
    wrong = []
    for name, wanted in certificate.files.items():
        path = folder / name
        if not stays_in_folder(name) or not is_own(folder, path):
            wrong.append(f"{shown(name)} leads out of the folder")
        elif not path.is_file():
            wrong.append(f"{shown(name)} is missing")
        elif file_hash(path) != wanted:
            wrong.append(f"{shown(name)} was changed")
    known = {*certificate.files, CERTIFICATE, MODEL_CARD, *_files_of_tensors(folder)}
    wrong += [
        f"{shown(name)} is not in the certificate"
        for path in sorted(folder.rglob("*"))  # does not follow linked folders
        if (path.is_symlink() or not path.is_dir())
        and (name := path.relative_to(folder).as_posix()) not in known
    ]
    readme = folder / MODEL_CARD
    text = (
        read_limited(readme, LONGEST_TEXT).decode(errors="replace")
        if readme.is_file()
        else ""
    )
    sections = (card(certificate), former_card(certificate))
    if not any(section.strip() in text for section in sections):
        wrong.append(f"{MODEL_CARD} does not say what the certificate does")
    return as_claim("other files as written", wrong, f"{len(certificate.files)} files")


def _files_of_tensors(folder: Path) -> set[str]:
    """Return the names of the tensor files of a folder."""
    if (folder / SAFETENSORS).is_file() or not (folder / SAFETENSORS_INDEX).is_file():
        return {SAFETENSORS}
    named = read_json(folder / SAFETENSORS_INDEX).get("weight_map")
    return {str(name) for name in named.values()} if isinstance(named, dict) else set()


def check_hashes(
    certificate: Certificate, tensors: Tensors, which: str, claim: str
) -> Claim:
    """Check the hashes of all tensors, as `read` or `written`."""
    wanted = {
        name: found
        for name, record in certificate.tensors.items()
        if (found := getattr(record, which)) is not None
    }
    wrong = [f"{name} is missing" for name in wanted if name not in tensors.infos]
    wrong += [
        f"{name} is not in the certificate"
        for name in tensors.infos
        if name not in wanted
    ]
    for name in wanted:
        if name in tensors.infos and tensor_hash(tensors.read(name)) != wanted[name]:
            wrong.append(f"{name} was changed")
    return as_claim(claim, wrong, f"{len(wanted)} tensors")


def check_nothing_else(
    certificate: Certificate,
    original: Path,
    folder: Path,
    source: Format,
    written: Format,
) -> Claim:
    """Check that only the measured layers and the listed settings changed."""
    named = [layer.module for layer in certificate.layers]
    sites = source.source.sites
    wrong = [
        f"{site.module} is not in the certificate"
        for site in sites
        if site.module not in named
    ]
    wrong += [
        f"{module} is in the certificate twice"
        for module in set(named)
        if named.count(module) > 1
    ]
    wrong += source.differences(certificate, original, folder, written.source)
    measured = sum(layer.measured is not None for layer in certificate.layers)
    return as_claim(
        "nothing else has changed", wrong, f"{measured} layers were changed"
    )


# Whole models run in float32. A loss and a divergence are means over tokens, so the rounding of another
# machine's kernels cancels; the largest difference of a logit is a single value, where it does not. For exact
# rewrites the difference is rounding itself: only its magnitude can be compared.
_SAME_LOSS_NATS = 1e-4
_SAME_DIVERGENCE = 1e-3
_DIVERGENCE_NATS = 1e-7
_SAME_LOGIT = 1e-3
_LOGIT = 1e-3
_SAME_LOGIT_IF_EXACT = 0.5
_LOGIT_IF_EXACT = 1e-4
_WHOLE_MODELS = "whole models compared"


def on_random_tokens(certified: EndToEnd) -> bool:
    """Return True if the models were compared on reproducible random tokens."""
    return certified.text == RANDOM_TOKENS and certified.text_sha256 is None


def claim_not_compared(certificate: Certificate, reason: str) -> Iterator[Claim]:
    """Yield the unchecked claims about whole models."""
    if certificate.end_to_end is not None:
        yield Claim(_WHOLE_MODELS, None, f"not tried again: {reason}")


def check_models(
    certificate: Certificate,
    original: Path,
    folder: Path,
    source: AttentionSource,
    text: Path | None,
) -> Iterator[Claim]:
    """Run both models again on random tokens or on the text; otherwise give the reason."""
    certified = certificate.end_to_end
    if certified is None:
        return
    if text is None and not on_random_tokens(certified):
        yield from claim_not_compared(
            certificate, f"give the text, {shown(certified.text)}, with --text"
        )
        return
    if text is None and (reason := why_not_run(original)):
        yield from claim_not_compared(certificate, reason)
        return
    try:
        one = open_text_reader(original)
    except TriptychError as error:
        if text is not None:
            raise
        yield from claim_not_compared(certificate, str(error))
        return
    try:
        windows = (
            one.random_windows(certificate.probes.seed)
            if text is None
            else one.windows(text, MOST_TOKENS)
        )
        other = open_text_reader(folder)
        found = compare_outputs(one, other, windows)
    except (TriptychError, RuntimeError, ValueError, LookupError, TypeError) as error:
        yield Claim(_WHOLE_MODELS, False, first_line(error))
        return
    # Exact rewrites must also stay within rounding.
    exact = certificate.tier != "bounded"
    wrong = list(_model_differences(certified, found, exact=exact))
    if exact:
        stored = coarsest_changed(certificate.tensors, open_tensors(folder))
        if reason := why_not_rounding(found, one, other, source, stored):
            wrong.insert(0, reason)
    said = f"{found.tokens:,} tokens, logits within {found.worst_logit:.3g}, "
    if found.output in ("tokens", "classes"):
        said += f"{found.divergence_nats:.3g} nats"
    else:
        said += f"{found.output} moved by {found.relative:.3g} of their size"
    if found.loss_before_nats is not None and found.loss_after_nats is not None:
        said += f", loss {found.loss_before_nats:.4f} → {found.loss_after_nats:.4f}"
    yield as_claim(_WHOLE_MODELS, wrong, said)


def _model_differences(
    certified: EndToEnd, found: Deviations, *, exact: bool
) -> Iterator[str]:
    """Yield the figures of whole models that differ from the certificate."""
    if certified.tokens != found.tokens:
        yield f"{found.tokens:,} tokens, certified {certified.tokens:,}"
    relative, absolute = (
        (_SAME_LOGIT_IF_EXACT, _LOGIT_IF_EXACT) if exact else (_SAME_LOGIT, _LOGIT)
    )
    # Certificates of earlier versions have a divergence for every output.
    divergence = None if certified.divergence_nats is None else found.divergence_nats
    moved = None if certified.relative is None else found.relative
    for name, wanted, got, share, most in (
        ("logits", certified.worst_logit, found.worst_logit, relative, absolute),
        (
            "divergence",
            certified.divergence_nats,
            divergence,
            _SAME_DIVERGENCE,
            _DIVERGENCE_NATS,
        ),
        ("relative change", certified.relative, moved, relative, absolute),
        (
            "loss before",
            certified.loss_before_nats,
            found.loss_before_nats,
            0.0,
            _SAME_LOSS_NATS,
        ),
        (
            "loss after",
            certified.loss_after_nats,
            found.loss_after_nats,
            0.0,
            _SAME_LOSS_NATS,
        ),
    ):
        if not are_close(wanted, got, share, most):
            yield f"{name} {format_figure(got)}, certified {format_figure(wanted)}"
