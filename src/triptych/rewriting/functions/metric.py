"""Metrics of rank reduction: the loss of a form, and the truncation of least loss.

In the channels of a group of heads a form is L Rᵀ: L per head (queries, W_O), and R common to the group
(keys, values). The metric measures the loss from a change of these channels: the Frobenius norm of the form,
its mean square on a text (`FormMetric`), or the mean square of rotary scores (`rotary_maps`, `rotary_pairs`).
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

# Weight of isotropic inputs relative to the text: just enough to rank channels unused in the text.
PRIOR = 1e-12


class ChannelChange(NamedTuple):
    """Changed channels of a form at given ranks, and the loss of every head."""

    own: Float[
        Tensor, "copies r width"
    ]  # maps channels of queries (of the output) to the new channels
    common: Float[Tensor, "groups r width"]  # likewise for keys (values)
    lost: Float[Tensor, " heads"]  # squared loss in the metric
    whole: Float[Tensor, " heads"]  # squared norm of the whole form in the metric
    own_shift: Float[Tensor, "copies width"] | None = (
        None  # added to the biases of the changed maps, if any
    )
    common_shift: Float[Tensor, "groups width"] | None = None
    output: Float[Tensor, " d_out"] | None = None  # added to the output bias


class MetricWords(NamedTuple):
    """Descriptions of a metric and of its ranks."""

    need: Need  # requirement on the layer
    whole: str  # description of the truncated object
    most: int  # the largest rank
    cut: str  # text of a `Cut`


class Metric(ABC):
    """Loss of a form of one layer, in float64."""

    @property
    @abstractmethod
    def said(self) -> MetricWords:
        """Texts for refusals and for the record."""

    @abstractmethod
    def energies(self) -> Float[Tensor, "groups k"]:
        """Return the energy of each direction of every group, descending; ranks are allocated by energy."""

    @abstractmethod
    def change(self, ranks: Sequence[int]) -> ChannelChange:
        """Return the change of least loss at a given rank of each group."""


@final
@dataclass(frozen=True, eq=False)
class FormMetric(Metric):
    """The forms themselves, or with moments their effect on a text, about its mean if `centred`.

        QK:  R_q R_kᵀ = U S Vᵀ:                       q̂_i = q_i R_kᵀ V_r S_r^-½,   k̂ = k R_qᵀ U_r S_r^-½
        OV:  R_v [W_O,1 … W_O,n] = U S Vᵀ:            v̂ = v [W_O,1 …] V_r S_r^-½

    RᵀR are second moments. Without a text, inputs are isotropic and R = W. With a text, the moments are of
    the stacked queries of a group's heads, of its keys, and of its heads' mixed values z = p v, averaged. Σ_i
    E(q_i kᵀ − q̂_i k̂ᵀ)² over the heads i of a group and all queries and keys of the text is Σ_{j>r} S_j²,
    the minimum for r common key channels; and so is Σ_i E‖(z_i − ẑ_i) W_O,i‖² for heads with separate values.
    In a group, each W_O,i is then fitted to the moments of its head: the least error for these value
    channels, although other channels might be better.

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
        return MetricWords(
            CHANNELS_FREE[self.form], f"a form of width {width}", width, words
        )

    @property
    def num_groups(self) -> int:
        """Number of channel bases: a basis per key (value) head."""
        if self.form == "ov":
            return self.weights.num_value_heads
        # A layer without a key map has the input as keys, and separate channels per head.
        return self.weights.num_key_heads if self.weights.k else self.weights.num_heads

    def energies(self) -> Float[Tensor, "groups k"]:
        return self.basis().S.square()

    def change(self, ranks: Sequence[int]) -> ChannelChange:
        weights = self.weights
        basis = self.basis().resize_groups(ranks)
        members = weights.num_heads // self.num_groups
        common, own = (
            _whole_where_full(part[:, 0], ranks) for part in (basis.common, basis.own)
        )
        shared, of_heads = (
            part.repeat_interleave(members, dim=0) for part in (common, own)
        )
        if self.form == "ov" and self.moments is not None and members > 1:
            # Each head may read the common channels differently: z ≈ (z T_v) X, by least squares.
            R = self._root("v", self.prior)
            own = of_heads = (torch.linalg.pinv(R @ shared) @ R).mT
        mine, seen = self._roots(0.0)
        missing = (
            torch.eye(shared.shape[1], dtype=shared.dtype, device=shared.device)
            - shared @ of_heads.mT
        )
        lost, whole = (
            BilinearForm(part, mine).norm().square() for part in (seen @ missing, seen)
        )
        output = None
        if self.form == "ov" and self.centred and self.moments is not None:
            output = (self.moments.mixed_mean[:, None, :] @ missing @ weights.W_O).sum(
                dim=(0, 1)
            )
        return ChannelChange(own, common, lost, whole, output=output)

    def basis(self) -> JointBasis:
        """Return the channels of highest energy of every group."""
        groups = self.num_groups
        mine, seen = (
            part.unflatten(0, (groups, -1))  # type: ignore[no-untyped-call]
            for part in self._roots(self.prior)
        )
        members = mine.shape[1]
        return joint_basis(
            mine.flatten(1, 2)[:, None],
            seen.flatten(1, 2)[:, None] / members**0.5,
            "own",
        )

    def _roots(
        self, prior: float
    ) -> tuple[Float[Tensor, "heads rows r"], Float[Tensor, "heads others r"]]:
        """Return R of the own factor and R of the common factor for every head."""
        if self.form == "qk":
            return self._root("q", prior), self._root("k", prior)
        return torch.linalg.qr(self.weights.W_O.mT, mode="r").R, self._root("v", prior)

    def _root(self, side: Side, prior: float) -> Float[Tensor, "heads rows r"]:
        """Return R, with RᵀR second moments of queries, keys or mixed values per head, plus the prior."""
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
            "v": (
                moments.mixed_centred if mean_off else moments.mixed,
                moments.y_square,
            ),
        }[side]
        # Moments for isotropic inputs of the same mean square as the text's.
        of_any_input = square * link.weight.mT @ link.weight
        if link.bias is not None and not mean_off:
            of_any_input = of_any_input + link.bias[:, :, None] * link.bias[:, None, :]
        return gram_root(
            gram.repeat_interleave(heads // len(gram), dim=0) + prior * of_any_input
        )


def require_moments_of(
    name: str, weights: AttentionWeights, moments: Moments, forms: Sequence[Form]
) -> None:
    """Refuse moments with other numbers of heads or channels than these forms."""
    # Moments of mixed values are per query head: each head mixes values with its own weights.
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
    weights: AttentionWeights,
    side: Literal["q", "k"],
    moments: Moments | None,
    prior: float,
) -> Float[Tensor, "copies e e"]:
    """Return E[(y, 1)ᵀ(y, 1)] of queries or keys y; without moments, of isotropic inputs."""
    link = weights.multiplied(side).repeat(
        weights.num_heads if side == "q" else weights.num_key_heads
    )
    W = link.weight
    bias = (
        torch.zeros_like(link.weight[:, :1])
        if link.bias is None
        else link.bias[:, None]
    )
    if moments is None:
        gram = W.mT @ W + bias.mT @ bias
        mean = bias
    else:
        square = moments.x_square if side == "q" else moments.y_square
        own, mean = (
            (moments.q, moments.q_mean) if side == "q" else (moments.k, moments.k_mean)
        )
        # The prior preserves directions unused in the text.
        gram = own + prior * square * W.mT @ W
        mean = mean[:, None]
    one = torch.ones_like(mean[..., :1])
    return torch.cat(
        [torch.cat([gram, mean.mT], dim=-1), torch.cat([mean, one], dim=-1)], dim=-2
    )


def gram_root(gram: Float[Tensor, "*batch r r"]) -> Float[Tensor, "*batch r r"]:
    """Return R with RᵀR = G; unlike Cholesky's factor, also for a singular G."""
    values, vectors = torch.linalg.eigh((gram + gram.mT) / 2)
    root: Tensor = values.clamp(min=0.0).sqrt()[..., :, None] * vectors.mT
    return root


def _whole_where_full(
    change: Float[Tensor, "groups r width"], ranks: Sequence[int]
) -> Float[Tensor, "groups r width"]:
    """Replace the change by the identity in groups of full rank."""
    r, width = change.shape[1:]
    full = torch.tensor([rank == r for rank in ranks], device=change.device)[
        :, None, None
    ]
    return torch.where(
        full, torch.eye(r, width, dtype=change.dtype, device=change.device), change
    )
