"""Keys and values of all heads from one latent, plain or in the parameterisation of DeepSeek's models.

DeepSeek's layer normalises the latent, y W^D / rms(y W^D). It also has one rotary key for all heads. Fully
rotated keys are concatenated into this key, with the frequency of each pair of channels unchanged. The norm
of a small latent is nearly constant: √(mean c² + ε) ≈ √ε.

Source: DeepSeek-AI 2024, arXiv 2405.04434; Meng et al. 2025, arXiv 2502.07864 (conversion of grouped heads).
"""

import math
from dataclasses import replace
from typing import Literal, final

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from triptych.core.algebra.forms import BilinearForm
from triptych.core.algebra.legality import (
    DECOUPLED,
    ONE_LATENT,
    require_finite,
    require_nothing_between,
    require_whole_number,
    unchanged,
)
from triptych.core.algebra.positions import OtherFrequencies, RotaryEmbedding
from triptych.core.algebra.rewritten import RewriteRefusedError, Rewritten, rewritten
from triptych.core.algebra.semantics import HeadNorm
from triptych.core.algebra.weights import SIDES, AttentionWeights, Chain, Link
from triptych.rewriting.functions.channels import (
    FORMS,
    NAMES,
    in_working_precision,
    one_map,
)
from triptych.rewriting.functions.metric import gram_root
from triptych.rewriting.functions.moments import Moments
from triptych.rewriting.functions.moves import measure_move
from triptych.rewriting.functions.rewrite import LayerRewrite, LayerToRewrite

# Epsilon of the latent norm in DeepSeek's models, and the largest relative deviation of its divisor from a
# constant.
NORM_EPS = 1e-6
NORM_ERROR = 2.0**-30


@final
class ToLatent(LayerRewrite):
    """Make keys and values of all heads from one latent."""

    name = "to_latent"
    tier = "rounding-exact, bounded with a `rank` or a `format`"
    requires = (ONE_LATENT, DECOUPLED)
    place = 9
    resizes = True

    rank: int | None = Field(
        None, ge=1, description="width of the latent; by default as large as it must be"
    )
    format: Literal["deepseek_v3"] | None = Field(
        None, description="the format whose latent is made; the file gets this format"
    )

    on_text: bool = Field(
        False, description="with `rank`: keep the directions that matter on the text"
    )

    @model_validator(mode="after")
    def _text_for_a_rank(self) -> "ToLatent":
        if self.on_text and self.rank is None:
            raise ValueError("on_text goes with rank")
        return self

    @property
    def needs_text(self) -> bool:
        return self.on_text

    def apply(self, layer: LayerToRewrite) -> Rewritten:
        weights = layer.weights
        moments = layer.moments if self.on_text else None
        if any(link.norm is not None for link in weights.k[:1]):
            return narrow_latent(weights, rank=self.rank, moments=moments)
        if self.format is not None:
            return decouple(weights, rank=self.rank, moments=moments)
        if self.on_text:
            raise RewriteRefusedError(
                self.name, "on_text goes with a format, or with a layer's latent"
            )
        return to_latent(weights, rank=self.rank)


def to_latent(weights: AttentionWeights, *, rank: int | None = None) -> Rewritten:
    """Compute keys and values of all heads from one latent: `W_K,i = W^D U_i^K`, `W_V,i = W^D U_i^V`.

    At full rank g (d_k + d_v), W^D is [W_K,1 … W_K,g | W_V,1 … W_V,g] and the U_i select columns. At lower
    ranks, W^D and the U_i are the nearest product of this rank, by SVD, with √σ in each factor.
    """
    ONE_LATENT.require("to_latent", weights)
    _require_latent_maps(weights)
    chains = (weights.k, weights.v)
    if (
        rank is None
        and all(len(chain) == 2 for chain in chains)
        and weights.k[0] is weights.v[0]
    ):
        return unchanged(
            "to_latent",
            weights,
            f"keys and values have one latent, of {weights.k[0].d_out}",
        )
    notes: list[str] = []
    working = in_working_precision(weights)
    q, k, v, o = (one_map(working, side, notes) for side in SIDES)
    tied = weights.tied("k", "v")
    if tied:
        notes.append("keys and values had one map: the latent has it once")
    if weights.tied("q", "k"):
        notes.append("queries got a map of their own")
    # [d_model, full], all heads concatenated.
    joined = torch.cat(
        [link.weight.transpose(0, 1).flatten(1) for link in ((k,) if tied else (k, v))],
        dim=1,
    )
    d_model, full = joined.shape
    of_keys = k.copies * k.d_out
    of_values = v.copies * v.d_out
    rank = min(d_model, full) if rank is None else rank
    require_whole_number("to_latent", "rank", rank)
    _require_latent_rank(rank, d_model, full)
    require_finite("to_latent", weights)
    W_D, U, needed = _low_rank_product(joined, rank)
    up_k, up_v = (
        Link(
            part.reshape(rank, link.copies, -1).transpose(0, 1).contiguous(), link.bias
        )
        for part, link in ((U[:, :of_keys], k), (U[:, full - of_values :], v))
    )
    heads = weights.num_heads
    down = Link(W_D[None])
    result = replace(
        working,
        q=(q.repeat(heads),),
        k=(down, up_k.repeat(heads)),
        v=(down, up_v.repeat(heads)),
        o=(o.repeat(heads),),
    )
    exact = needed <= rank
    moves = (
        [] if exact else [measure_move(working, result, form).whole for form in FORMS]
    )
    return rewritten(
        "to_latent",
        "rounding-exact" if exact else "bounded",
        weights,
        result.to(weights.dtype),
        checked=ONE_LATENT.checked,
        choice=f"a latent of {rank}; keys and values side by side are {d_model} × {full}, of rank {needed}"
        if rank < full
        else f"a latent of {rank}: all keys and values side by side",
        notes=tuple(notes),
        bound=max((float(one.max()) for one in moves), default=0.0),
    )


def decouple(
    weights: AttentionWeights,
    *,
    rank: int | None = None,
    moments: Moments | None = None,
) -> Rewritten:
    """Compute keys and values as in DeepSeek's layers: a normalised latent plus a separate rotary key.

    The rotary channels of all key heads form one key, and queries are zero in the channels of other heads.
    The latent contains values and unrotated key channels. A lower rank takes their nearest approximation in
    Frobenius norm, or with moments the nearest on the text.
    """
    DECOUPLED.require("to_latent", weights)
    _require_latent_maps(weights)
    rotation = weights.semantics.rotary
    assert rotation is not None
    notes: list[str] = []
    heads = weights.num_heads
    pad = torch.nn.functional.pad
    q, k, v, o = (one_map(weights.to(torch.float64), side, notes) for side in SIDES)
    q = q.repeat(heads)
    groups = torch.arange(heads) // (heads // k.copies)
    first, second = rotation.pairs
    plain = sorted({*range(q.d_out)} - {*first, *second})
    joined = torch.cat(
        [_join_copies(k.weight[..., plain]), _join_copies(v.weight)], dim=1
    )
    rank = min(joined.shape) if rank is None else rank
    _require_latent_rank(rank, *joined.shape)
    require_finite("to_latent", weights)
    W_D, U, needed = _low_rank_product(joined, rank)
    if moments is not None and rank < needed:
        U = (
            torch.linalg.eigh(_require_served(moments, len(U.mT)))
            .eigenvectors[:, -rank:]
            .mT
        )
        W_D = joined @ U.mT
    U_K, U_V = (
        part.repeat_interleave(heads // len(part), dim=0)
        for part in _split_copies(U, (k.copies, len(plain)), (v.copies, v.d_out))
    )
    turned = torch.cat(
        [_join_copies(k.weight[..., side]) for side in (first, second)], dim=1
    )
    own = torch.nn.functional.one_hot(groups, k.copies).to(q.weight.dtype)
    spread = [
        (own[:, None, :, None] * q.weight[:, :, None, side]).flatten(2)
        for side in (first, second)
    ]
    # A small latent makes the divisor of its norm nearly constant; the gain of the norm restores the scale.
    small, error = _smallness(weights, W_D)
    norm = HeadNorm(
        NORM_EPS, W_D.new_full((rank,), NORM_EPS**0.5 / small), channels=rank
    )
    down = Link(torch.cat([W_D * small, turned], dim=1)[None], norm=norm)
    passed = pad(torch.eye(turned.shape[1], dtype=W_D.dtype), (0, 0, rank, 0)).expand(
        heads, -1, -1
    )
    more = (0, 0, 0, turned.shape[1])
    result = replace(
        weights.to(torch.float64),
        q=(Link(torch.cat([q.weight[..., plain], *spread], dim=2)),),
        k=(down, Link(torch.cat([pad(U_K, more), passed], dim=2))),
        v=(down, Link(pad(U_V, more))),
        o=(o.repeat(heads),),
        semantics=replace(
            weights.semantics, rotary=_repeated(rotation, k.copies, len(plain))
        ),
    )
    whole = BilinearForm(v.repeat(heads).weight, result.W_O.mT)
    moves = [
        BilinearForm(W_D @ U_V, result.W_O.mT).difference_norm(whole)
        + error * whole.norm()
    ]
    if plain:
        whole = BilinearForm(q.weight[..., plain], k.repeat(heads).weight[..., plain])
        moves.append(
            BilinearForm(whole.left, W_D @ U_K).difference_norm(whole)
            + error * whole.norm()
        )
    return rewritten(
        "to_latent",
        "bounded",
        weights,
        result.to(weights.dtype),
        checked=DECOUPLED.checked,
        choice=f"a latent of {rank} for {joined.shape[1]} channels of rank {needed}, and a rotary key of "
        f"{turned.shape[1]} for all heads; the norm divides by a constant but for {error:.1e}",
        notes=tuple(notes),
        bound=max(float(one.max()) for one in moves),
    )


def _join_copies(maps: Float[Tensor, "copies d width"]) -> Float[Tensor, "d all"]:
    return maps.transpose(0, 1).flatten(1)


def _split_copies(
    maps: Float[Tensor, "rows all"], *sizes: tuple[int, int]
) -> list[Tensor]:
    """Split concatenated maps into parts `[copies, rows, width]`."""
    parts = torch.split(maps, [copies * width for copies, width in sizes], dim=1)
    return [
        part.reshape(len(maps), *size).transpose(0, 1)
        for part, size in zip(parts, sizes, strict=True)
    ]


def _require_served(moments: Moments, width: int) -> Float[Tensor, "width width"]:
    if moments.served is None or len(moments.served) != width:
        raise RewriteRefusedError(
            "to_latent", f"the moments are not of the {width} channels of a latent"
        )
    return moments.served


def _smallness(
    weights: AttentionWeights, W_D: Float[Tensor, "d rank"]
) -> tuple[float, float]:
    """Return a power-of-two scale of a latent far below its norm's epsilon, and the remaining error.

    The output of an RMSNorm has norm at most √d before its gain.
    """
    norm, (d_model, rank) = weights.norm, W_D.shape
    gained = (
        W_D
        if norm is None
        else W_D * (norm.offset + norm.weight.to(W_D.dtype))[:, None]
    )
    largest = max(
        float(torch.linalg.matrix_norm(gained, 2)) ** 2 * d_model / rank,
        torch.finfo(W_D.dtype).tiny,
    )
    small = 2.0 ** math.floor(math.log2(2 * NORM_ERROR * NORM_EPS / largest) / 2)
    return small, small**2 * largest / (2 * NORM_EPS)


def _repeated(rotation: RotaryEmbedding, times: int, start: int) -> RotaryEmbedding:
    """Return the rotation of concatenated keys: first channels of all keys, then second channels."""
    long = rotation.long
    if isinstance(long, OtherFrequencies):
        long = replace(long, frequencies=long.frequencies.repeat(times))
    found = rotation.frequencies.repeat(times)
    return replace(
        rotation, frequencies=found, pairing="halves", start=start, long=long
    )


def narrow_latent(
    weights: AttentionWeights,
    *,
    rank: int | None = None,
    moments: Moments | None = None,
) -> Rewritten:
    """Narrow a normalised latent to the channels with the largest effect on the keys and values of all heads.

    For the normalised latent n, the best approximation of n U is the truncated SVD of R U with RᵀR = E[nᵀn],
    or R = 1 without moments: n U ≈ n R⁻¹ A_r S_r Bᵀ. P is an orthonormal basis of R⁻¹ A_r. The norm then
    averages over the remaining channels: c P / rms(c P) is n P up to a token-dependent factor, and the
    following maps absorb the root mean square of n P.
    """
    norm = weights.k[0].norm
    down = weights.k[0]
    if (
        norm is None
        or norm.channels is None
        or len(weights.k) != 2
        or len(weights.v) != 2
    ):
        raise RewriteRefusedError(
            "to_latent", "the norm after map 1 of k is not that of a latent"
        )
    if norm.centred or norm.bias is not None:
        raise RewriteRefusedError(
            "to_latent", "the norm of the latent takes a mean off, or has a bias"
        )
    had = norm.channels
    if rank is None or rank >= had:
        return unchanged(
            "to_latent", weights, f"keys and values have one latent, of {had}"
        )
    wide = weights.to(torch.float64).behind_norms()
    (k_up,), (v_up,) = wide.k, wide.v
    turned = down.d_out - had
    used = (k_up.weight[:, :had, : k_up.d_out - turned], v_up.weight[:, :had])
    made = torch.cat([_join_copies(part) for part in used], dim=1)
    R = (
        torch.eye(had, dtype=made.dtype)
        if moments is None
        else gram_root(_require_served(moments, had))
    )
    # The truncated SVD in the metric of the moments.
    A, S, Bh = torch.linalg.svd(R @ made, full_matrices=False)
    back = torch.linalg.pinv(R) @ A[:, :rank]
    best = back * S[:rank] @ Bh[:rank]
    P = torch.linalg.qr(back).Q
    factor = float((R @ P).square().sum() / rank) ** 0.5
    kept = torch.block_diag(P, torch.eye(turned, dtype=P.dtype))  # type: ignore[no-untyped-call]
    bias = None if down.bias is None else down.bias.to(P.dtype) @ kept
    new = Link(
        down.weight.to(P.dtype) @ kept, bias, replace(norm, weight=None, channels=rank)
    )
    sizes = [(part.shape[0], part.shape[2]) for part in used]

    def with_ups(latent: Tensor, down: Chain) -> AttentionWeights:
        """Build the layer from the up-projections of a latent, `[latent, all]`."""
        rows = torch.nn.functional.pad
        k_part, v_part = (
            rows(part, (0, 0, 0, turned)) for part in _split_copies(latent, *sizes)
        )
        passed = rows(torch.eye(turned, dtype=P.dtype), (0, 0, len(latent), 0)).expand(
            len(k_part), -1, -1
        )
        k = (*down, Link(torch.cat([k_part, passed], dim=2), k_up.bias))
        return replace(wide, k=k, v=(*down, Link(v_part, v_up.bias)))

    moved = with_ups(best, ())
    moves = [measure_move(wide, moved, form).whole for form in FORMS]
    new_ups = with_ups(P.mT @ best * factor, (new,))
    result = replace(weights.to(torch.float64), k=new_ups.k, v=new_ups.v)
    lost = float((R @ (made - best)).norm() / (R @ made).norm())
    return rewritten(
        "to_latent",
        "bounded",
        weights,
        result.to(weights.dtype),
        checked=("the norm of the latent has no bias and takes no mean off",),
        choice=f"a latent of {rank} of {had}, which leaves out {lost:.3g} of what is made of it"
        + ("" if moments is None else " on the text"),
        bound=max(float(one.max()) for one in moves),
    )


def _require_latent_rank(rank: int, d_model: int, full: int) -> None:
    if not (1 <= rank <= min(d_model, full) or rank == full):
        whole = f", or {full} as they are" if full > d_model else ""
        raise RewriteRefusedError(
            "to_latent",
            f"rank is {rank}: keys and values side by side are {d_model} × {full}, which takes 1 to "
            f"{min(d_model, full)}{whole}",
        )


def _require_latent_maps(weights: AttentionWeights) -> None:
    for side in ("k", "v"):
        if not weights.chain(side):
            raise RewriteRefusedError(
                "to_latent",
                f"no map makes {NAMES[side]}: they are the input itself",
                "factor it first",
            )
    for side in SIDES:
        require_nothing_between("to_latent", side, weights.chain(side)[:-1])


def _low_rank_product(
    whole: Float[Tensor, "d_model full"], rank: int
) -> tuple[Float[Tensor, "d_model rank"], Float[Tensor, "rank full"], int]:
    """Return two factors of the nearest matrix of rank `rank`, and the rank of `whole`."""
    d_model, full = whole.shape
    if rank == full:
        return whole, torch.eye(full, dtype=whole.dtype, device=whole.device), full
    U, S, Vh = torch.linalg.svd(whole, full_matrices=False)
    needed = int(S.gt(S[0] * max(d_model, full) * torch.finfo(S.dtype).eps).sum())
    largest = U.gather(0, U.abs().argmax(dim=0, keepdim=True))
    root = torch.where(largest < 0, -1.0, 1.0).to(S.dtype) * S.sqrt()
    return U[:, :rank] * root[:, :rank], root[:, :rank].mT * Vh[:rank], needed
