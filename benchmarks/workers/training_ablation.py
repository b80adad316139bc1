"""Ours with one lever off: `{"off": LEVER}`, or "nothing"; "torch.compile on" is one that we leave off.

A lever is put out of action where it is, so that the product needs no switch for it.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.workers import training
from benchmarks.workers.protocol import Options, Prepared, serve
from benchmarks.workers.training import Text
from benchmarks.workers.training_triptych import TrainerLearner
from triptych import thresholds
from triptych.cli.process import keep_freed_memory, limit_kernel_cache
from triptych.training import objectives
from triptych.training.computing import Whole
from triptych.training.corpora.pair_batches import Batch
from triptych.training.losses import Loss
from triptych.training.machine import compile_blocks

MEMORY = "freed memory kept"
BUCKETS = "batches of like length"
_SHUFFLED_WITH = 0


def _no_twin(learner: TrainerLearner) -> None:
    """Autocast instead: every weight is rounded anew at every use, what norms and sums give is float32."""
    computing = Whole(learner.trainer.objective, "fp32")
    loss: Any = computing._loss

    def under_autocast(*given: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(*given)

    computing._loss = under_autocast  # type: ignore[assignment]
    computing.set_mode(training=True)
    learner.trainer.computing = computing


def _plain_loss(learner: TrainerLearner) -> None:
    """All logits at once, in float32, and torch's cross-entropy."""

    def loss(x: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float) -> Loss:
        logits = F.linear(x, weight.to(x.dtype)).float()
        smoothed = F.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction="sum")
        return Loss(smoothed, smoothed.detach())

    vars(objectives)["output_loss"] = loss


def _one_kernel(learner: TrainerLearner) -> None:
    """torch's fused kernel at every length."""
    thresholds.MAX_KEYS_WRITTEN_OUT = {}
    thresholds.MAX_KEYS_WRITTEN_OUT_OTHERWISE = 0


def _plain_adam(learner: TrainerLearner) -> None:
    for part in learner.trainer.optimizer._parts:
        for group in part.param_groups:
            group["fused"], group["foreach"] = False, True


def _compiled(learner: TrainerLearner) -> None:
    compile_blocks(learner.trainer.objective.model.blocks, torch.device("cpu"))


# What takes a lever away from a learner; those of the process and of the text are handled elsewhere.
_LEVERS: dict[str, Callable[[TrainerLearner], None]] = {
    "bf16 twin (autocast instead)": _no_twin,
    "loss in chunks (all logits in float32)": _plain_loss,
    "attention by length (always fused)": _one_kernel,
    "fused Adam": _plain_adam,
    "torch.compile on": _compiled,
}
LEVERS = (*_LEVERS, MEMORY, BUCKETS)


def build(options: Options, text: Text) -> TrainerLearner:
    """Ours, without a lever."""
    learner = TrainerLearner(options, text)
    if options["off"] in _LEVERS:
        _LEVERS[options["off"]](learner)
    elif options["off"] == BUCKETS:
        text.train[:] = _dealt_at_random(text)
    return learner


def _dealt_at_random(text: Text) -> list[Batch]:
    """The same pairs in batches of the same budget, whatever their lengths."""
    pairs = [
        tuple(side[row][side[row] != text.pad_id] for side in (batch.src, batch.tgt_in, batch.tgt_out))
        for batch in text.train
        for row in range(len(batch.src))
    ]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(_SHUFFLED_WITH)).tolist()
    budget = max(max(batch.src.numel(), batch.tgt_in.numel()) for batch in text.train)
    batches: list[list[int]] = [[]]
    longest = 0
    for i in order:
        longer = max(longest, max(map(len, pairs[i])))
        if longer * (len(batches[-1]) + 1) > budget:
            batches.append([])
            longer = max(map(len, pairs[i]))
        batches[-1].append(i)
        longest = longer
    return [_padded([pairs[i] for i in batch], text.pad_id) for batch in batches]


def _padded(pairs: list[tuple[Tensor, ...]], pad_id: int) -> Batch:
    src, tgt_in, tgt_out = (
        torch.nn.utils.rnn.pad_sequence([pair[side] for pair in pairs], True, pad_id) for side in range(3)
    )
    numbers = tuple(itertools.islice(itertools.count(1), len(pairs)))
    return Batch(src, tgt_in, tgt_out, numbers, sum(len(pair[2]) for pair in pairs))


def _prepare(options: Options) -> Prepared:
    limit_kernel_cache()
    if options["off"] != MEMORY:
        keep_freed_memory()
    return training.prepare(options, build)


if __name__ == "__main__":
    serve(_prepare)
