"""Hugging Face's GPT-2, in a loop such as its users write.

Options: `precision` ("fp32", "bf16 autocast"), `attention`, `optimizer` ("fused", "foreach"), `compiled`.
"""

from contextlib import nullcontext
from typing import final

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.workers import training_lm
from benchmarks.workers.protocol import Options, serve
from benchmarks.workers.training_lm import BETAS, CLIP_NORM, LEARNING_RATE, Learner, decay_groups


@final
class Hugging(Learner):
    """Logits by the model, torch's cross-entropy, AdamW."""

    def __init__(self, options: Options) -> None:
        settings: Options = {
            "vocab_size": options["vocab_size"],
            "n_positions": options["context"],
            "n_embd": options["d_model"],
            "n_layer": options["num_layers"],
            "n_head": options["num_heads"],
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "use_cache": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "attn_implementation": options["attention"],
        }
        self.model = GPT2LMHeadModel(GPT2Config(**settings)).train()
        self.num_parameters = sum(p.numel() for p in self.model.parameters())
        self.called = torch.compile(self.model) if options.get("compiled") else self.model
        fused = options["optimizer"] == "fused"
        self.optimizer = torch.optim.AdamW(
            decay_groups(self.model),
            lr=LEARNING_RATE,
            betas=BETAS,
            fused=fused,
            foreach=None if fused else True,
        )
        self.autocast = options["precision"] == "bf16 autocast"

    def step(self, ids: Tensor, targets: Tensor) -> float:
        """Forward, backward, clipping, AdamW."""
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext():
            logits = self.called(input_ids=ids).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        return float(loss.detach())


if __name__ == "__main__":
    serve(lambda options: training_lm.prepare(options, Hugging))
