"""Hugging Face's MarianMT: `generate` as the checkpoint's own generation_config has it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import MarianMTModel

from benchmarks.workers import decoding
from benchmarks.workers.decoding import Batched, Output, TranslateBatch
from benchmarks.workers.pieces import Pieces
from benchmarks.workers.protocol import Options, serve


def load(options: Options) -> TranslateBatch:
    """The model in its precision, on its threads."""
    torch.set_num_threads(options["threads"])
    folder = Path(options["checkpoint"])
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options["precision"]]
    model = MarianMTModel.from_pretrained(
        folder, dtype=dtype, attn_implementation=options["attention"]
    ).eval()
    return translate_with(model, Pieces(folder))


def translate_with(model: Any, pieces: Pieces) -> TranslateBatch:
    """`generate` of a model, on its device."""
    pad_id, eos_id = model.config.pad_token_id, model.config.eos_token_id

    @torch.inference_mode()
    def translate(lines: Sequence[str], beam: int) -> list[Output]:
        rows = [torch.tensor(pieces.encode(line)) for line in lines]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)
        ids = ids.to(model.device)
        found = model.generate(
            input_ids=ids, attention_mask=(ids != pad_id).long(), num_beams=beam, do_sample=False
        )
        outputs = []
        for row in found[:, 1:].tolist():  # all begin with the decoder's start token
            made = row[: row.index(eos_id)] if eos_id in row else [i for i in row if i != pad_id]
            outputs.append(Output(pieces.join([pieces.names[i] for i in made]), len(made) + (eos_id in row)))
        return outputs

    return translate


if __name__ == "__main__":
    serve(
        lambda options: decoding.prepare(options, lambda o: Batched("benchmarks.workers.decoding_marian", o))
    )
