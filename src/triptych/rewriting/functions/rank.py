"""Rank reduction of forms: truncations of least loss in a metric."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.core.algebra.legality import (
    CHANNELS_FREE,
    KEY_BIAS_BLIND,
    VALUE_BIAS_PASSES,
    require_last_map,
    require_nothing_between,
    require_one_each,
    with_chains,
)
from triptych.core.algebra.rewritten import (
    Cut,
    RewriteRefusedError,
    Rewritten,
    rewritten,
)
from triptych.core.algebra.weights import AttentionWeights
from triptych.rewriting.functions.biases import fold_value_bias
from triptych.rewriting.functions.channels import (
    SIDES_OF,
    Form,
    one_map,
    rebase,
    untied,
    with_learned_maps,
)
from triptych.rewriting.functions.metric import (
    PRIOR,
    ChannelChange,
    FormMetric,
    Metric,
    require_moments_of,
)
from triptych.rewriting.functions.moments import Moments
from triptych.rewriting.functions.moves import bias_row, measure_move, measure_size
from triptych.rewriting.functions.rotary_maps import RotaryMapsMetric
from triptych.rewriting.functions.rotary_pairs import (
    RotaryHeads,
    RotaryPairsMetric,
    require_rotary,
)

Ranks = int | Sequence[int]  # one rank, or a rank per group of heads
Rotary = Literal["maps", "pairs"]
_ROUNDING = (
    100 * torch.finfo(torch.float64).eps
)  # relative tolerance per channel of the model


def truncate(
    weights: AttentionWeights,
    moments: Moments
    | None = None,  # statistics of a text, to minimise the error of its scores and outputs
    *,
    qk_rank: Ranks | None = None,  # number of pairs if rotary="pairs"
    ov_rank: Ranks | None = None,
    centred: bool
    | None = None,  # subtract means over the text; None: where it is exact
    rotary: Rotary
    | None = None,  # truncation of W_QK in rotary heads; None refuses rotary heads
    longest: int
    | None = None,  # tokens of the longest text of rotary heads; None: unlimited
    prior: float = PRIOR,
) -> Rewritten:
    """Compute the nearest forms of a lower rank per head, in Frobenius norm or by their effect on a text.

    A ≈ (U_r S_r^½)(S_r^½ V_rᵀ), with error √(Σ_{i>r} σ_i²). Heads sharing a key (value) head continue to
    share it: its channels are the first r right singular vectors of [W_QK,1; …; W_QK,n], the nearest for all
    of these heads together. A form stored as one matrix becomes a product. W_Q and W_K of rotary heads are
    truncated before the rotation, or whole rotary pairs become zero.

    Chains of several maps keep their structure where possible: the last map changes. Biases are projected to
    the remaining channels; the output bias absorbs the lost part of the value bias.

    Source: Eckart & Young 1936, doi 10.1007/BF02288367.
    """
    given: dict[Form, Ranks | None] = {"qk": qk_rank, "ov": ov_rank}
    asked = {form: rank for form, rank in given.items() if rank is not None}
    if not asked:
        raise RewriteRefusedError(
            "truncate", "neither qk_rank nor ov_rank is given", "give one of them"
        )
    wide = weights.to(torch.float64)
    notes = list[str]()
    metrics: dict[Form, Metric] = {}
    ranks: dict[Form, list[int]] = {}
    for form, rank in asked.items():
        metric = metrics[form] = _choose_metric(
            wide, form, moments, centred, rotary, longest, prior
        )
        side, count = (
            ("key", wide.num_key_heads)
            if form == "qk"
            else ("value", wide.num_value_heads)
        )
        count = metric.num_groups if isinstance(metric, FormMetric) else count
        said = metric.said
        ranks[form] = require_one_each(
            "truncate",
            f"{form}_rank",
            rank,
            count,
            side,
            said.most,
            f"{said.whole} takes",
        )
    start = _without_fixed_widths(with_learned_maps(wide, notes), asked, notes)
    changes = {form: metric.change(ranks[form]) for form, metric in metrics.items()}
    if "ov" in changes and moments is None:
        start = _with_value_bias_outside(start, changes["ov"], notes)
    result = start
    for form, change in changes.items():
        result = _apply_change(result, form, change, notes)
    exact = True
    bound = 0.0
    cuts = list[Cut]()
    for form, change in changes.items():
        metric = metrics[form]
        shares = Cut.shares(change.lost, change.whole)
        moved = measure_move(start, result, form)
        sized = measure_size(start, form)
        worst = max(shares)
        most = metric.said.most
        far = Cut.shares(moved.form.square(), sized.form.square())
        if moments is None:
            shares = tuple(map(max, shares, far))
        if isinstance(metric, FormMetric) and moments is None:
            worst = float(moved.form.max())
            most = int(metric.basis().rank.max())
        cuts.append(Cut(metric.said.cut, tuple(ranks[form]), most, worst, shares))
        # Centring moves the lost part of the value bias into the output bias, if value biases pass
        # unweighted.
        in_output = change.output is not None and not VALUE_BIAS_PASSES.why_not(weights)
        counted = moved.form if in_output else moved.whole
        exact &= bool((counted <= _ROUNDING * weights.d_model * sized.whole).all())
        bound = max(bound, float(counted.max()))
        if moments is not None and not isinstance(metric, FormMetric):
            notes.append(f"no mean was taken off: {KEY_BIAS_BLIND.why_not(weights)}")
    return rewritten(
        "truncate",
        "rounding-exact" if exact else "bounded",
        weights,
        result.to(weights.dtype),
        checked=tuple(
            itertools.chain.from_iterable(
                metric.said.need.checked for metric in metrics.values()
            )
        ),
        choice=cuts,
        notes=(*notes, *untied(weights, result)),
        bound=0.0 if exact else bound,
        error=None if moments is None else max(cut.worst for cut in cuts),
    )


def measure_energies(
    weights: AttentionWeights,
    form: Form,
    moments: Moments | None = None,
    *,
    centred: bool | None = None,
    rotary: Rotary | None = None,
    longest: int | None = None,
) -> Float[Tensor, "groups k"]:
    """Compute the energy of each channel of the best basis of a form per group of heads: descending, float64.

    The sum of omitted energies is the loss of a rank: out of Σ_i ‖W_QK,i‖² (‖W_OV,i‖²) without moments, out
    of the mean square scores q kᵀ (outputs) on the text with moments. Outputs of heads sharing a value head
    assume equal mixing by all heads. Energies of rotary heads are of keys alone, or of rotary pairs.
    """
    return _choose_metric(
        weights.to(torch.float64), form, moments, centred, rotary, longest
    ).energies()


def _choose_metric(
    weights: AttentionWeights,
    form: Form,
    moments: Moments | None,
    centred: bool | None,
    rotary: Rotary | None,
    longest: int | None,
    prior: float = PRIOR,
) -> Metric:
    """Return the metric of a form; refuse layers that cannot be truncated."""
    if form == "qk" and rotary is not None and weights.semantics.rotary is not None:
        rotation = require_rotary("truncate", weights).of_length(longest)
        kind = RotaryPairsMetric if rotary == "pairs" else RotaryMapsMetric
        metric: Metric = kind(RotaryHeads(weights, rotation, moments, longest))
    else:
        CHANNELS_FREE[form].require(
            "truncate", weights, f"leave {form} out", f"{form}: "
        )
        for side in SIDES_OF[form]:
            require_last_map("truncate", side, weights.chain(side))
        # Fewer channels cannot carry a key bias, so the softmax must cancel it.
        key_bias = weights.head_bias("k") if form == "qk" and moments is None else None
        if key_bias is not None and bool(key_bias.any()):
            about = "qk: fewer channels cannot carry the key bias, and "
            KEY_BIAS_BLIND.require("truncate", weights, about=about)
        off = moments is not None and _is_centred(weights, form, centred)
        metric = FormMetric(weights, form, moments, off, prior)
    if moments is not None:
        require_moments_of("truncate", weights, moments, [form])
    return metric


def _is_centred(weights: AttentionWeights, form: Form, asked: bool | None) -> bool:
    if asked is False:
        return False
    reason = KEY_BIAS_BLIND.why_not(weights) if form == "qk" else ""
    if form == "ov" and "o" not in weights.bias_slots:
        reason = VALUE_BIAS_PASSES.against["no_output_bias"]
    if asked and reason:
        about = f"{form}: the mean cannot be taken off: "
        raise RewriteRefusedError("truncate", about + reason, "pass centred=False")
    return not reason


def _without_fixed_widths(
    weights: AttentionWeights, forms: Collection[Form], notes: list[str]
) -> AttentionWeights:
    """Multiply several output maps into one map if the layer could not store them."""
    fixed = any(not link.learned for link in weights.o)
    if len(weights.o) < 2 or ("ov" not in forms and not (fixed and "qk" in forms)):
        return weights
    require_nothing_between("truncate", "o", weights.o[:-1])
    return replace(weights, o=(one_map(weights, "o", notes),))


def _with_value_bias_outside(
    weights: AttentionWeights, change: ChannelChange, notes: list[str]
) -> AttentionWeights:
    """Move the value bias into the output bias if the remaining channels cannot carry it."""
    row = bias_row(weights, "ov")
    lost = (row - bias_row(_apply_change(weights, "ov", change, []), "ov")).norm(dim=-1)
    if float(lost.max()) <= _ROUNDING * weights.d_model * float(row.norm(dim=-1).max()):
        return weights
    # Without a legal fold, part of the bias is lost, with a note.
    try:
        folded = fold_value_bias(weights).weights
    except RewriteRefusedError as error:
        notes.append(
            f"the value bias lost what does not fit the channels left: {error.reason}"
        )
        return weights
    notes.append(
        "the value bias does not fit the channels left: it went into that of the output"
    )
    return folded


def _apply_change(
    weights: AttentionWeights, form: Form, change: ChannelChange, notes: list[str]
) -> AttentionWeights:
    """Return the layer with changed channels of a form."""
    # `change.own` applies to queries and output, `change.common` to keys and values.
    own = ("q", "o")
    new = with_chains(
        weights,
        {
            side: rebase(
                weights,
                side,
                change.own if side in own else change.common,
                notes,
                change.own_shift if side in own else change.common_shift,
            )
            for side in SIDES_OF[form]
        },
    )
    if change.output is None:
        return new
    return replace(
        new, o_bias=change.output if new.o_bias is None else new.o_bias + change.output
    )
