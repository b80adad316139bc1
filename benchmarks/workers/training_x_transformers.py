"""x-transformers: an encoder, and a decoder that attends to it, as wide and deep as the others."""

from torch import Tensor, nn
from x_transformers import Decoder, Encoder, TransformerWrapper

from benchmarks.workers import training
from benchmarks.workers.protocol import Options, serve
from benchmarks.workers.training import D_FF, D_MODEL, DROPOUT, NUM_HEADS, NUM_LAYERS, LogitsLearner, Text
from triptych.training.corpora.pair_batches import Batch

_LONGEST = 512


class Translator(nn.Module):
    """Post-norm, ReLU, sinusoidal positions, one table of embeddings for all three places.

    With bfloat16 weights it fails: where there is a padding mask, its attention gives float32.
    """

    def __init__(self, vocab_size: int, pad_id: int, *, flash: bool) -> None:
        super().__init__()
        self.pad_id = pad_id
        stack = {
            "dim": D_MODEL,
            "depth": NUM_LAYERS,
            "heads": NUM_HEADS,
            "attn_dim_head": D_MODEL // NUM_HEADS,
            "attn_flash": flash,
            "ff_mult": D_FF / D_MODEL,
            "ff_relu_squared": False,
            "ff_custom_activation": nn.ReLU(),
            "ff_sublayer_dropout": DROPOUT,
            "attn_sublayer_dropout": DROPOUT,
            "pre_norm": False,
        }
        wrapped = {
            "num_tokens": vocab_size,
            "max_seq_len": _LONGEST,
            "scaled_sinu_pos_emb": True,
            "emb_dropout": DROPOUT,
        }
        self.encoder = TransformerWrapper(**wrapped, attn_layers=Encoder(**stack), return_only_embed=True)
        self.decoder = TransformerWrapper(
            **wrapped,
            attn_layers=Decoder(**stack, cross_attend=True),
            token_emb=self.encoder.token_emb,
            tie_embedding=True,
        )

    def forward(self, src: Tensor, tgt_in: Tensor) -> Tensor:
        """Logits at every target position."""
        mask = src != self.pad_id
        memory = self.encoder(src, mask=mask, return_embeddings=True)
        return self.decoder(tgt_in, context=memory, context_mask=mask)


def build(options: Options, text: Text) -> LogitsLearner:
    """The model, with attention as the setting says."""
    model = Translator(text.vocab_size, text.pad_id, flash=options["attention"] == "flash")

    def logits(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch.src, batch.tgt_in)

    return LogitsLearner(model, logits, options, text)


if __name__ == "__main__":
    serve(lambda options: training.prepare(options, build))
