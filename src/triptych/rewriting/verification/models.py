"""Repeat the comparison of whole models."""

from collections.abc import Iterator
from pathlib import Path

from triptych.checkpoints.layer import AttentionSource
from triptych.errors import TriptychError
from triptych.opening import first_line, open_text_model, why_not_run
from triptych.rewriting.calibration import MOST_TOKENS
from triptych.rewriting.certificate import RANDOM_TOKENS, Certificate, EndToEnd
from triptych.rewriting.comparing import why_no_rounding
from triptych.rewriting.rounding import coarsest_changed
from triptych.rewriting.running import Compared, compared
from triptych.rewriting.verification.check import Claim, listed, near
from triptych.storage.tensors import open_tensors
from triptych.storage.untrusted import shown

# Whole models run in float32. A loss and a divergence are means over tokens, in which the rounding of another
# machine's kernels cancels; the largest difference of a logit is one number and does not. Where nothing but
# rounding moves, that difference is rounding itself: only its size can be held against.
_SAME_LOSS_NATS = 1e-4
_SAME_DIVERGENCE, _DIVERGENCE_NATS = 1e-3, 1e-7
_SAME_LOGIT, _LOGIT = 1e-3, 1e-3
_SAME_LOGIT_IF_EXACT, _LOGIT_IF_EXACT = 0.5, 1e-4
_WHOLE_MODELS = "whole models compared"


def on_random_tokens(certified: EndToEnd) -> bool:
    """Whether models were compared on tokens that can be drawn again."""
    return certified.text == RANDOM_TOKENS and certified.text_sha256 is None


def not_compared(certificate: Certificate, reason: str) -> Iterator[Claim]:
    """Claims about whole models that were not checked."""
    if certificate.end_to_end is not None:
        yield Claim(_WHOLE_MODELS, None, f"not tried again: {reason}")


def models_again(
    certificate: Certificate, original: Path, folder: Path, source: AttentionSource, text: Path | None
) -> Iterator[Claim]:
    """Run both models again, on random tokens or on the text; or say why not."""
    certified = certificate.end_to_end
    if certified is None:
        return
    if text is None and not on_random_tokens(certified):
        yield from not_compared(certificate, f"give the text, {shown(certified.text)}, with --text")
        return
    if text is None and (reason := why_not_run(original)):
        yield from not_compared(certificate, reason)
        return
    try:
        one = open_text_model(original)
    except TriptychError as error:
        if text is not None:
            raise
        yield from not_compared(certificate, str(error))
        return
    try:
        windows = (
            one.random_windows(certificate.probes.seed) if text is None else one.windows(text, MOST_TOKENS)
        )
        other = open_text_model(folder)
        found = compared(one, other, windows)
    except (TriptychError, RuntimeError, ValueError, LookupError, TypeError) as error:
        yield Claim(_WHOLE_MODELS, False, first_line(error))
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
    yield listed(_WHOLE_MODELS, wrong, said)


def _other_than(certified: EndToEnd, found: Compared, *, exact: bool) -> Iterator[str]:
    """Figures of whole models that differ from the certificate."""
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
        if not near(wanted, got, share, most):
            yield f"{name} {_number(got)}, certified {_number(wanted)}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"
