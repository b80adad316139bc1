"""Rewrites of an opened model, with its changes: plan, rewrite and check against `transformers`."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from triptych.core.storage import CERTIFICATE
from triptych.progress import Progress
from triptych.rewriting.against_transformers import Check as Check
from triptych.rewriting.against_transformers import (
    check_against_transformers,
)
from triptych.rewriting.certificate import Certificate, read_certificate
from triptych.rewriting.planning import Plan as Plan
from triptych.rewriting.planning import (
    plan_rewrite,
)
from triptych.rewriting.recipe import to_recipe
from triptych.rewriting.saving import files_of
from triptych.rewriting.saving import save as save
from triptych.rewriting.whole_checkpoint import rewrite_checkpoint as rewrite_checkpoint
from triptych.running.opened_source import Opened


def certificate_of(opened: Opened) -> Certificate | None:
    """Return the certificate in the files of a rewritten model; None for other and for changed models."""
    if opened.source.module is not None or opened.changes:
        return None
    path = opened.files.file(CERTIFICATE)
    return None if path is None else read_certificate(path)


def plan_opened(
    opened: Opened,
    steps: Sequence[Any],
    calibration: str | Path | None,
    *,
    layers: Sequence[int] | None,
    skip_refused: bool,
) -> Plan:
    """Plan a rewrite of a model."""
    recipe = to_recipe(steps, calibration, layers=layers, skip_refused=skip_refused)
    with files_of(opened) as source:
        return plan_rewrite(source, recipe)


def rewrite_opened(
    opened: Opened,
    steps: Sequence[Any],
    out: str | Path | None,
    calibration: str | Path | None,
    *,
    layers: Sequence[int] | None,
    skip_refused: bool,
    text: str | Path | None,
    compare: bool,
    progress: Progress | None,
) -> tuple[Opened, Certificate]:
    """Rewrite a model into a folder (default: a temporary folder), and open the folder."""
    temporary = Path(mkdtemp(prefix="triptych-")) if out is None else None
    name = str(out) if temporary is None else f"{opened.name}, rewritten"
    target = Path(name) if temporary is None else temporary / "rewritten"
    try:
        with files_of(opened) as source:
            certificate = rewrite_checkpoint(
                source,
                target,
                to_recipe(steps, calibration, layers=layers, skip_refused=skip_refused),
                text=None if text is None else Path(text),
                compare=compare,
                progress=progress,
            )
            files = source.at(target)
        files.name = name
        if temporary is None:
            files.where = str(target / "config.json")
    except BaseException:  # an interruption too leaves no folder behind
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Opened(files, opened.options, temporary=temporary), certificate


def check_opened(opened: Opened, text: str | None, target: str | None) -> Check:
    """Compare a model with its class in `transformers`."""
    with files_of(opened) as source:
        return check_against_transformers(source, text, target)
