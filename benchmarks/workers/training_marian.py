"""Hugging Face's MarianMT, from a configuration of the table's sizes."""

import torch
from transformers import MarianConfig, MarianMTModel

from benchmarks.workers import training
from benchmarks.workers.protocol import Options, serve
from benchmarks.workers.training import D_FF, D_MODEL, DROPOUT, NUM_HEADS, NUM_LAYERS, LogitsLearner, Text
from triptych.training.corpora.pair_batches import Batch

_SIZES = {
    "d_model": D_MODEL,
    "encoder_layers": NUM_LAYERS,
    "decoder_layers": NUM_LAYERS,
    "encoder_attention_heads": NUM_HEADS,
    "decoder_attention_heads": NUM_HEADS,
    "encoder_ffn_dim": D_FF,
    "decoder_ffn_dim": D_FF,
}


def build(options: Options, text: Text) -> LogitsLearner:
    """The model, with attention as the setting says."""
    settings: Options = {
        "vocab_size": text.vocab_size,
        **options.get("sizes", _SIZES),
        "activation_function": "relu",
        "dropout": DROPOUT,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "scale_embedding": True,
        "max_position_embeddings": 512,
        "pad_token_id": text.pad_id,
        "eos_token_id": text.eos_id,
        "bos_token_id": text.bos_id,
        "decoder_start_token_id": text.bos_id,
        "forced_eos_token_id": None,
        "use_cache": False,
        "attn_implementation": options["attention"],
    }
    config = MarianConfig(**settings)

    def logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        mask = (batch.src != text.pad_id).long()
        found = model(input_ids=batch.src, attention_mask=mask, decoder_input_ids=batch.tgt_in)
        return found.logits

    return LogitsLearner(MarianMTModel(config), logits, options, text)


if __name__ == "__main__":
    serve(lambda options: training.prepare(options, build))
