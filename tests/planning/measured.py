"""One of several processes: `python measured.py KIND [OVERRIDE…]` prints the peak of its allocator."""

import gc
import sys
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from triptych.launch import end_now
from triptych.models.blocks import recompute_activations
from triptych.planning.standing_in import batches_of, filled, objective_of
from triptych.training import AnyRecipe, resolve
from triptych.training.optimizers import Optimizer
from triptych.training.parallel import Computing, OneProcess, World, launched, rows_of_rank


def recipe_of(overrides: list[str]) -> AnyRecipe:
    """Weights and activations of a few MB each: what is not a tensor of the step is small beside them."""
    tree = {
        "task": "language-model",
        "data": {"train": {"files": ["a"]}},
        "tokenizer": {"vocab_size": 4000},
        "model": {"num_layers": 4, "d_model": 256, "d_ff": 1024, "num_heads": 4, "context": 128},
        "training": {"batch_size": 16, "device": "cpu"},
    }
    return filled(resolve(tree, overrides))[0]


def main(kind: str, overrides: list[str]) -> int:
    """Three updates; the allocator's bytes at most during the last."""
    recipe = recipe_of(overrides)
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
    objective, batches = objective_of(recipe), batches_of(recipe)
    if config.activation_checkpointing:
        recompute_activations(objective.blocks(objective.model))
    computing: Computing
    if kind == "none":
        computing = OneProcess(objective, config.precision)
    else:
        from triptych.training.parallel.spreading import spread

        computing = spread(objective, kind, config.precision, world)  # type: ignore[arg-type]
    computing.set_mode(training=True)
    optimizer = Optimizer(config, objective.model)
    for step in (1, 2, 3):
        began = time.time_ns()
        optimizer.zero_grad()
        computing.begin_update(step)
        batch = batches.collate(rows_of_rank(batches.plan(0)[0], world.rank, world.size)[0])
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
    end_now(main(sys.argv[1], sys.argv[2:]))
