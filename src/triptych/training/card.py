"""Model card of a run, `README.md`."""

import hashlib
from pathlib import Path

from triptych.core.models import LanguageModelConfig, ModelConfig
from triptych.files import write_text
from triptych.printable import printable
from triptych.training import AnyRecipe, TextRecipe, TrainingResult
from triptych.training.objectives import LEAST_BLEU
from triptych.training.progress import Display
from triptych.training.sections import ContinuedModelConfig
from triptych.untrusted import LONGEST_TEXT, read_limited

# Last line of a model card; it ends with the hash of the text before it.
_CARD_END = "\n<!-- Written by triptych; if you change this page, it is left as you wrote it. sha256 "


def write_card(
    folder: Path, recipe: AnyRecipe, outcome: TrainingResult, num_parameters: int, display: Display
) -> None:
    """Write the card of a finished run, unless the present card was changed by hand."""
    path = folder / "README.md"
    text = printable(_card_text(recipe, outcome, num_parameters), lines=True)
    if path.exists():
        old = read_limited(path, LONGEST_TEXT).decode(errors="replace")
        body, _, end = old.rpartition(_CARD_END)
        if not end.startswith(_text_hash(body)):
            display.say(f"{path} was changed by hand and is kept; metrics.jsonl has the new figures")
            return
    write_text(path, f"{text}{_CARD_END}{_text_hash(text)} -->\n")


def _text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _card_text(recipe: AnyRecipe, outcome: TrainingResult, num_parameters: int) -> str:
    counters = outcome.counters
    best = f"{abs(outcome.counters.best_score or 0.0):.4f}"
    if isinstance(recipe, TextRecipe):
        writes = recipe.task == "language-model"
        tokens = "tokens"
        tag, kind = ("text-generation", "decoder") if writes else ("fill-mask", "encoder")
        of_tokens = "the next token" if writes else f"masked tokens ({recipe.masking.share:.0%} of the text)"
        about = f"A Transformer {kind} that predicts {of_tokens}, trained"
        judged = f": {best} nats per token"
        use = f"sh\ntriptych {'generate' if writes else 'fill'} path/to/this/folder"
    else:
        about = "An encoder-decoder Transformer trained"
        tag = "translation"
        tokens = "target tokens"
        noise = recipe.validation.metric == "bleu" and counters.best_by == "loss"
        why = f" (BLEU decides once its 95 % interval lies above {LEAST_BLEU:g})" if noise else ""
        judged = f", chosen by {counters.best_by}{why}: {best}"
        load = 'load("path/to/this/folder").translate(["A sentence."])[0].text'
        use = f"python\nfrom triptych import load\n\n{load}"
    scores = ", ".join(f"{name} {value:.4f}" for name, value in (outcome.scores or {}).items())
    return f"""---
library_name: triptych
tags: [{tag}]
---

# {recipe.name}

{about} with triptych: {_made_of(recipe.model)},
{num_parameters:,} parameters.

- Training: {counters.step:,} steps, {counters.tokens:,} {tokens}, {counters.seconds / 60:.1f} minutes.
- Best validation{judged} at step {counters.best_step:,}.
- Average of the last checkpoints: {scores}. `model.safetensors` holds the {outcome.chosen} model.
- `recipe.toml` is the whole recipe; `metrics.jsonl` has the curves.

```{use}
```
"""


def _made_of(model: ModelConfig | LanguageModelConfig | ContinuedModelConfig) -> str:
    if isinstance(model, ModelConfig):
        return (
            f"d_model {model.d_model}, d_ff {model.d_ff},\n{model.num_heads} heads, "
            f"{model.encoder.num_layers}+{model.decoder.num_layers} layers, {model.norm}-norm"
        )
    if isinstance(model, ContinuedModelConfig):
        return f"begun as\n`{printable(model.checkpoint)}`, in its format, context {model.context}"
    return (
        f"{model.num_layers} layers, d_model\n{model.d_model}, {model.num_heads} heads, context "
        f"{model.context}, {model.norm}-norm ({model.norm_kind}),\n{model.positions.scheme} positions"
    )
