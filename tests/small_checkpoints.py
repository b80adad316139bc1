"""Small checkpoints in others' formats, with random weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.errors import DataError

D, HEADS, WIDTH, LAYERS = 32, 4, 8, 3


def read_all(folder: Path) -> None:
    """Read every attention layer."""
    checkpoint = open_checkpoint(folder)
    for site in checkpoint.sites:
        checkpoint.read(site)


def with_words(folder: Path, count: int) -> None:
    """Write a tokenizer of the words w0, w1, …"""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(count)}, "w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def gpt2(
    folder: Path, changed: dict[str, Tensor] | None = None, config: dict[str, Any] | None = None
) -> Path:
    """A GPT-2, with tensors and settings changed; a setting of None is left out."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(3)
    tensors: dict[str, Tensor] = {"wte.weight": torch.randn(20, D), "wpe.weight": torch.randn(16, D)}
    for layer in range(LAYERS):
        at = f"h.{layer}"
        tensors |= {
            f"{at}.attn.c_attn.weight": torch.randn(D, 3 * D),
            f"{at}.attn.c_attn.bias": torch.randn(3 * D),
            f"{at}.attn.c_proj.weight": torch.randn(D, D),
            f"{at}.attn.c_proj.bias": torch.randn(D),
            f"{at}.ln_1.weight": torch.ones(D),
            f"{at}.ln_1.bias": torch.zeros(D),
            f"{at}.mlp.c_fc.weight": torch.randn(D, 4 * D),
        }
    save_file(tensors | (changed or {}), folder / "model.safetensors")
    settings = {"model_type": "gpt2", "n_embd": D, "n_head": HEADS, "n_layer": LAYERS, "n_positions": 16}
    settings |= config or {}
    settings = {name: value for name, value in settings.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def llama(folder: Path) -> Path:
    """A Llama: rotary, half as many heads of keys."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(4)
    tensors: dict[str, Tensor] = {}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, rows in (("q", D), ("k", D // 2), ("v", D // 2)):
            tensors[f"{at}.self_attn.{name}_proj.weight"] = torch.randn(rows, D)
        tensors[f"{at}.self_attn.o_proj.weight"] = torch.randn(D, D)
        tensors[f"{at}.input_layernorm.weight"] = torch.ones(D)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "hidden_size": D,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def gpt2_that_runs(folder: Path, layers: int = LAYERS, positions: int = 64) -> Path:
    """A GPT-2 of `transformers` with a tokenizer of bytes: it can be run on text."""
    import transformers  # heavy, and only needed here

    torch.manual_seed(5)
    size = byte_tokenizer(folder)
    sizes = {"n_embd": D, "n_head": HEADS, "n_layer": layers, "n_positions": positions}
    config = transformers.GPT2Config(vocab_size=size, **sizes)
    return save_changed(transformers.GPT2LMHeadModel(config), folder)


def save_changed(model: Any, folder: Path, share: float = 0.2) -> Path:
    """Save a model with random numbers added: what begins as 0 or 1 would hide what is done with it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(share * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def bert_that_runs(folder: Path) -> Path:
    """A BERT of `transformers` with a tokenizer of bytes: an encoder without a head."""
    import transformers

    torch.manual_seed(5)
    sizes = {
        "hidden_size": D,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 2 * D,
    }
    config = transformers.BertConfig(vocab_size=byte_tokenizer(folder), max_position_embeddings=64, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def byte_tokenizer(folder: Path, *special: str, end: str = "", **settings: str) -> int:
    """Write a tokenizer of bytes and special tokens, `end` behind every text; the number of its tokens."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.processors import TemplateProcessing

    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(letters, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = Decoder()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    if end:
        numbered = [(end, tokenizer.token_to_id(end))]
        tokenizer.post_processor = TemplateProcessing(single=["$A", end], special_tokens=numbered)  # type: ignore[assignment]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = settings or {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.get_vocab_size()


def cannot_be_run(*_: object) -> None:
    """Stands for `checkpoints.models.read_language_model`, of a family that is read and not run."""
    raise DataError("this family cannot be run")
