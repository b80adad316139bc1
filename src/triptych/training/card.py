"""Model card of a run, `README.md`."""

import hashlib
from pathlib import Path
from typing import Any

from triptych.files import write_text
from triptych.printable import printable
from triptych.training.loop import TrainingResult
from triptych.training.progress import Display
from triptych.training.task import Task
from triptych.untrusted import LONGEST_TEXT, read_limited

# Last line of a model card; it ends with the hash of the text before it.
_CARD_END = "\n<!-- Written by triptych; if you change this page, it is left as you wrote it. sha256 "


def write_card(
    folder: Path,
    task: Task[Any],
    outcome: TrainingResult,
    num_parameters: int,
    display: Display,
) -> None:
    """Write the card of a finished run, unless the present card was changed by hand."""
    path = folder / "README.md"
    text = printable(_card_text(task, outcome, num_parameters), lines=True)
    if path.exists():
        old = read_limited(path, LONGEST_TEXT).decode(errors="replace")
        body, _, end = old.rpartition(_CARD_END)
        if not end.startswith(_text_hash(body)):
            display.say(
                f"{path} was changed by hand and is kept; metrics.jsonl has the new figures"
            )
            return
    write_text(path, f"{text}{_CARD_END}{_text_hash(text)} -->\n")


def _text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _card_text(task: Task[Any], outcome: TrainingResult, num_parameters: int) -> str:
    counters = outcome.counters
    words = task.card(outcome, f"{abs(counters.best_score or 0.0):.4f}")
    scores = ", ".join(
        f"{name} {value:.4f}" for name, value in (outcome.scores or {}).items()
    )
    return f"""---
library_name: triptych
tags: [{words.tag}]
---

# {task.recipe.name}

{words.about} with triptych: {words.model},
{num_parameters:,} parameters.

- Training: {counters.step:,} steps, {counters.tokens:,} {words.tokens}, {counters.seconds / 60:.1f} minutes.
- Best validation{words.judged} at step {counters.best_step:,}.
- Average of the last checkpoints: {scores}. `model.safetensors` holds the {outcome.chosen} model.
- `recipe.toml` is the whole recipe; `metrics.jsonl` has the curves.

```{words.use}
```
"""
