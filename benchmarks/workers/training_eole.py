"""eole: its encoder-decoder built from its own configuration classes, with its own training step's loss."""

import pyonmttok
import torch
from eole.config.models import TransformerModelConfig
from eole.config.training import TrainingConfig
from eole.models.model import EncoderDecoderModel
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workers import training
from benchmarks.workers.protocol import Options, serve
from benchmarks.workers.training import (
    D_FF,
    D_MODEL,
    DROPOUT,
    LABEL_SMOOTHING,
    NUM_HEADS,
    NUM_LAYERS,
    LogitsLearner,
    Text,
)
from triptych.training.corpora.pair_batches import Batch


def build(options: Options, text: Text) -> LogitsLearner:
    """The model as `eole train` makes it; it has pre-norm layers alone."""
    config = TransformerModelConfig(
        hidden_size=D_MODEL,
        layers=NUM_LAYERS,
        heads=NUM_HEADS,
        transformer_ff=D_FF,
        embeddings={"word_vec_size": D_MODEL, "position_encoding_type": "SinusoidalInterleaved"},
        share_embeddings=True,
        share_decoder_embeddings=True,
        generator_bias=False,
        add_qkvbias=True,
        add_ffnbias=True,
    )
    running = TrainingConfig(
        dropout=[DROPOUT],
        attention_dropout=[0.0],
        param_init_method="xavier_uniform",
        world_size=1,
        gpu_ranks=[],
    )
    model = EncoderDecoderModel.for_training(config, _vocabularies(text), running, device_id=-1)

    def logits(model: nn.Module, batch: Batch) -> Tensor:
        # It cuts the last token off itself.
        tgt = torch.cat([batch.tgt_in, batch.tgt_out[:, -1:]], dim=1)
        out, _, _ = model(batch.src, tgt, (batch.src != text.pad_id).sum(1))
        return generator(model)(out)

    def generator(model: nn.Module) -> nn.Module:
        return model.generator  # type: ignore[return-value]

    def loss(found: Tensor, targets: Tensor) -> Tensor:
        # As its LossCompute: in float32, summed.
        return F.cross_entropy(
            found.flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=text.pad_id,
            reduction="sum",
            label_smoothing=LABEL_SMOOTHING,
        )

    return LogitsLearner(model, logits, options, text, loss)


def _vocabularies(text: Text) -> dict[str, object]:
    """Names for our ids: only the special ones mean something to it."""
    special = {text.pad_id: "<blank>", text.bos_id: "<s>", text.eos_id: "</s>"}
    tokens = [special.get(i, f"t{i}") for i in range(text.vocab_size - 1)] + ["<unk>"]
    vocabulary = pyonmttok.build_vocab_from_tokens(tokens)
    names = {"pad_token": "<blank>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return {"src": vocabulary, "tgt": vocabulary, "specials": names, "decoder_start_token": "<s>"}


if __name__ == "__main__":
    serve(lambda options: training.prepare(options, build))
