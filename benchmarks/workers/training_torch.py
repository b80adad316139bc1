"""torch.nn.Transformer, with the embeddings, positions and tied output that it leaves to its user."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workers import training
from benchmarks.workers.protocol import Options, serve
from benchmarks.workers.training import D_FF, D_MODEL, DROPOUT, NUM_HEADS, NUM_LAYERS, LogitsLearner, Text
from triptych.training.corpora.pair_batches import Batch

_LONGEST = 1024


class Translator(nn.Module):
    """As the paper has it; no dropout inside attention and feed-forward, as in the other contenders."""

    def __init__(self, vocab_size: int, pad_id: int) -> None:
        super().__init__()
        self.pad_id = pad_id
        self.embedding = nn.Embedding(vocab_size, D_MODEL)
        nn.init.normal_(self.embedding.weight, std=D_MODEL**-0.5)
        self.dropout = nn.Dropout(DROPOUT)
        self.transformer = nn.Transformer(
            D_MODEL, NUM_HEADS, NUM_LAYERS, NUM_LAYERS, D_FF, DROPOUT, batch_first=True
        )
        # The constructor would end each stack with a norm after the layers' own, which the paper has not.
        self.transformer.encoder.norm = self.transformer.decoder.norm = None
        for layer in (*self.transformer.encoder.layers, *self.transformer.decoder.layers):
            layer.dropout.p = 0.0  # inside the feed-forward
            for module in layer.modules():
                if isinstance(module, nn.MultiheadAttention):
                    module.dropout = 0.0
        self.register_buffer("positions", _sinusoids(), persistent=False)
        self.register_buffer("future", torch.ones(_LONGEST, _LONGEST).triu(1).bool(), persistent=False)

    positions: Tensor
    future: Tensor

    def forward(self, src: Tensor, tgt_in: Tensor) -> Tensor:
        """Logits at every target position; hidden is what a mask has True."""
        is_padding, length = src == self.pad_id, tgt_in.shape[1]
        x = self.transformer(
            self.embed(src),
            self.embed(tgt_in),
            tgt_mask=self.future[:length, :length],
            src_key_padding_mask=is_padding,
            memory_key_padding_mask=is_padding,
            tgt_is_causal=True,
        )
        return F.linear(x, self.embedding.weight)

    def embed(self, ids: Tensor) -> Tensor:
        """Scaled embeddings with positions."""
        x = self.embedding(ids) * math.sqrt(D_MODEL) + self.positions[: ids.shape[1]]
        return self.dropout(x)


def _sinusoids() -> Tensor:
    rates = torch.exp(torch.arange(0, D_MODEL, 2) * (-math.log(10_000.0) / D_MODEL))
    angles = torch.arange(_LONGEST)[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def build(options: Options, text: Text) -> LogitsLearner:
    """The model."""

    def logits(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch.src, batch.tgt_in)

    return LogitsLearner(Translator(text.vocab_size, text.pad_id), logits, options, text)


if __name__ == "__main__":
    serve(lambda options: training.prepare(options, build))
