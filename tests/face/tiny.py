"""Tiny models of every kind, with random numbers and a token for every byte: they can be run on text."""

from pathlib import Path
from typing import Any

import torch

from checkpoints.tiny_marian import write_marian
from checkpoints.tiny_models import TINY
from small_checkpoints import byte_tokenizer
from triptych import train
from triptych.training import resolve
from triptych.training.progress import LineDisplay

_PAD, _END, _SIZE = 256, 257, 258
# The class with an output of tokens, where that of the tiny models has none.
_CLASS = {"bert": "BertForMaskedLM", "albert": "AlbertForMaskedLM"}
_TASKS = {
    "run of an encoder-decoder": "translation",
    "run of a language model": "language-model",
    "run of an encoder": "masked-language-model",
}
_SIZES = {"d_model": 16, "num_heads": 4, "d_ff": 16}


def write_checkpoint(name: str, folder: Path, **settings: Any) -> Any:
    """Save a tiny model in Hugging Face's format; the model of `transformers`."""
    import transformers  # heavy, and only needed here

    if name == "marian":  # its tokenizers are files of SentencePiece
        folder.mkdir()
        torch.manual_seed(0)
        write_marian(folder, dtype=torch.float32, max_position_embeddings=64)
        return transformers.MarianMTModel.from_pretrained(folder).eval()
    tiny = TINY[name]
    ids = {"vocab_size": _SIZE, "pad_token_id": _PAD, "bos_token_id": None, "eos_token_id": _END}
    ids |= {"decoder_start_token_id": _PAD} if name == "t5" else {}
    torch.manual_seed(0)
    config = tiny.config(**{**tiny.settings, **ids, **settings})
    # Falcon's "eager" adds the bias of ALiBi twice (transformers 5.23).
    config._attn_implementation = "sdpa" if name.startswith("falcon") else "eager"
    model = getattr(transformers, _CLASS.get(name, tiny.model))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<end>"}
    byte_tokenizer(folder, "<pad>", "<end>", end="<end>" if name == "t5" else "", **names)
    return model


def write_run(kind: str, folder: Path) -> None:
    """Train one step of a recipe."""
    task, text = _TASKS[kind], folder.parent / "text.txt"
    text.write_text("two young men are playing\ntwo old women are sitting\n" * 20)
    stacks: dict[str, Any] = {"num_layers": 2, "context": 32}
    data: dict[str, Any] = {"train": {"files": [str(text)], "documents": "line"}}
    batches = {"batch_size": 4}
    if task == "translation":
        stacks = {"preset": "tiny", "encoder": {"num_layers": 2}, "decoder": {"num_layers": 2}}
        data = {name: {"generated": 40, "generated_part": name} for name in ("train", "valid")}
        batches = {"batch_tokens": 400}
    tree = {
        "task": task,
        "data": {**data, "cache": str(folder.parent / "cache")},
        "tokenizer": {"vocab_size": 300},
        "model": {**_SIZES, **stacks},
        "training": {"max_steps": 1, "warmup_steps": 1, "learning_rate": 0.01, "threads": 1, **batches},
    }
    train(resolve(tree), folder, LineDisplay())
