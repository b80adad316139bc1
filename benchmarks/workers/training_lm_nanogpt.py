"""nanoGPT's model and optimizer, from a checkout, in the order of its `train.py`.

Options: `checkout`, `precision` ("fp32", "bf16 autocast"), `compiled`.
"""

import sys
from contextlib import nullcontext
from typing import final

import torch
from torch import Tensor

from benchmarks.workers import training_lm
from benchmarks.workers.protocol import Options, serve
from benchmarks.workers.training_lm import BETAS, CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY, Learner


@final
class NanoGPT(Learner):
    """Its `GPT` gives the loss, its `configure_optimizers` AdamW."""

    def __init__(self, options: Options) -> None:
        sys.path.insert(0, options["checkout"])
        from model import GPT, GPTConfig

        config = GPTConfig(
            block_size=options["context"],
            vocab_size=options["vocab_size"],
            n_layer=options["num_layers"],
            n_head=options["num_heads"],
            n_embd=options["d_model"],
            dropout=0.0,
            bias=True,
        )
        self.model = GPT(config).train()
        self.num_parameters = sum(p.numel() for p in self.model.parameters())
        self.optimizer = self.model.configure_optimizers(WEIGHT_DECAY, LEARNING_RATE, BETAS, "cpu")
        self.called = torch.compile(self.model) if options.get("compiled") else self.model
        self.autocast = options["precision"] == "bf16 autocast"

    def step(self, ids: Tensor, targets: Tensor) -> float:
        """Forward, backward, clipping, AdamW; gradients are freed after the step."""
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext():
            _, loss = self.called(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


if __name__ == "__main__":
    serve(lambda options: training_lm.prepare(options, NanoGPT))
