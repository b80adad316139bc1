"""The canonical basis of a head's channels.

`W_Q → W_Q G`, `W_K → W_K G⁻ᵀ` preserves W_QK for any invertible G, and `W_V → W_V G`, `W_O → G⁻¹ W_O`
preserves W_OV. Query heads sharing a key head share G.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from triptych.core.algebra.forms import BilinearForm
from triptych.core.algebra.legality import CHANNELS_FREE, require_last_map
from triptych.core.algebra.rewritten import RewriteRefusedError, Rewritten, rewritten
from triptych.core.algebra.weights import AttentionWeights
from triptych.rewriting.functions.channels import (
    FORMS,
    NAMES,
    SIDES_OF,
    Form,
    JointBasis,
    in_working_precision,
    joint_basis,
    rebase,
    untied,
    with_learned_maps,
)
from triptych.rewriting.functions.rewrite import (
    APART,
    LayerRewrite,
    LayerToRewrite,
    require_still_tied,
)


@final
class GaugeFix(LayerRewrite):
    """Bring heads into their canonical basis, which does not depend on how a head was written."""

    name = "gauge_fix"
    tier = "rounding-exact"
    requires = tuple(CHANNELS_FREE.values())
    besides = APART
    place = 7
    why_here = "the order of heads is that of what is left"

    forms: tuple[Form, ...] | None = Field(
        None, description="qk, ov or both; by default the forms that have a gauge"
    )

    def apply(self, layer: LayerToRewrite) -> Rewritten:
        return require_still_tied(layer, self._fixed(layer.weights))

    def _fixed(self, weights: AttentionWeights) -> Rewritten:
        if self.forms is not None:
            return gauge_fix(weights, forms=self.forms)
        try:
            return gauge_fix(weights)
        except RewriteRefusedError as refused:
            for form in FORMS:
                try:
                    done = gauge_fix(weights, forms=(form,))
                except RewriteRefusedError:
                    continue
                notes = (*done.record.notes, f"only W_{form.upper()}: {refused.reason}")
                return Rewritten(done.weights, replace(done.record, notes=notes))
            raise


def gauge_fix(weights: AttentionWeights, *, forms: Sequence[Form] = FORMS) -> Rewritten:
    """Rewrite W_QK and W_OV in their canonical basis.

    By SVD, W_Q and W_K (W_V and W_O) get the same singular values √σ in descending order, and the entry of
    largest magnitude of every column of W_Q (W_V) is positive. The stacked query maps of a group (its
    concatenated output maps) replace a single W_Q (W_O). Biases are transformed with the maps.

    Widths are unchanged. Channels beyond the rank are zero, except channels required by a bias. Chains of
    several maps keep their structure: the last map of queries, keys and values changes, and the first map of
    the output.
    """
    if unknown := sorted(set(forms) - set(FORMS)):
        raise ValueError(f"forms names {', '.join(unknown)}: the forms are qk and ov")
    # Check every form before changing weights.
    for form in forms:
        reason, way_out = _why_no_gauge(weights, form)
        if reason:
            others = [
                other
                for other in FORMS
                if other != form and not _why_no_gauge(weights, other)[0]
            ]
            advice = [way_out] * bool(way_out) + [
                f'forms=("{other}",) leaves {form} alone' for other in others
            ]
            raise RewriteRefusedError(
                "gauge_fix", f"{form}: {reason}", ", or ".join(advice)
            )
        for side in SIDES_OF[form]:
            require_last_map("gauge_fix", side, weights.chain(side))
    notes: list[str] = []
    result = in_working_precision(weights)
    if forms:
        result = with_learned_maps(result, notes)
    if "qk" in forms:
        result = _fix_qk(result, notes)
    if "ov" in forms:
        result = _fix_ov(result, notes)
    return rewritten(
        "gauge_fix",
        "rounding-exact",
        weights,
        result.to(weights.dtype),
        checked=tuple(
            itertools.chain.from_iterable(CHANNELS_FREE[form].checked for form in forms)
        ),
        notes=(*notes, *untied(weights, result)),
    )


def _why_no_gauge(weights: AttentionWeights, form: Form) -> tuple[str, str]:
    """Return the reason against a gauge, "" if there is a gauge, and advice."""
    if reason := CHANNELS_FREE[form].why_not(weights):
        return reason, ""
    one, other = (weights.chain(side) for side in SIDES_OF[form])
    for side, chain in zip(SIDES_OF[form], (one, other), strict=True):
        if not chain:
            return (
                f"no gauge: no map makes {NAMES[side]}, the form is one matrix",
                "factor it first",
            )
    if form == "qk" and (one[-1].diagonal or other[-1].diagonal):
        return (
            "all heads share one key map and weigh its channels (collaborative), which leaves a diagonal "
            "gauge only"
        ), "expand it first"
    return "", ""


def _fix_qk(weights: AttentionWeights, notes: list[str]) -> AttentionWeights:
    behind = weights.behind_norms()
    q = behind.multiplied("q").repeat(weights.num_heads)
    k = behind.multiplied("k")
    own = q.weight.reshape(k.copies, -1, q.d_out)
    b_Q = q.bias
    basis = joint_basis(own[:, None], k.weight[:, None], "own")
    to_q, to_k = _completed(
        basis,
        own,
        None if b_Q is None else b_Q.reshape(k.copies, -1, q.d_out),
        k.weight,
        k.bias,
    )
    new_q = rebase(weights, "q", to_q, notes)
    if weights.tied("q", "k") and k.copies == weights.num_heads:
        # W Wᵀ = U S Uᵀ: the gauge is orthogonal and common to W_Q and W_K.
        return replace(weights, q=new_q, k=new_q)
    return replace(weights, q=new_q, k=rebase(weights, "k", to_k, notes))


def _fix_ov(weights: AttentionWeights, notes: list[str]) -> AttentionWeights:
    v = weights.behind_norms().multiplied("v")
    W_O = weights.W_O
    own = W_O.mT.reshape(v.copies, -1, v.d_out)
    basis = joint_basis(own[:, None], v.weight[:, None], "common")
    to_o, to_v = _completed(basis, own, None, v.weight, v.bias)
    return replace(
        weights,
        v=rebase(weights, "v", to_v, notes),
        o=rebase(weights, "o", to_o, notes),
    )


def _completed(
    basis: JointBasis,
    own: Float[Tensor, "groups rows r"],
    own_bias: Float[Tensor, "groups heads r"] | None,
    common: Float[Tensor, "groups d r"],
    common_bias: Float[Tensor, "groups r"] | None,
) -> tuple[Float[Tensor, "groups r r"], Float[Tensor, "groups r r"]]:
    """Return G and its inverse transpose, completed for the biases.

    Where the rank of the form is below the number of channels, the basis is not a complete gauge, and a bias
    may act through omitted channels. Biases are rows of the maps for an additional input, always 1: the rank
    of the missing part of the form with these rows is at most the number of spare channels.
    """
    r = own.shape[-1]
    basis = basis.resize(r)
    G = basis.own[:, 0]
    H = basis.common[:, 0]
    if (own_bias is None and common_bias is None) or bool((basis.rank == r).all()):
        return G, H
    own_rows = own if own_bias is None else torch.cat((own, own_bias), dim=1)
    common_rows = (
        common
        if common_bias is None
        else torch.cat((common, common_bias[:, None]), dim=1)
    )
    # The projection outside the basis, and the part of the form with bias rows lost by it.
    left_out = torch.eye(r, dtype=G.dtype, device=G.device) - G @ H.mT
    missing = BilinearForm(own_rows @ left_out, common_rows)
    rounding = max(missing.d_left, missing.d_right) * torch.finfo(G.dtype).eps
    floor = BilinearForm(own_rows, common_rows).spectral_norm() * rounding
    U, S, Vh = missing.svd()
    G = G.clone()
    H = H.clone()
    for group in range(len(G)):
        start = int(basis.rank[group])
        count = min(r - start, int((S[group] > floor[group]).sum()))
        U_g = U[group, :, :count]
        Vh_g = Vh[group, :count]
        root = S[group, :count].rsqrt()
        G[group, :, start : start + count] = (
            left_out[group] @ (common_rows[group].mT @ Vh_g.mT) * root
        )
        H[group, :, start : start + count] = (
            left_out[group].mT @ (own_rows[group].mT @ U_g) * root
        )
    return G, H
