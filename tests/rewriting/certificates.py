"""Certificates changed and sealed anew, and the claims that fail where they are verified."""

from pathlib import Path
from typing import Any

from triptych.core.storage.copying import CERTIFICATE
from triptych.rewriting.certificate import MODEL_CARD, Certificate, LayerRecord, card
from triptych.rewriting.verification import Claim, verify


def seal(folder: Path, certificate: Certificate) -> None:
    """Write a certificate with a seal that fits it, and the card that it makes."""
    sealed = certificate.sealed()
    (folder / CERTIFICATE).write_bytes(sealed.as_json())
    (folder / MODEL_CARD).write_text(card(sealed), encoding="utf-8")


def failures(folder: Path, source: Path | None = None, **given: Any) -> list[Claim]:
    """The claims that do not hold."""
    return [claim for claim in verify(folder, source, **given) if claim.held is False]


def failing(folder: Path, source: Path | None = None, **given: Any) -> list[str]:
    """The names of the claims that do not hold."""
    return [claim.claim for claim in failures(folder, source, **given)]


def with_bounds(layer: LayerRecord, times: float) -> LayerRecord:
    """A layer whose steps have other bounds."""
    steps = tuple(step.model_copy(update={"bound": times * step.bound}) for step in layer.steps)
    return layer.model_copy(update={"steps": steps})
