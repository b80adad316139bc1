"""The chain of exact rewrites from A to B, assembled from the findings in the parts."""

from collections.abc import Mapping
from typing import Any

from triptych.rewriting.differences.difference_records import ChainStep
from triptych.rewriting.differences.parts import Part

# Rewrites in the order of a recipe, with their words.
_WORDS: Mapping[str, str] = {
    "padding": "rows of padding of the vocabulary are added or removed",
    "scale": "factors are moved into maps",
    "fold": "chains of maps are multiplied or split",
    "fold_norm": "gain and shift of the norm before attention are folded into its maps",
    "fold_other_norms": "gain and shift of other norms are folded into the maps that read them",
    "centre": "what a LayerNorm cannot show is removed from maps that read it",
    "turn": "the residual stream has another orthogonal basis",
    "drop_key_bias": "key biases, which the softmax does not see, are dropped",
    "fold_value_bias": "value biases are folded into the bias of the output",
    "prune_heads": "heads that add nothing are added or removed",
    "drop_units": "hidden units that add nothing are added or removed",
    "basis qk": "queries and keys have another basis",
    "basis ov": "values and outputs have another basis",
    "permute_heads": "heads are in another order",
    "permute_units": "hidden units are in another order",
    "scale_units": "hidden units have other scales",
    "experts": "experts are in another order",
    "repeat_kv_heads": "key and value heads are repeated or merged",
}
# Rewrites with the same options for all layers.
_PLAIN_REWRITES = frozenset(
    {"fold_norm", "fold_other_norms", "drop_key_bias", "fold_value_bias", "prune_heads"}
)


def words_of(steps: Mapping[str, Any]) -> tuple[str, ...]:
    """Describe the rewrites of one part."""
    return tuple(words for key, words in _WORDS.items() if key in steps)


def chain_of(parts: list[Part]) -> tuple[ChainStep, ...]:
    """Return the rewrites of all parts in the order of a recipe, with their layers."""
    found = []
    for key, words in _WORDS.items():
        own = [part for part in parts if key in part.found.steps]
        if not own:
            continue
        if key == "permute_heads":
            found += [_permutation(part, words) for part in own]
            continue
        layers = tuple(dict.fromkeys(part.layer for part in own if part.layer))
        recipe = {"rewrite": key} if key in _PLAIN_REWRITES else None
        if key == "repeat_kv_heads":
            recipe = _repetition(own)
        found.append(ChainStep(words, recipe, layers))
    return tuple(found)


def _permutation(part: Part, words: str) -> ChainStep:
    order = part.found.steps["permute_heads"]
    number = part.layer.rpartition(".")[2]
    recipe: dict[str, Any] | None = None
    if sorted(order) == [*range(len(order))]:
        recipe = {
            "rewrite": "permute_heads",
            "order": inverse(order),
            "layers": [int(number)],
        }
    return ChainStep(words, recipe, (part.layer,))


def inverse(order: list[int]) -> list[int]:
    """Return the inverse of a permutation: the head in A of each head of B."""
    found = [0] * len(order)
    for head, partner in enumerate(order):
        found[partner] = head
    return found


def _repetition(parts: list[Part]) -> dict[str, Any] | None:
    copies = {part.found.steps["repeat_kv_heads"] for part in parts}
    if len(copies) != 1:
        return None
    before, after = copies.pop()
    if after[0] < before[0]:
        return {"rewrite": "merge_kv_heads", "num_kv_heads": after[0]}
    return {"rewrite": "repeat_kv_heads", "num_kv_heads": after[0]}
