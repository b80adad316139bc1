"""Distillation: an opened model as the teacher of a recipe's student."""

from pathlib import Path
from typing import Any

from triptych.converting.engines import hash_of, make_translator
from triptych.converting.target_formats import require_recipe
from triptych.errors import UsageError
from triptych.processes import launched
from triptych.progress import Progress
from triptych.running.decoding import Translator
from triptych.running.opened_source import Opened
from triptych.training import Recipe, read_recipe, require_translation
from triptych.training.distilling import Distilled, distil_text
from triptych.training.progress import Display, LineDisplay


def distil(
    opened: Opened,
    recipe: Recipe | str | Path,
    out: Path,
    display: Display | None,
    progress: Progress,
    *,
    beam_size: int | None,
    alpha: float | None,
    num_best: int,
    interpolate: bool,
    originals: float,
    teacher_weight: float,
    workers: int,
) -> Distilled:
    """Translate a recipe's training text with a model, and write the recipe of a student."""
    if not isinstance(recipe, Recipe):
        recipe = require_translation(read_recipe(recipe), recipe)
    if teacher_weight:
        if opened.changes:
            raise UsageError(
                "teacher_weight needs a teacher without changes: save the changed model first"
            )
        require_recipe(opened.to_run)
    options = opened.options
    with (
        launched(options.device) as world,
        make_translator(
            opened.to_run,
            options,
            workers,
            beam_size=beam_size,
            alpha=alpha,
            num_best=num_best,
        ) as teacher,
    ):
        return distil_text(
            teacher,
            _identify(teacher, opened),
            recipe,
            out,
            world,
            display or LineDisplay(),
            progress,
            interpolate=interpolate,
            originals=originals,
            teacher_weight=teacher_weight,
            save_teacher=opened.to_run.save,
        )


def _identify(translator: Translator, opened: Opened) -> dict[str, Any]:
    """Return a fingerprint of a translator: weights, tokenizers and engine."""
    sides = translator.tokenizers.source, translator.tokenizers.target
    first, *others = (
        hash_of(model, [side.to_json() for side in sides])
        for model in translator.models
    )
    return {
        "name": opened.name,
        "sha256": first,
        "changes": [change.words for change in opened.changes],
        "engine": translator.engine,
        "precision": opened.options.precision,
    } | ({"ensemble": others} if others else {})
