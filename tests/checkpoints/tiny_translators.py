"""Folders with tiny encoder-decoders of `transformers` and a tokenizer of 40 words."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from checkpoints.runs import made

WORDS = ("<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(4, 38)), "de_DE", "en_XX")


def translator_folder(folder: Path, model: str, **said: Any) -> Any:
    """Write a checkpoint; the model of `transformers`.

    Args:
        folder: to be made.
        model: a name of `RUNS`.
        said: see `write_tokenizer`.
    """
    other = made(model, folder)
    write_tokenizer(folder, **said)
    return other


def write_tokenizer(
    folder: Path,
    *,
    around: Sequence[str] = ("<s>", "$A", "</s>"),
    tokenizer_class: str = "PreTrainedTokenizerFast",
    **generation: Any,
) -> None:
    """Write a tokenizer beside a model, and how the model is to be searched.

    Args:
        folder: of the model.
        around: what the tokenizer puts around a text.
        tokenizer_class: in `tokenizer_config.json`.
        generation: fields of `generation_config.json`.
    """
    special = ["<pad>", "<s>", "</s>", "<unk>", "de_DE", "en_XX"]
    pieces = [(word if word in special else f"▁{word}", 0.0) for word in WORDS]
    inner = Tokenizer(models.Unigram(pieces, WORDS.index("<unk>")))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    inner.add_special_tokens(special)
    tokens = [(word, WORDS.index(word)) for word in around if word != "$A"]
    inner.post_processor = processors.TemplateProcessing(single=[*around], special_tokens=tokens)
    inner.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": tokenizer_class, "pad_token": "<pad>", "bos_token": "<s>"}
    settings |= {"eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    record = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, **generation}
    (folder / "generation_config.json").write_text(json.dumps(record))
