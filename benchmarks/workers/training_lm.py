"""What the workers of the table of language models share: batches of a text's bytes, whole steps.

A request is `{"steps": N}`; the answer has seconds, tokens and the loss of the last step. All contenders see
the same windows of the same text in the same order; what comes of it differs by their fresh weights.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

from benchmarks.workers.protocol import Answer, Options, Prepared

# nanoGPT's own settings for a text of this size.
LEARNING_RATE, WEIGHT_DECAY, BETAS, CLIP_NORM = 1e-3, 0.1, (0.9, 0.99), 1.0
_WARM_UP_STEPS = 5


class Learner(ABC):
    """A contender's model, and how it takes a step."""

    num_parameters: int

    @abstractmethod
    def step(self, ids: Tensor, targets: Tensor) -> float:
        """One update from `[batch, context]` tokens and those that follow each; the loss a token."""


@final
class Windows:
    """Windows at random places of a text, the same for everybody."""

    def __init__(self, options: Options) -> None:
        text = np.frombuffer(Path(options["text"]).read_bytes(), dtype=np.uint8)
        known = np.unique(text)
        self.ids = np.searchsorted(known, text).astype(np.int64)
        self.draw = np.random.default_rng(1)
        self.batch, self.context = options["batch"], options["context"]

    def next(self) -> tuple[Tensor, Tensor]:
        """Tokens, and those that follow."""
        starts = self.draw.integers(len(self.ids) - self.context - 1, size=self.batch)
        rows = torch.from_numpy(np.stack([self.ids[i : i + self.context + 1] for i in starts]))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def decay_groups(model: torch.nn.Module) -> list[dict[str, object]]:
    """Matrices decay, all else does not; as nanoGPT has it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def prepare(options: Options, build: Callable[[Options], Learner]) -> Prepared:
    """Build the learner, warm it up."""
    torch.set_num_threads(options["threads"])
    torch.manual_seed(1)
    windows = Windows(options)
    started = time.perf_counter()
    learner = build(options)
    for _ in range(_WARM_UP_STEPS):
        learner.step(*windows.next())
    about = {
        "parameters": learner.num_parameters,
        "prepared_seconds": round(time.perf_counter() - started, 2),
    }

    def work(request: Options) -> Answer:
        loss = 0.0
        started = time.perf_counter()
        for _ in range(request["steps"]):
            loss = learner.step(*windows.next())
        seconds = time.perf_counter() - started
        return {
            "seconds": seconds,
            "tokens": request["steps"] * windows.batch * windows.context,
            "loss": loss,
        }

    return about, work
