"""Comparison of original and rewritten model, and the difference allowed after an exact rewrite."""

import math
from pathlib import Path
from typing import NamedTuple

import torch

from triptych.core.algebra.forms import are_finite
from triptych.core.checkpoints.source import Source, find_source
from triptych.core.checkpoints.stored_layers import AttentionSource
from triptych.errors import TriptychError, first_line
from triptych.files import file_hash
from triptych.printable import printable
from triptych.rewriting.calibration import MOST_TOKENS
from triptych.rewriting.certificate import RANDOM_TOKENS, EndToEnd
from triptych.rewriting.measuring import PROBES
from triptych.rewriting.on_text import Deviations, compare_outputs
from triptych.rewriting.rounding import changed_parameters, first_moved, judge_rounding
from triptych.running.opening import (
    NotFiniteError,
    TextReader,
    Window,
    open_text_reader,
    require_finite_tensors,
    why_not_run,
)

# Models up to this size (bytes) are compared by default, in float32.
_LARGEST_COMPARED = 2_000_000_000


class FailedRewriteError(TriptychError):
    """A rewritten model differs more from the original than its steps allow."""


class Original(NamedTuple):
    """A model and the windows for its comparison."""

    model: TextReader
    windows: list[Window]


def why_not_compared(files: Source) -> str:
    """Return the reason against a default comparison on random tokens, or ""."""
    if reason := why_not_run(files):
        return reason
    size = sum(
        path.stat().st_size for path in files.folder.glob("*.*") if path.is_file()
    )
    if size > _LARGEST_COMPARED:
        return f"it has {size / 1e9:.1f} GB; --text FILE compares them nevertheless"
    return ""


def open_original(source: Source | Path, text: Path | None) -> Original | str:
    """Open the original with a text or random tokens; return the reason if it cannot run on random tokens."""
    try:
        model = open_text_reader(source)
        if text is not None:
            return Original(model, list(model.windows(text, MOST_TOKENS)))
        windows = list(model.random_windows(PROBES.seed))
        if not are_finite(model.outputs(windows[0])):
            files = find_source(source)
            require_finite_tensors(files)
            raise NotFiniteError(
                f"{files.name}: the model outputs numbers that are not finite (NaN or infinite)"
            )
        return Original(model, windows)
    except NotFiniteError:
        raise
    # Families without an implementation, and models without token inputs (images, speech). Any other error is
    # a bug of ours and must not be reported as a property of the model.
    except TriptychError as error:
        if text is not None:
            raise
        return f"the original cannot be run: {first_line(error)}"


def compare_models(
    original: Original,
    source: AttentionSource,
    written: Source,
    text: Path | None,
    stored: torch.dtype | None,
) -> EndToEnd:
    """Compare the outputs of the original and the rewritten model."""
    other = open_text_reader(written)
    found = compare_outputs(original.model, other, iter(original.windows))
    if not math.isfinite(found.worst_logit):
        raise FailedRewriteError(
            f"{source.name}: the rewritten model outputs numbers that are not finite"
        )
    # `stored` is given only if every step is exact.
    if stored is not None and (
        reason := why_not_rounding(found, original.model, other, source, stored)
    ):
        raise FailedRewriteError(
            f"{source.name}: every step is exact, yet {reason}; nothing is written. "
            f"Is the checkpoint what its family says, {source.written_as} ({source.known_by})?"
        )
    is_distribution = found.output in ("tokens", "classes")
    return EndToEnd(
        by=original.model.by,
        text=RANDOM_TOKENS if text is None else printable(text.name),
        text_sha256=None if text is None else file_hash(text),
        tokens=found.tokens,
        worst_logit=found.worst_logit,
        divergence_nats=found.divergence_nats if is_distribution else None,
        loss_before_nats=found.loss_before_nats,
        loss_after_nats=found.loss_after_nats,
        output=found.output,
        relative=None if is_distribution else found.relative,
        cosine=None if is_distribution else found.cosine,
    )


def why_not_rounding(
    found: Deviations,
    original: TextReader,
    rewritten: TextReader,
    source: AttentionSource,
    stored: torch.dtype,
) -> str:
    """Explain a difference beyond rounding, with the first layer affected; "" if rounding explains it."""
    verdict = judge_rounding(
        found, rewritten, changed_parameters(original, rewritten), stored
    )
    if verdict.is_rounding:
        return ""
    # Find the first layer only now: it takes further runs of both models.
    first = first_moved(original, rewritten, source, found.farthest[0], stored)
    return (
        f"logits differ by up to {verdict.moved:.3g}, and rounding moves them by {verdict.by_rounding:.3g}; "
        f"{f'attention of {first} moves first' if first else 'no attention layer moves before them'}"
    )
