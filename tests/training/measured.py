"""One of several processes: `python measured.py TREE KIND [OVERRIDE…]` prints the peak of its allocator."""

import gc
import sys
import time
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from triptych.core.models import EncoderDecoder, LanguageModel
from triptych.core.models.blocks import recompute_activations
from triptych.launch import end_now
from triptych.processes import World, launched
from triptych.running.text import TokenSequences
from triptych.training import AnyRecipe, Recipe, resolve
from triptych.training.computing import Computing, Whole, rows_of_rank
from triptych.training.corpora.encoded import EncodedCorpus
from triptych.training.corpora.packing import LanguageBatch
from triptych.training.corpora.pair_batches import TokenBatches
from triptych.training.device_plan import filled
from triptych.training.objectives import LanguageObjective, Objective, TranslationObjective
from triptych.training.optimizers import Optimizer

# Weights and activations of a few MB each: what is not a tensor of the step is small compared with them.
TREES: dict[str, Any] = {
    "language model": {
        "task": "language-model",
        "data": {"train": {"files": ["a"]}},
        "tokenizer": {"vocab_size": 4000},
        "model": {"num_layers": 4, "d_model": 256, "d_ff": 1024, "num_heads": 4, "context": 128},
        "training": {"batch_size": 16, "device": "cpu"},
    },
    "translator": {
        "data": {part: {"source": "a", "target": "b"} for part in ("train", "valid")},
        "model": {"preset": "tiny"},
        "tokenizer": {"vocab_size": 4000},
        "training": {"batch_tokens": 4096, "device": "cpu"},
    },
}


def recipe_of(tree: str, overrides: list[str]) -> AnyRecipe:
    return filled(resolve(TREES[tree], overrides))[0]


def objective_of(recipe: AnyRecipe) -> Objective[Any, Any]:
    """What the recipe learns, without a text."""
    size = recipe.tokenizer.vocab_size  # type: ignore[union-attr]
    if isinstance(recipe, Recipe):
        model = EncoderDecoder.of(recipe.model, size, size, 0)
        return TranslationObjective(model, None, None, recipe.training, recipe.validation, None)  # type: ignore[arg-type]
    return LanguageObjective(LanguageModel.of(recipe.model, recipe.kind, size), None, None, 1.0)  # type: ignore[arg-type]


def batch_of(recipe: AnyRecipe, world: World) -> Any:
    """This process's part of a batch of the recipe's size."""
    if isinstance(recipe, Recipe):
        pairs = recipe.training.batch_tokens // 32
        side = TokenSequences.pack([[3] * 31] * pairs)
        corpus = EncodedCorpus(side, side, np.arange(1, pairs + 1), "made up")
        ids = {"pad_id": 0, "bos_id": 1, "eos_id": 2}
        batches = TokenBatches(corpus, max_tokens=recipe.training.batch_tokens, seed=0, shuffle=False, **ids)
        return batches.collate(rows_of_rank(batches.plan(0)[0], world.rank, world.size)[0])
    rows = len(rows_of_rank(np.arange(recipe.training.batch_size), world.rank, world.size)[0])
    tokens = torch.zeros(rows, recipe.model.context, dtype=torch.int64)
    return LanguageBatch(tokens, tokens, torch.zeros_like(tokens), tokens.numel())


def main(tree: str, kind: str, overrides: list[str]) -> int:
    """Three updates; the allocator's bytes at most during the last."""
    recipe = recipe_of(tree, overrides)
    with (
        launched("cpu", 5.0) as world,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen,
    ):
        began = _learn(recipe, kind, world)
        gc.collect()
        torch.empty(1)
    held = _held(seen, began)
    # The profiler does not see what gloo's threads free. At the end only those bytes are left.
    print(f"peak {max(held) - min(held)} rank {world.rank}, unseen {min(held)}")
    return 0


def _learn(recipe: AnyRecipe, kind: str, world: World) -> int:
    """Three updates of a model that then is gone; when the last began."""
    config = recipe.training
    objective = objective_of(recipe)
    if config.activation_checkpointing:
        recompute_activations(objective.model.blocks)
    computing: Computing
    if kind in ("none", "ddp"):
        computing = Whole(objective, config.precision, world)
    else:
        from triptych.training.distributed import spread

        computing = spread(objective, kind, config.precision, world)  # type: ignore[arg-type]
    computing.set_mode(training=True)
    optimizer = Optimizer(config, objective.model)
    for step in (1, 2, 3):
        began = time.time_ns()
        optimizer.zero_grad()
        computing.begin_update(step)
        batch = batch_of(recipe, world)
        computing.learn(batch, step, batch.num_target_tokens * world.size, last=True)
        computing.clip(1.0)
        optimizer.step(1e-3)
        computing.follow()
    return began


def _held(seen: Any, since: int) -> list[int]:
    """Bytes that torch's allocator of the CPU has given out, after each of its calls, in their order."""
    found, left = [], list(seen.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left += event.children
        if event.tag.name == "Allocation" and event.start_time_ns >= since:
            found.append((event.start_time_ns, event.extra_fields.total_allocated))
    return [held for _, held in sorted(found)]


if __name__ == "__main__":
    torch.manual_seed(0)
    end_now(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
