"""`triptych new`."""

from pathlib import Path
from typing import Annotated

import triptych
from triptych.cli.failures import say
from triptych.cli.signatures import Options
from triptych.cli.terminal import training_display


def new(
    recipe: Path,
    *,
    making: Annotated[
        Options, "Options", triptych.new_recipe, "source target tsv text"
    ],
    force: bool = False,
) -> None:
    """Write a recipe that fits a text of your own.

    The sizes follow from the amount of text and from this machine. Every key has a comment. Without a
    validation text, a part of the text is held out.

    Options:
        recipe: The recipe to write: NAME.toml. Its run folder is then runs/NAME.
        force: Replace an existing file.

    Examples:
        triptych new mine.toml --source train.de --target train.en
        triptych new words.toml --text train.txt
    """
    triptych.new_recipe(recipe, **making, force=force, display=training_display())
    say(f"written: {recipe}. Train it: triptych train {recipe}")
