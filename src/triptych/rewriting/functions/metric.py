"""What counts of a form whose rank is lowered: the metric in which the truncation is the nearest.

In the channels of a group of heads a form is L Rᵀ: of each head its own L (queries, W_O), and R in common
(keys, values). The metric says what a change of these channels loses. It is the Frobenius norm of the form,
its mean square on a text (`FormMetric`), or that of scores that positions turn (`rotary_maps`,
`rotary_pairs`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.core.algebra.forms import BilinearForm
from triptych.core.algebra.legality import CHANNELS_FREE, Need
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.weights import AttentionWeights, Side
from triptych.rewriting.functions.channels import Form, JointBasis, joint_basis
from triptych.rewriting.functions.moments import Moments

# Weight of inputs without preferred direction, next to the text's: just enough to decide on channels that
# the text never uses.
PRIOR = 1e-12


class ChannelChange(NamedTuple):
    """What becomes of the channels of a form at some ranks, and what every head loses by it."""

    own: Float[Tensor, "copies r width"]  # takes channels of queries (of the output) to the new ones
    common: Float[Tensor, "groups r width"]  # the same of keys (values)
    lost: Float[Tensor, " heads"]  # by the metric, squared
    whole: Float[Tensor, " heads"]  # all that there is to lose
    own_shift: Float[Tensor, "copies width"] | None = None  # goes to the biases behind the maps, if any
    common_shift: Float[Tensor, "groups width"] | None = None
    output: Float[Tensor, " d_out"] | None = None  # goes to the bias of the output


class MetricWords(NamedTuple):
    """What is said of a metric, and of ranks in it."""

    need: Need  # what it asks of the layer
    whole: str  # what a rank is of
    most: int  # the largest rank
    cut: str  # the words of a `Cut`


class Metric(ABC):
    """What a form loses: of one layer in float64."""

    @property
    @abstractmethod
    def said(self) -> MetricWords:
        """The words of refusals and of the record."""

    @abstractmethod
    def energies(self) -> Float[Tensor, "groups k"]:
        """What each direction of every group carries, descending: what ranks are shared out by."""

    @abstractmethod
    def change(self, ranks: Sequence[int]) -> ChannelChange:
        """The change that loses least, at a rank of each group."""


@final
@dataclass(frozen=True, eq=False)
class FormMetric(Metric):
    """The forms themselves, or with moments what they do on a text, about its mean if `centred`.

        QK:  R_q R_kᵀ = U S Vᵀ:                       q̂_i = q_i R_kᵀ V_r S_r^-½,   k̂ = k R_qᵀ U_r S_r^-½
        OV:  R_v [W_O,1 … W_O,n] = U S Vᵀ:            v̂ = v [W_O,1 …] V_r S_r^-½

    with RᵀR the second moments: without a text of inputs that have no direction, R = W; else of the queries
    of the heads of a group one below the other, of its keys, and of its heads' mixed values z = p v, in the
    mean. Σ_i E(q_i kᵀ − q̂_i k̂ᵀ)² over the heads i of a group and all queries and keys of the text is
    Σ_{j>r} S_j², the least that r common key channels can do; and Σ_i E‖(z_i − ẑ_i) W_O,i‖² where a head has
    its values for itself. In a group, each W_O,i is then fitted to its own head's moments: the least error
    for these value channels, though others might do better.

    Source: Eckart & Young 1936, doi 10.1007/BF02288367.
    """

    weights: AttentionWeights
    form: Form
    moments: Moments | None = None
    centred: bool = False
    prior: float = PRIOR

    @property
    def said(self) -> MetricWords:
        chain = self.weights.chain("q" if self.form == "qk" else "v")
        width = chain[-1].d_out if chain else self.weights.d_model
        what = "scores" if self.form == "qk" else "outputs"
        mean = " about their mean" * self.centred
        lost = (
            " of {most}, ‖Δ‖ at most {worst:.6g}"
            if self.moments is None
            else f", which leaves out at most {{worst:.3g}} of the mean square of a head's {what}{mean}"
        )
        words = f"W_{self.form.upper()}: {{ranks}}{lost}"
        return MetricWords(CHANNELS_FREE[self.form], f"a form of width {width}", width, words)

    @property
    def num_groups(self) -> int:
        """How many bases of channels there are: one for each key (value) head."""
        if self.form == "ov":
            return self.weights.num_value_heads
        # The input itself as keys: each head then gets its own channels of it.
        return self.weights.num_key_heads if self.weights.k else self.weights.num_heads

    def energies(self) -> Float[Tensor, "groups k"]:
        return self.basis().S.square()

    def change(self, ranks: Sequence[int]) -> ChannelChange:
        weights = self.weights
        basis = self.basis().resize_groups(ranks)
        members = weights.num_heads // self.num_groups
        common, own = (_whole_where_full(part[:, 0], ranks) for part in (basis.common, basis.own))
        shared, of_heads = (part.repeat_interleave(members, dim=0) for part in (common, own))
        if self.form == "ov" and self.moments is not None and members > 1:
            # What each head makes of these channels is its own affair: z ≈ (z T_v) X, by least squares.
            R = self._root("v", self.prior)
            own = of_heads = (torch.linalg.pinv(R @ shared) @ R).mT
        mine, seen = self._roots(0.0)
        missing = torch.eye(shared.shape[1], dtype=shared.dtype, device=shared.device) - shared @ of_heads.mT
        lost, whole = (BilinearForm(part, mine).norm().square() for part in (seen @ missing, seen))
        output = None
        if self.form == "ov" and self.centred and self.moments is not None:
            output = (self.moments.mixed_mean[:, None, :] @ missing @ weights.W_O).sum(dim=(0, 1))
        return ChannelChange(own, common, lost, whole, output=output)

    def basis(self) -> JointBasis:
        """The channels of every group that carry the most."""
        groups = self.num_groups
        mine, seen = (part.unflatten(0, (groups, -1)) for part in self._roots(self.prior))  # type: ignore[no-untyped-call]
        members = mine.shape[1]
        return joint_basis(mine.flatten(1, 2)[:, None], seen.flatten(1, 2)[:, None] / members**0.5, "own")

    def _roots(self, prior: float) -> tuple[Float[Tensor, "heads rows r"], Float[Tensor, "heads others r"]]:
        """R of what every head has for itself, and of what it has in common, as it sees it."""
        if self.form == "qk":
            return self._root("q", prior), self._root("k", prior)
        return torch.linalg.qr(self.weights.W_O.mT, mode="r").R, self._root("v", prior)

    def _root(self, side: Side, prior: float) -> Float[Tensor, "heads rows r"]:
        """R with RᵀR the second moments of queries, keys or mixed values of every head, with the prior."""
        link = self.weights.behind_norms().multiplied(side)
        moments = self.moments
        heads = self.weights.num_heads
        if moments is None:
            R: Tensor = torch.linalg.qr(link.weight, mode="r").R
            return R.repeat_interleave(heads // link.copies, dim=0)
        link = link.repeat(heads)
        mean_off = self.centred and side != "q"
        gram, square = {
            "q": (moments.q, moments.x_square),
            "k": (moments.k_centred if mean_off else moments.k, moments.y_square),
            "v": (moments.mixed_centred if mean_off else moments.mixed, moments.y_square),
        }[side]
        of_any_input = square * link.weight.mT @ link.weight
        if link.bias is not None and not mean_off:
            of_any_input = of_any_input + link.bias[:, :, None] * link.bias[:, None, :]
        return gram_root(gram.repeat_interleave(heads // len(gram), dim=0) + prior * of_any_input)


def require_moments_of(name: str, weights: AttentionWeights, moments: Moments, forms: Sequence[Form]) -> None:
    """Refuse moments of another number of heads or channels than these forms have."""
    q, k, v = (weights.multiplied(side) for side in ("q", "k", "v"))
    for form, what, found, wanted in (
        ("qk", "queries", moments.q, (weights.num_heads, q.d_out)),
        ("qk", "keys", moments.k, (k.copies, k.d_out)),
        ("ov", "mixed values", moments.mixed, (weights.num_heads, v.d_out)),
    ):
        if form in forms and found.shape[:2] != wanted:
            raise RewriteRefusedError(
                name,
                f"the moments are of {found.shape[0]} × {found.shape[1]} channels of {what}, the layer has "
                f"{wanted[0]} × {wanted[1]}",
                "gather them of the layer as it is written now",
            )


def side_moments(
    weights: AttentionWeights, side: Literal["q", "k"], moments: Moments | None, prior: float
) -> Float[Tensor, "copies e e"]:
    """E[(y, 1)ᵀ(y, 1)] of queries or keys y; without moments, of inputs that have no direction."""
    link = weights.multiplied(side).repeat(weights.num_heads if side == "q" else weights.num_key_heads)
    W = link.weight
    bias = torch.zeros_like(link.weight[:, :1]) if link.bias is None else link.bias[:, None]
    if moments is None:
        gram = W.mT @ W + bias.mT @ bias
        mean = bias
    else:
        square = moments.x_square if side == "q" else moments.y_square
        own, mean = (moments.q, moments.q_mean) if side == "q" else (moments.k, moments.k_mean)
        gram = own + prior * square * W.mT @ W
        mean = mean[:, None]
    one = torch.ones_like(mean[..., :1])
    return torch.cat([torch.cat([gram, mean.mT], dim=-1), torch.cat([mean, one], dim=-1)], dim=-2)


def gram_root(gram: Float[Tensor, "*batch r r"]) -> Float[Tensor, "*batch r r"]:
    """R with RᵀR = G, where Cholesky's would stop at a G that is singular."""
    values, vectors = torch.linalg.eigh((gram + gram.mT) / 2)
    root: Tensor = values.clamp(min=0.0).sqrt()[..., :, None] * vectors.mT
    return root


def _whole_where_full(
    change: Float[Tensor, "groups r width"], ranks: Sequence[int]
) -> Float[Tensor, "groups r width"]:
    """The identity for groups that keep all their channels."""
    r, width = change.shape[1:]
    full = torch.tensor([rank == r for rank in ranks], device=change.device)[:, None, None]
    return torch.where(full, torch.eye(r, width, dtype=change.dtype, device=change.device), change)
