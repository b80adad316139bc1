"""Composition scores of pairs of heads, with their chance level."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.core.heads import Head, Layer
from triptych.errors import UsageError
from triptych.literals import Into
from triptych.printable import table_html
from triptych.running.opened_source import Opened


@final
@dataclass(frozen=True, eq=False)
class Composition:
    """Composition scores of pairs of heads.

    For heads a and b, a in an earlier layer, with W_OV of a and the form F of b, the score is
    `‖W_OV F‖ / (‖W_OV‖ ‖F‖)` in Frobenius norms: F is W_QK of b for "Q", its transpose for "K", W_OV for "V".
    Maps read normalised input: the gain of the norm before a layer is folded into them. For models with
    LayerNorms, the removed mean is projected out of the maps' inputs and the heads' outputs; an RMSNorm does
    not remove the mean.

    Attributes:
        into: "Q", "K" or "V": input of the later head that reads the earlier head's output.
        scores: earlier head by later head, `[layers, heads, layers, heads]`; NaN unless the first layer is
            earlier.
        chance: √E[score²] for a random rotation between both forms: `1 / √d_model` for any spectra, or
            `1 / √(d_model − 1)` with LayerNorms.
        layers: names of the layers.

    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
    """

    into: Into
    scores: Float[Tensor, "layers heads layers heads"]
    chance: float
    layers: tuple[str, ...]

    def top(self, count: int = 10) -> list[tuple[str, str, float]]:
        """Return the pairs of heads with the highest scores: earlier head, later head, score."""
        flat = self.scores.nan_to_num(nan=-1.0).flatten()
        found = []
        for place in flat.topk(
            min(count, int(self.scores.isfinite().sum()))
        ).indices.tolist():
            one, head, other, later = torch.unravel_index(
                torch.tensor(place), self.scores.shape
            )
            pair = (
                f"{self.layers[one]}.{int(head)}",
                f"{self.layers[other]}.{int(later)}",
            )
            found.append((*pair, float(flat[place])))
        return found

    def __repr__(self) -> str:
        best = "; ".join(
            f"{one} → {other} {score:.3f}" for one, other, score in self.top(3)
        )
        return (
            f"Composition into {self.into}: scores {list(self.scores.shape)}, chance {self.chance:.3f}\n"
            f"  highest: {best}"
        )

    def _repr_html_(self) -> str:
        rows = [(one, other, f"{score:.3f}") for one, other, score in self.top(10)]
        title = f"Composition into {self.into} (chance {self.chance:.3f})"
        return table_html(title, rows, ("earlier head", "later head", "score"))


def compose_stack(opened: Opened, into: Into, stack: str | None) -> Composition:
    """Compute composition scores within one stack of a model; `stack` may be None if there is one stack."""
    stacks = opened.places.stacks
    if len(stacks) > 1 and stack is None:
        raise UsageError(
            f"{opened.name} has {', '.join(stacks)}: composition({into!r}, stack=…) is of one"
        )
    return compose(opened.stack(stack or stacks[0]).layers, into)


def compose(layers: Sequence[Layer], into: Into) -> Composition:
    """Compute composition scores between all heads of a stack."""
    if into not in ("Q", "K", "V"):
        raise UsageError(f'composition is into "Q", "K" or "V", not {into!r}')
    heads = [[_head_to_compose(head, into) for head in layer] for layer in layers]
    most = max(map(len, heads))
    d = layers[0].d_model
    scores = torch.full((len(heads), most, len(heads), most), torch.nan)
    is_centred = [
        (norm := layer.weights.norm) is not None and norm.centred for layer in layers
    ]
    writes = []
    for own, removes_mean in zip(heads, is_centred, strict=True):
        W_V, W_O = _stacked(
            [head.ov.left for head in own], [head.ov.right for head in own]
        )
        writes.append((W_V, _without_mean(W_O) if removes_mean else W_O))
    reads = writes
    if into != "V":
        forms = [[_qk(head) for head in own] for own in heads]
        reads = [
            _stacked(*(pairs if into == "Q" else pairs[::-1]))
            for pairs in (
                ([left for left, _ in own], [right for _, right in own])
                for own in forms
            )
        ]
    for i, (W_V, W_O) in enumerate(writes):
        for j in range(i + 1, len(heads)):
            left, right = reads[j]
            # ‖V Oᵀ L Rᵀ‖ from the triangles of V and R, without forming a d × d matrix.
            core = torch.einsum("adr,bds->abrs", W_O, left)
            whole = torch.einsum(
                "axr,abrs,bys->abxy", _triangle(W_V), core, _triangle(right)
            )
            norms = _product_norms(W_V, W_O)[:, None] * _product_norms(left, right)
            found = torch.linalg.matrix_norm(whole) / norms
            scores[i, : len(heads[i]), j, : len(heads[j])] = found.float()
    chance = (d - all(is_centred)) ** -0.5
    return Composition(into, scores, chance, tuple(layer.name for layer in layers))


def _head_to_compose(head: Head, into: Into) -> Head:
    if into != "Q" and head.borrows is not None:
        raise UsageError(
            f"layer {head.layer.name} uses keys and values of layer {head.borrows}, made of what that one "
            'reads: there is no composition into its "K" and "V"'
        )
    weights = head.layer.weights
    if weights.norm_place != "pre":
        place = (
            "a post-norm"
            if weights.norm_place == "post"
            else "norms on both sides of layers (sandwich)"
        )
        raise UsageError(
            f"layer {head.layer.name}: composition scores would be wrong: {place} scales what a head wrote "
            "before the next one reads it"
        )
    return head if weights.norm is None else head.folded


def _qk(head: Head) -> tuple[Tensor, Tensor]:
    form = head.qk
    if head.weights.semantics.rotary is not None:
        raise UsageError(
            f"head {head.name}: rotary positions make W_QK another form at every distance, so there is no "
            'composition into "Q" or "K"; into "V" there is'
        )
    return form.left, form.right


def _stacked(left: Sequence[Tensor], right: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.stack([*left]).double(), torch.stack([*right]).double()


def _without_mean(written: Tensor) -> Tensor:
    """Remove the mean over the stream's channels from the heads' outputs, `[heads, d_model, d_v]`."""
    left: Tensor = written - written.mean(dim=1, keepdim=True)
    return left


def _triangle(maps: Tensor) -> Tensor:
    found: Tensor = torch.linalg.qr(maps, mode="r").R
    return found


def _product_norms(left: Tensor, right: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.matrix_norm(_triangle(left) @ _triangle(right).mT)
    return norms.clamp(min=torch.finfo(left.dtype).tiny)
