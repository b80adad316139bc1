"""`triptych distil`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import triptych
from triptych.cli.failures import say
from triptych.cli.options import (
    load_model,
    number_of_workers,
    translating_engine,
)
from triptych.cli.process import prepare_training
from triptych.cli.signatures import Options
from triptych.cli.terminal import print_json, progress_bar, training_display
from triptych.cli.train import report_training
from triptych.launch import speaks
from triptych.model import Model, load
from triptych.training import read_recipe, require_translation
from triptych.training.folder import holds_run


def distil(
    teacher: str,
    recipe: str,
    *,
    out: Path,
    overrides: Sequence[str] = (),
    train: bool = True,
    translating: Annotated[
        Options,
        "Teacher",
        Model.distil,
        "beam_size alpha num_best interpolate originals teacher_weight",
    ],
    workers: int | None = None,
    opening: Annotated[
        Options,
        "Teacher",
        load,
        "device engine precision languages offline strict adapter shortlist ensemble",
    ],
    as_json: bool = False,
) -> None:
    """Train a small translator on what a teacher translates.

    The teacher translates the recipe's training text into OUT/train.jsonl. OUT/student.toml is the recipe
    that trains on it, and OUT/student its run. The same command continues after an interruption. Processes of
    torchrun share the work.

    Teacher:
        workers: Number of processes that translate in parallel, one thread each. Default: the cores. CPU
            only.

    Options:
        teacher: A translator: a run folder, a folder in Hugging Face's format, or a name on the Hub.
        recipe: The student's recipe: a TOML file or the name of a built-in recipe.
        out: The folder to create.
        overrides: Override a recipe key: section.key=value. May be repeated.
        train: Train the student; otherwise only write its text and its recipe.

    Examples:
        triptych distil runs/mine mine.toml --out distilled --beam 2 --no-train
        triptych distil runs/mine mine.toml --out distilled --beam 2
    """
    prepare_training()
    display = training_display()
    read = require_translation(read_recipe(recipe, overrides), recipe)
    with progress_bar("{task.description}", "translating", of_bytes=False) as tell:
        found = load_model(teacher, opening=translating_engine(opening, {})).distil(
            read,
            out,
            **translating,
            workers=number_of_workers(workers),
            display=display,
            progress=tell,
        )
    if speaks():
        say(
            f"{found.recipe}: {found.pairs:,} pairs of {found.sentences:,} sentences; the teacher's BLEU on "
            f"them is {found.bleu:.2f}"
        )
        if found.num_at_limit:
            say(
                f"{found.num_at_limit:,} sentences are left out: their translations were cut off at the "
                "limit (decoding.max_extra_tokens of the teacher's recipe)"
            )
    if train:
        student = out / "student"
        summary = (
            triptych.resume(student, (), display)
            if holds_run(student)
            else triptych.train(found.recipe, student, display)
        )
        report_training(summary, student, as_json=as_json)
    elif as_json and speaks():
        print_json(
            {
                "recipe": str(found.recipe),
                "pairs": found.pairs,
                "teacher_bleu": found.bleu,
            }
        )
