"""Ours: the Trainer's own step, on the preset `small` with the sizes of the table."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np

from benchmarks.workers import training
from benchmarks.workers.protocol import Options, serve
from benchmarks.workers.training import D_FF, DROPOUT, SCHEDULE, Learner, Text
from triptych.cli.process import keep_freed_memory, limit_kernel_cache
from triptych.core.models import PRESETS, EncoderDecoder, ModelConfig
from triptych.running.text import TokenSequences
from triptych.training import Trainer
from triptych.training.corpora.encoded import EncodedCorpus
from triptych.training.corpora.pair_batches import Batch, TokenBatches
from triptych.training.objectives import TranslationObjective
from triptych.training.sections import ValidationConfig
from triptych.training.state import Counters

CONFIG = PRESETS["small"].model_copy(update={"d_ff": D_FF, "norm": "post", "dropout": DROPOUT})


@final
class TrainerLearner(Learner):
    """A `Trainer` that is handed its batches; `_step` is the one place that knows its inside."""

    def __init__(self, options: Options, text: Text, config: ModelConfig = CONFIG) -> None:
        self.text = text
        self.model = EncoderDecoder.of(config, text.vocab_size, text.vocab_size, text.pad_id)
        self.model.to(options.get("device", "cpu"))
        self.folder = tempfile.TemporaryDirectory()  # the Trainer wants one; a step writes nothing
        self.trainer = Trainer(
            config=SCHEDULE.model_copy(
                update={"precision": options["precision"], "compile": options.get("compile", False)}
            ),
            validate_every=1000,
            objective=TranslationObjective(
                self.model, no_text(text), no_text(text), SCHEDULE, ValidationConfig(), score=None
            ),
            folder=Path(self.folder.name),
            counters=Counters(),
        )
        self.trainer.computing.set_mode(training=True)

    def step(self, batch: Batch) -> float:
        """The Trainer's."""
        total, tokens = self.trainer._update([batch])
        return total / tokens

    def valid_loss(self, batches: Sequence[Batch]) -> float:
        """Of the float32 weights."""
        return training.valid_loss(
            self.model, lambda model, batch: model(batch.src, batch.tgt_in), batches, self.text.pad_id
        )


def no_text(text: Text) -> TokenBatches:
    """One pair: the batches come from the driver."""
    ids = TokenSequences(np.array([3], dtype=np.int32), np.array([0, 1]))
    return TokenBatches(
        EncodedCorpus(ids, ids, np.array([1]), "none"),
        max_tokens=16,
        seed=0,
        pad_id=text.pad_id,
        bos_id=text.bos_id,
        eos_id=text.eos_id,
    )


if __name__ == "__main__":
    limit_kernel_cache()  # as `triptych train` does before it begins
    keep_freed_memory()
    serve(lambda options: training.prepare(options, TrainerLearner))
