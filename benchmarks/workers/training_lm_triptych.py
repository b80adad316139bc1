"""Ours: the Trainer's own step on a language model of GPT-2's structure."""

import tempfile
from pathlib import Path
from typing import final

import numpy as np
from torch import Tensor

from benchmarks.workers import training_lm
from benchmarks.workers.protocol import Options, serve
from benchmarks.workers.training_lm import BETAS, CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY, Learner
from triptych.cli.process import keep_freed_memory, limit_kernel_cache
from triptych.core.models import LanguageModel, LanguageModelConfig
from triptych.training import Trainer
from triptych.training.corpora.packing import LanguageBatch
from triptych.training.objectives import LanguageObjective
from triptych.training.sections import LanguageTrainingConfig
from triptych.training.state import Counters


@final
class _NoText:
    """One row: the batches come from the driver."""

    num_target_tokens = 1

    def plan(self, epoch: int) -> list[np.ndarray]:
        return [np.array([0])]

    def collate(self, indices: np.ndarray) -> LanguageBatch:
        raise NotImplementedError


@final
class TrainerLearner(Learner):
    """A `Trainer` that is handed its batches; `step` is the one place that knows its inside."""

    def __init__(self, options: Options) -> None:
        config = LanguageModelConfig.model_validate(
            {
                **{name: options[name] for name in ("d_model", "num_layers", "num_heads", "context")},
                "activation": "gelu_tanh",
                "positions": {"scheme": "learned", "max_tokens": options["context"]},
                "attention": {"q_bias": True, "k_bias": True, "v_bias": True, "o_bias": True},
            }
        )
        model = LanguageModel.of(config, "decoder", options["vocab_size"])
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.folder = tempfile.TemporaryDirectory()  # the Trainer wants one; a step writes nothing
        self.trainer = Trainer(
            config=LanguageTrainingConfig(
                max_steps=1_000_000,
                learning_rate=LEARNING_RATE,
                warmup_steps=1,
                schedule="wsd",
                weight_decay=WEIGHT_DECAY,
                adam_beta1=BETAS[0],
                adam_beta2=BETAS[1],
                clip_norm=CLIP_NORM,
                precision=options["precision"],
            ),
            validate_every=1000,
            objective=LanguageObjective(model, _NoText(), _NoText(), bytes_per_token=1.0),
            folder=Path(self.folder.name),
            counters=Counters(),
        )
        self.trainer.computing.set_mode(training=True)

    def step(self, ids: Tensor, targets: Tensor) -> float:
        """The Trainer's."""
        total, tokens = self.trainer._update([LanguageBatch(ids, targets, None, targets.numel())])
        return total / tokens


if __name__ == "__main__":
    limit_kernel_cache()  # as `triptych train` does before it begins
    keep_freed_memory()
    serve(lambda options: training_lm.prepare(options, TrainerLearner))
