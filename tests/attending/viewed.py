"""Pages of attention with heads whose behaviour is known."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.running.measuring.weight_maps import HeadWeights, RowKeeper
from triptych.seeing.attending.attention_page import (
    AttentionPage,
    HeadNote,
    ViewedHead,
    ViewedKind,
    ViewedLayer,
    ViewedText,
)


def layers_of(maps: Sequence[Sequence[HeadWeights]]) -> tuple[ViewedLayer, ...]:
    """Layers of unlabelled heads from the maps of every layer's heads."""
    return tuple(
        ViewedLayer(layer, tuple(ViewedHead(head, one, HeadNote()) for head, one in enumerate(heads)))
        for layer, heads in enumerate(maps)
    )


def previous(num_queries: int, num_keys: int) -> NDArray[np.float32]:
    """0.75 on the token before, 0.25 on the first one; rows past the last key look at it."""
    weights = np.zeros((num_queries, num_keys), np.float32)
    before = np.clip(np.arange(num_queries) - 1, 0, num_keys - 1)
    weights[:, 0] += 0.25
    weights[np.arange(num_queries), before] += 0.75
    return weights


def first(num_queries: int, num_keys: int) -> NDArray[np.float32]:
    weights = np.zeros((num_queries, num_keys), np.float32)
    weights[:, 0] = 1
    return weights


def translation_page() -> AttentionPage:
    """Two texts of 2 layers of 2 heads for each kind; head 0 of layer 1 looks at the token before."""
    source, target = ("ein", " Hund", " läuft", "</s>"), ("a", " dog", " runs")
    kinds = (("encoder", source, source), ("decoder", target, target), ("cross", target, source))

    def viewed(number: int) -> ViewedText:
        made = []
        for kind, queries, keys in kinds:
            shape = len(queries), len(keys)
            looks_first, looks_before = HeadWeights.whole(first(*shape)), HeadWeights.whole(previous(*shape))
            plain, last = layers_of([[looks_first, looks_first], [looks_before, looks_first]])
            noted = replace(last.heads[0], note=HeadNote("previous token", (("previous", "0.75"),)))
            layers = plain, replace(last, heads=(noted, last.heads[1]))
            generated = None if kind == "encoder" else 0
            made.append(ViewedKind(kind, queries, keys, layers, generated))  # type: ignore[arg-type]
        return ViewedText(f"text {number}", tuple(made))

    return AttentionPage("two texts", (viewed(0), viewed(1)), (("model", "tiny"),), ("A note.",))


def long_maps(num_heads: int, length: int, keep: int) -> tuple[HeadWeights, ...]:
    """Causal heads with weights of every size."""
    generator = torch.Generator().manual_seed(0)
    keeper = RowKeeper(num_heads, length, length, keep)
    noise = torch.rand(num_heads, 64, length, generator=generator)
    for start in range(0, length, 64):
        rows = torch.arange(start, min(start + 64, length))
        scores = 6 * noise[:, : len(rows)].roll(start, 2) + 8.0 * (torch.arange(length) == rows[:, None] - 1)
        allowed = torch.arange(length) <= rows[:, None]
        keeper.add(scores.masked_fill(~allowed, -torch.inf).softmax(-1))
    return keeper.maps()


def long_page(num_layers: int, num_heads: int, length: int, keep: int = 16) -> AttentionPage:
    """A decoder's page of a long text, of which only the largest weights of each row are kept."""
    tokens = tuple(f" w{i % 97}" if i % 20 else "\n" for i in range(length))
    maps = long_maps(num_heads, length, keep)
    kind = ViewedKind("decoder", tokens, tokens, layers_of([maps] * num_layers), length // 2, length // 2)
    return AttentionPage("long", (ViewedText("long", (kind,)),))
