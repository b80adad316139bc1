"""Pairs of models of `transformers`, of which the second came from the first by a known kind of change."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from edited import set_fields
from small_checkpoints import save_changed

WEIGHTS = "model.safetensors"
Change = Callable[[str, Tensor], Tensor]


def save_model(folder: Path, config: Any, *, seed: int = 0, model: str = "") -> Path:
    """Save a model with random weights, whose norms and biases are not ones and zeros.

    `model`: its class; by default, that of the configuration for causal language models.
    """
    import transformers

    torch.manual_seed(seed)
    if model:
        made = getattr(transformers, model)(config)
    else:
        made = transformers.AutoModelForCausalLM.from_config(config)
    return save_changed(made, folder, 0.05)


def small_llama(folder: Path, *, seed: int = 0, **settings: Any) -> Path:
    import transformers

    sizes = {
        **{"vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 32},
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"initializer_range": 0.1, "tie_word_embeddings": False},
    }
    return save_model(folder, transformers.LlamaConfig(**sizes | settings), seed=seed)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / WEIGHTS)


def write(source: Path, folder: Path, tensors: Mapping[str, Tensor], **settings: Any) -> Path:
    """Write other tensors, and settings that differ, beside the configuration of a checkpoint."""
    shutil.copytree(source, folder)
    own = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(own, folder / WEIGHTS, metadata={"format": "pt"})
    set_fields(folder / "config.json", **settings)
    return folder


def each(tensors: Mapping[str, Tensor], change: Change, *words: str) -> dict[str, Tensor]:
    """Change the tensors whose names have one of these words; all, without words."""
    return {
        name: change(name, tensor) if not words or any(word in name for word in words) else tensor
        for name, tensor in tensors.items()
    }


def noise(share: float) -> Change:
    """Return a change as training makes it: small, in all entries."""

    def change(_: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor + share * tensor.std().nan_to_num(0.1) * torch.randn_like(tensor)

    return change


def of_rank(rank: int) -> Change:
    def change(_: str, tensor: Tensor) -> Tensor:
        rows, columns = tensor.shape
        return tensor + 0.02 * torch.randn(rows, rank) @ torch.randn(rank, columns)

    return change


def on_levels(bits: int, group: int | None, stored: torch.dtype = torch.float32) -> Change:
    def change(_: str, tensor: Tensor) -> Tensor:
        rows = tensor.float().reshape(-1, group or tensor.shape[-1])
        low = rows.amin(dim=1, keepdim=True)
        step = (rows.amax(dim=1, keepdim=True) - low) / (2**bits - 1)
        return (((rows - low) / step).round() * step + low).view_as(tensor).to(stored)

    return change


def without_small(share: float) -> Change:
    return lambda _, tensor: torch.where(tensor.abs() < tensor.abs().quantile(share), 0.0, tensor)


def in_layers(tensors: Mapping[str, Tensor], order: list[int], at: str = ".layers.") -> dict[str, Tensor]:
    """Return the tensors of a model with these layers, in this order."""
    found = {name: tensor for name, tensor in tensors.items() if at not in name}
    for new, old in enumerate(order):
        found |= {
            name.replace(f"{at}{old}.", f"{at}{new}."): tensor
            for name, tensor in tensors.items()
            if f"{at}{old}." in name
        }
    return found


def other_pairs(width: int) -> Change:
    """Return the permutation between both layouts of rotary pairs, in heads of this width."""

    def change(_: str, tensor: Tensor) -> Tensor:
        heads = tensor.view(-1, 2, width // 2, *tensor.shape[1:])
        return heads.transpose(1, 2).reshape(tensor.shape)

    return change


def moved_entry(tensor: Tensor, place: int, ulps: float) -> Tensor:
    """Move one entry by so many units in the last place."""
    own = tensor.clone()
    entry = own.view(-1)[place]
    own.view(-1)[place] = entry + ulps * (torch.nextafter(entry, torch.tensor(torch.inf)) - entry)
    return own


def in_two_files(source: Path, folder: Path, changed: Change, *, stale: int) -> Path:
    """Write a checkpoint of two shards, one of which has other numbers."""
    tensors = tensors_of(source)
    names = sorted(tensors)
    parts = names[: len(names) // 2], names[len(names) // 2 :]
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    files: dict[str, str] = {}
    for number, part in enumerate(parts):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        own = {name: changed(name, tensors[name]) if number == stale else tensors[name] for name in part}
        save_file(own, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(part, file)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def in_tensors(source: Path) -> Iterator[tuple[str, dict[str, Tensor], dict[str, Any]]]:
    """Yield the kind, the tensors and the settings of changes of a small Llama."""
    own = tensors_of(source)
    maps = ("_proj.weight",)
    yield "rounded", each(own, lambda _, tensor: tensor.bfloat16()), {"dtype": "bfloat16"}
    yield "quantised", each(own, on_levels(4, 32, torch.float16), *maps), {}
    yield "merged LoRA", each(own, of_rank(2), "q_proj", "v_proj"), {}
    yield "pruned", each(own, without_small(0.3), *maps), {}
    yield "fine-tuned", each(own, noise(0.05)), {}
    yield "fine-tuned from a layer on", each(own, noise(0.05), ".layers.2."), {}
    yield "few entries", each(own, lambda _, tensor: tensor + _one_entry(tensor), ".1.self_attn.q_proj"), {}
    yield "scaled", each(own, lambda _, tensor: 0.25 * tensor, "q_proj"), {}
    yield "layers dropped", in_layers(own, [0, 2]), {"num_hidden_layers": 2}
    yield "layers repeated", in_layers(own, [0, 1, 1, 2]), {"num_hidden_layers": 4}
    yield "layers reordered", in_layers(own, [1, 0, 2]), {}
    more = each(own, lambda _, tensor: torch.cat([tensor, tensor[:5]]), "embed", "lm_head")
    yield "embeddings resized", more, {"vocab_size": 53}
    yield "rotary layout", each(own, other_pairs(8), "q_proj", "k_proj"), {}
    tiled = each(own, lambda _, tensor: tensor.repeat(2, 1), "k_proj", "v_proj")
    yield "key-value heads tiled", tiled, {"num_key_value_heads": 4}
    yield "gain without its 1", each(own, lambda _, tensor: tensor - 1, "norm"), {}
    yield "transposed", each(own, lambda _, tensor: tensor.mT, "o_proj"), {}
    yield "another configuration", own, {"rms_norm_eps": 1e-3}


def _one_entry(tensor: Tensor) -> Tensor:
    only = torch.zeros_like(tensor)
    only[2, 3] = 1.0
    return only
