"""Original and rewritten model compared as wholes, and what of that an exact rewrite may do."""

import math
from pathlib import Path
from typing import NamedTuple

import torch

from triptych.checkpoints.layer import AttentionSource
from triptych.errors import DataError, TriptychError
from triptych.files import file_hash
from triptych.rewriting.calibration import MOST_TOKENS
from triptych.rewriting.certificate import RANDOM_TOKENS, EndToEnd
from triptych.rewriting.measuring import PROBES
from triptych.rewriting.rounding import changed_parameters, first_moved, judge
from triptych.rewriting.running import (
    Compared,
    RunnableModel,
    Window,
    can_run,
    compared,
    first_line,
    open_model,
)

# Models up to this size are run, original and rewritten, without being asked for: both are held in float32.
_LARGEST_COMPARED = 2_000_000_000


class FailedRewriteError(TriptychError):
    """A rewritten model is farther from the original than what was done to it allows."""


class Opened(NamedTuple):
    """A model, and what it is to be run on."""

    model: RunnableModel
    windows: list[Window]


def why_not_by_itself(folder: Path) -> str:
    """Why a model is not run on random tokens without being asked for; "" if it is."""
    if reason := can_run(folder):
        return reason
    size = sum(path.stat().st_size for path in folder.glob("*.*") if path.is_file())
    if size > _LARGEST_COMPARED:
        return f"it has {size / 1e9:.1f} GB; --text FILE compares them nevertheless"
    return ""


def open_original(folder: Path, text: Path | None) -> Opened | str:
    """The original on a text or on random tokens; why not, if it cannot be run on those.

    Raises:
        TriptychError: it cannot be run on the text.
    """
    try:
        model = open_model(folder)
        if text is not None:
            return Opened(model, list(model.windows(text, MOST_TOKENS)))
        windows = list(model.random_windows(PROBES.seed))
        model.outputs(windows[0])
        return Opened(model, windows)
    # The original may be of a kind that takes no tokens: pictures, speech.
    except Exception as error:
        reason = f"the original cannot be run: {first_line(error)}"
        if text is None:
            return reason
        if isinstance(error, TriptychError):
            raise
        raise DataError(f"{folder}: {reason}") from error


def compare_models(
    original: Opened,
    source: AttentionSource,
    written: Path,
    text: Path | None,
    stored: torch.dtype | None,
) -> EndToEnd:
    """What the original and the rewritten model put out.

    Args:
        original: the first model.
        source: its checkpoint.
        written: the folder of the second model.
        text: that the windows are of; None for random tokens.
        stored: if all that was done is exact, the coarsest dtype of what it changed.

    Raises:
        FailedRewriteError: they are farther apart than the tier allows.
    """
    other = open_model(written)
    found = compared(original.model, other, iter(original.windows))
    if not math.isfinite(found.worst_logit):
        raise FailedRewriteError(f"{source.name}: the rewritten model outputs numbers that are not finite")
    if stored is not None and (reason := why_no_rounding(found, original.model, other, source, stored)):
        raise FailedRewriteError(
            f"{source.name}: every step is exact, yet {reason}; nothing is written. "
            f"Is the checkpoint what its family says, {source.written_as} ({source.known_by})?"
        )
    return EndToEnd(
        by=original.model.by,
        text=RANDOM_TOKENS if text is None else text.name,
        text_sha256=None if text is None else file_hash(text),
        tokens=found.tokens,
        worst_logit=found.worst_logit,
        divergence_nats=found.divergence_nats,
        loss_before_nats=found.loss_before_nats,
        loss_after_nats=found.loss_after_nats,
    )


def why_no_rounding(
    found: Compared,
    original: RunnableModel,
    rewritten: RunnableModel,
    source: AttentionSource,
    stored: torch.dtype,
) -> str:
    """Why the difference of two models is more than rounding, with the layer that moves first; "" if not.

    Args:
        found: both compared.
        original: the first model.
        rewritten: the second.
        source: the original's checkpoint.
        stored: the coarsest dtype of what was changed.
    """
    verdict = judge(found, rewritten, changed_parameters(original, rewritten), stored)
    if verdict.is_rounding:
        return ""
    first = first_moved(original, rewritten, source, found.farthest[0], stored)
    return (
        f"logits differ by up to {verdict.moved:.3g}, and rounding moves them by {verdict.by_rounding:.3g}; "
        f"{f'attention of {first} moves first' if first else 'no attention layer moves before them'}"
    )
