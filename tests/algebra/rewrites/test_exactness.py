"""Every exact rewrite of every parameterisation gives a layer that attends as the one before, or refuses.

To add a rewrite: name it in `REWRITES`. What it refuses goes into `REFUSED`, with the reason.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor

from heads import LENGTH, MEMORY_LENGTH, NAMES, Untouched, make_layer, make_norm, random_input
from triptych.core.algebra.norm_folding import fold_norm
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.weights import AttentionWeights, Norm
from triptych.core.attention import (
    PARAMETERISATIONS,
    AlibiPositions,
    AttentionPositions,
    MultiHeadAttention,
    RotaryPositions,
)
from triptych.rewriting.functions.biases import drop_key_bias, fold_value_bias
from triptych.rewriting.functions.folding import expand, factor, fold
from triptych.rewriting.functions.gauge import gauge_fix
from triptych.rewriting.functions.head_order import permute_heads, repeat_kv_heads
from triptych.rewriting.functions.latent import to_latent


def fold_chains(weights: AttentionWeights) -> AttentionWeights:
    return fold(weights, keep="folded").weights


def fold_form(weights: AttentionWeights) -> AttentionWeights:
    return fold(weights, sides=("qk", "v", "o"), keep="folded").weights


REWRITES: dict[str, Callable[[AttentionWeights], AttentionWeights]] = {
    "fold": fold_chains,
    "fold the form": fold_form,
    "factor": lambda weights: factor(fold_form(weights)).weights,
    "expand": lambda weights: expand(weights).weights,
    "drop_key_bias": lambda weights: drop_key_bias(weights).weights,
    "fold_value_bias": lambda weights: fold_value_bias(weights).weights,
    "fold_norm": lambda weights: fold_norm(weights).weights,
    "gauge_fix": lambda weights: gauge_fix(weights).weights,
    "gauge_fix of W_OV": lambda weights: gauge_fix(weights, forms=("ov",)).weights,
    "permute_heads": lambda weights: permute_heads(weights, (2, 3, 0, 1)).weights,
    "repeat_kv_heads": lambda weights: repeat_kv_heads(weights).weights,
    "to_latent": lambda weights: to_latent(weights).weights,
}
POSITIONS: dict[str, Callable[[], AttentionPositions | None]] = {
    "none": lambda: None,
    "rotary": RotaryPositions,
    "alibi": AlibiPositions,
}
# Cross-attention has no places to compare.
SETTINGS = [
    ("cross", "none"),
    *itertools.product(["causal"], POSITIONS),
    # None of these rewrites asks whether a token sees later ones.
    *(pytest.param("self", positions, marks=pytest.mark.slow) for positions in POSITIONS),
]
WITH_KEY_BIAS = tuple(name for name in NAMES if name not in ("direct", "bilinear"))

Condition = Callable[[str, bool], bool]


def always(positions: str, biased: bool) -> bool:
    return True


def biased(positions: str, biased: bool) -> bool:
    return biased


def rotary(positions: str, biased: bool) -> bool:
    return positions == "rotary"


def alibi(positions: str, biased: bool) -> bool:
    return positions == "alibi"


def rotary_and_biased(positions: str, biased: bool) -> bool:
    return positions == "rotary" and biased


MOVES_SLICES = ("identity_value", "identity_ov")
# Rewrite, parameterisations, when, reason.
REFUSED: tuple[tuple[str, tuple[str, ...], Condition, str], ...] = (
    ("fold the form", WITH_KEY_BIAS, rotary, "under rotary positions the form depends on the distance"),
    ("factor", WITH_KEY_BIAS, rotary, "under rotary positions the form depends on the distance"),
    ("factor", ("direct",), always, "the keys have a map of their own: the form is a product already"),
    ("drop_key_bias", WITH_KEY_BIAS, rotary_and_biased, "under rotary positions the key bias is turned"),
    ("fold_value_bias", ("differential",), biased, "each token takes another share of what a head moves"),
    ("fold_norm", ("direct", "identity_query"), always, "q reads the norm through a fixed map"),
    ("fold_norm", MOVES_SLICES, always, "v reads the norm through a fixed map"),
    ("gauge_fix", NAMES, rotary, "rotary"),
    ("gauge_fix", ("bilinear",), always, "no gauge: no map makes keys"),
    ("gauge_fix", ("collaborative",), always, "leaves a diagonal gauge only"),
    ("permute_heads", NAMES, alibi, "alibi"),
    ("to_latent", ("bilinear",), always, "the input itself"),
    ("to_latent", NAMES, rotary, "rotary"),
)


def reason_to_refuse(rewrite: str, name: str, positions: str, biased: bool) -> str:
    for refused, names, when, reason in REFUSED:
        if rewrite == refused and name in names and when(positions, biased):
            return reason
    return ""


class Case(NamedTuple):
    """A layer behind norms, its inputs, and what comes out.

    Attributes:
        expected: the output, and the gradients of the inputs of its product with `towards`.
    """

    weights: AttentionWeights
    x: Tensor
    memory: Tensor | None
    towards: Tensor
    expected: tuple[Tensor, ...]


@functools.cache
def case(name: str, kind: Literal["self", "causal", "cross"], positions: str, biased: bool) -> Case:
    """The same for every rewrite: none may change it."""
    layer = make_layer(name, biased=biased, positions=POSITIONS[positions]())
    found = layer.weights(kind)
    weights = replace(
        found,
        norm=make_norm(offset=1.0, shifted=biased),
        memory_norm=make_norm(shifted=biased) if kind == "cross" else None,
    )
    x, towards = random_input(LENGTH).requires_grad_(), random_input(LENGTH)
    memory = random_input(MEMORY_LENGTH).requires_grad_() if kind == "cross" else None
    return Case(weights, x, memory, towards, attend(layer, weights, x, memory, towards))


def attend(
    layer: MultiHeadAttention, weights: AttentionWeights, x: Tensor, memory: Tensor | None, towards: Tensor
) -> tuple[Tensor, ...]:
    """Output of the layer behind the norms its weights still have, and the gradients of the inputs."""
    keys_from = None if memory is None else after_norm(weights.memory_norm, memory)
    causal = weights.semantics.kind == "causal"
    output = layer(after_norm(weights.norm, x), memory=keys_from, causal=causal).output
    inputs = (x,) if memory is None else (x, memory)
    return output.detach(), *torch.autograd.grad((output * towards).sum(), inputs)


def after_norm(norm: Norm | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    y = x * (norm.offset + norm.weight)
    return y if norm.bias is None else y + norm.bias


@pytest.mark.sampled(5)
@pytest.mark.parametrize("biased", [False, True], ids=["no biases", "biases"])
@pytest.mark.parametrize(("kind", "positions"), SETTINGS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rewrite", REWRITES)
def test_the_rewritten_layer_attends_as_before_or_the_rewrite_is_refused(
    rewrite: str, name: str, kind: Any, positions: str, biased: bool
) -> None:
    if positions == "rotary" and PARAMETERISATIONS[name].no_rotary:
        return  # such a layer cannot be made
    weights, x, memory, towards, expected = case(name, kind, positions, biased)
    if reason := reason_to_refuse(rewrite, name, positions, biased):
        with pytest.raises(RewriteRefusedError, match=reason):
            REWRITES[rewrite](weights)
        return
    with Untouched(weights):
        new = REWRITES[rewrite](weights)
    if new is weights:
        return
    rebuilt = MultiHeadAttention.from_weights(new.without_norms())
    found = attend(rebuilt, new, x, memory, towards)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10 * float(other.abs().max()))
