"""A tiny Marian checkpoint with random weights, and Marian's formulas written out once more."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoints.tiny_spm import PIECES, spm

VOCAB = {
    piece: token
    for token, piece in enumerate(
        ["</s>", "<unk>", *(text for text, _, own in PIECES if own == "normal"), ">>de<<", "<pad>"]
    )
}
PAD = VOCAB["<pad>"]
CONFIG: dict[str, Any] = {
    "architectures": ["MarianMTModel"],
    "model_type": "marian",
    "d_model": 12,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 10,
    "decoder_ffn_dim": 10,
    "vocab_size": len(VOCAB),
    "decoder_vocab_size": len(VOCAB),
    "max_position_embeddings": 20,
    "activation_function": "swish",
    "pad_token_id": PAD,
    "eos_token_id": 0,
    "decoder_start_token_id": PAD,
    "scale_embedding": True,
    "share_encoder_decoder_embeddings": True,
    "tie_word_embeddings": True,
    "dropout": 0.2,
    "transformers_version": "5.23.0",
}


def tensors_of(config: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Random weights under the names that `save_pretrained` writes for this configuration."""
    d_model = config["d_model"]
    source_rows, target_rows = config["vocab_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    if config["share_encoder_decoder_embeddings"]:
        shapes["model.shared.weight"] = (source_rows, d_model)
    else:
        target_rows = config["decoder_vocab_size"]
        shapes["model.encoder.embed_tokens.weight"] = (source_rows, d_model)
        shapes["model.decoder.embed_tokens.weight"] = (target_rows, d_model)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (target_rows, d_model)
    shapes["final_logits_bias"] = (1, target_rows)
    for stack, attentions in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "encoder_attn"])):
        d_ff = config[f"{stack}_ffn_dim"]
        for i in range(config[f"{stack}_layers"]):
            layer = f"model.{stack}.layers.{i}"
            for attention in attentions:
                for proj in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    shapes[f"{layer}.{attention}.{proj}.weight"] = (d_model, d_model)
                    shapes[f"{layer}.{attention}.{proj}.bias"] = (d_model,)
            for norm in (*(f"{attention}_layer_norm" for attention in attentions), "final_layer_norm"):
                shapes[f"{layer}.{norm}.weight"] = shapes[f"{layer}.{norm}.bias"] = (d_model,)
            shapes[f"{layer}.fc1.weight"], shapes[f"{layer}.fc1.bias"] = (d_ff, d_model), (d_ff,)
            shapes[f"{layer}.fc2.weight"], shapes[f"{layer}.fc2.bias"] = (d_model, d_ff), (d_model,)
    return {name: 0.4 * torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}


def write_marian(
    folder: Path, tensors: dict[str, Tensor] | None = None, dtype: torch.dtype = torch.float64, **changes: Any
) -> dict[str, Tensor]:
    """Write a checkpoint with some of `CONFIG` changed; a field that is None is left out."""
    config = {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}
    if tensors is None:
        tensors = tensors_of({**CONFIG, **changes}, dtype)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        json.dumps({"bad_words_ids": [[PAD]], "num_beams": 3, "max_length": 30})
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "pad_token": {"content": "<pad>"}, "separate_vocabs": False})
    )
    (folder / "vocab.json").write_text(json.dumps(VOCAB))
    for name in ("source.spm", "target.spm"):
        (folder / name).write_bytes(spm(PIECES, "unigram"))
    save_file(tensors, folder / "model.safetensors")
    return tensors


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "swish": lambda x: x / (1 + torch.exp(-x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


class Reference:
    """Marian's forward pass for one pair of sentences, in the plainest torch."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.config, self.tensors = config, tensors

    def logits(self, src: list[int], tgt_in: list[int]) -> Tensor:
        shared, tied = (self.config["share_encoder_decoder_embeddings"], self.config["tie_word_embeddings"])
        source = self.tensors["model.shared.weight" if shared else "model.encoder.embed_tokens.weight"]
        target = self.tensors["model.shared.weight" if shared else "model.decoder.embed_tokens.weight"]
        x = self.embed(source, src)
        for i in range(self.config["encoder_layers"]):
            name = f"model.encoder.layers.{i}"
            x = self.norm(
                f"{name}.self_attn_layer_norm", x + self.attend(f"{name}.self_attn", x, x, "encoder")
            )
            x = self.norm(f"{name}.final_layer_norm", x + self.feed_forward(name, x))
        y = self.embed(target, tgt_in)
        for i in range(self.config["decoder_layers"]):
            name = f"model.decoder.layers.{i}"
            own = self.attend(f"{name}.self_attn", y, y, "decoder", causal=True)
            y = self.norm(f"{name}.self_attn_layer_norm", y + own)
            cross = self.attend(f"{name}.encoder_attn", y, x, "decoder")
            y = self.norm(f"{name}.encoder_attn_layer_norm", y + cross)
            y = self.norm(f"{name}.final_layer_norm", y + self.feed_forward(name, y))
        output = target if tied else self.tensors["lm_head.weight"]
        return y @ output.T + self.tensors["final_logits_bias"][0]

    def embed(self, table: Tensor, ids: list[int]) -> Tensor:
        d_model = self.config["d_model"]
        half, scale = (d_model + 1) // 2, math.sqrt(d_model) if self.config["scale_embedding"] else 1.0
        rows = []
        for position, token in enumerate(ids):
            channels = [
                math.sin(position / 10_000 ** (2 * i / d_model))
                if i < half
                else math.cos(position / 10_000 ** (2 * (i - half) / d_model))
                for i in range(d_model)
            ]
            rows.append(table[token] * scale + torch.tensor(channels, dtype=table.dtype))
        return torch.stack(rows)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors[f"{name}.bias"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        activation = ACTIVATIONS[self.config["activation_function"]]
        return self.linear(f"{name}.fc2", activation(self.linear(f"{name}.fc1", x)))

    def attend(self, name: str, x: Tensor, memory: Tensor, stack: str, causal: bool = False) -> Tensor:
        num_heads = self.config[f"{stack}_attention_heads"]
        width = self.config["d_model"] // num_heads
        q, k, v = (
            self.linear(f"{name}.{proj}_proj", of) for proj, of in (("q", x), ("k", memory), ("v", memory))
        )
        heads = []
        for h in range(num_heads):
            own = slice(h * width, (h + 1) * width)
            scores = q[:, own] @ k[:, own].T / math.sqrt(width)
            if causal:
                scores = scores + torch.full_like(scores, -torch.inf).triu(1)
            heads.append(scores.softmax(-1) @ v[:, own])
        return self.linear(f"{name}.out_proj", torch.cat(heads, dim=-1))
