"""Conversion of rewritten layers to their format: single maps q, k, v and o, in sizes allowed by the format.

The number and width of heads are fields of the configuration in some formats, and follow from other fields in
further formats. A file can have another size only if a separate field determines it and no other size depends
on that field.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, final

import torch
from torch import Tensor

from triptych.core.algebra.legality import require_nothing_between
from triptych.core.algebra.norm_folding import fold_norm
from triptych.core.algebra.positions import DisentangledBias
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.weights import SIDES, AttentionWeights, Link, Side
from triptych.core.checkpoints.checkpoint import Checkpoint
from triptych.core.checkpoints.latents import is_latent, latent_ranks, widened_latent
from triptych.core.checkpoints.stored_layers import (
    AttentionLayer,
    MapSizes,
    Place,
    Site,
)
from triptych.core.storage.settings import Settings
from triptych.core.storage.tensors import Tensors
from triptych.errors import DataError

_NAME = "write"
_INPUTS: tuple[Literal["q", "k", "v"], ...] = ("q", "k", "v")
# Tolerance for values that only absorbed a norm's gain, relative to the largest value.
_ROUNDING = 1e-9


@final
@dataclass(frozen=True)
class Resizing:
    """Changes of a configuration for new sizes."""

    settings: dict[str, Any]  # new entries of the configuration, by dotted path
    sites: tuple[Site, ...]  # all layers resized by these entries


def sizes_of(weights: AttentionWeights) -> MapSizes:
    """Return the sizes of a layer in the form of its file."""
    q, v = (
        chain[-1].d_out if chain else weights.d_model
        for chain in (weights.q, weights.v)
    )
    return MapSizes(
        weights.num_heads, weights.num_key_heads, q, v, *latent_ranks(weights)
    )


def resizing(checkpoint: Checkpoint, site: Site, wanted: MapSizes) -> Resizing | None:
    """Return the changes of the configuration for new sizes of a layer, or None if its format is too rigid.

    The result predicts `write_layer`. With None, it pads narrower heads with zeros, writes removed heads as
    zero maps, repeats key-value heads if there are fewer and refuses more of them. All of `sites` must be
    rewritten to the same sizes; otherwise, `write_layer(…, same_sizes=True)` behaves as with None.

    A size is free if a single plain field of the configuration determines it (T5's `d_kv`,
    `num_key_value_heads`; the number of heads if `head_dim` is given) and
        heads: all heads share the values of positions (unlike ALiBi, distance tables) and the gains of norms
            of queries and keys, other parts do not depend on the number of heads (`fixed_heads`), and it
            divides the width of the model, as `transformers` requires;
        groups: all heads share the gains of norms of queries and keys;
        width: values have the same width, and layers with rotary or disentangled positions, or norms of
            queries and keys, are excluded. Through a latent, every even width of queries and keys, even rank
            and width of values is free; the number of rotated channels is fixed.
    """
    place = checkpoint.place(site)
    if place.spec.why_kept:
        return None
    here = place.sizes
    entries = _entries(place, here, wanted)
    if entries is None:
        return None
    changed = Settings({**place.settings.record, **entries}, place.settings.where)
    if _sizes_or_none(place, changed) != wanted:
        return None
    resized = []
    # The entries apply to all layers with the same record: every change must be allowed and as wanted.
    path = path_of_record(checkpoint, place)
    for other in checkpoint.sites:
        at = checkpoint.place(other)
        if path_of_record(checkpoint, at) != path or at.spec.why_kept:
            continue
        old = at.sizes
        new = _sizes_or_none(at, changed)
        if old == new:
            continue
        if new is None or not (
            _follows(old, new, here, wanted)
            and _is_free(at, old, new, checkpoint.tensors)
        ):
            return None
        resized.append(other)
    return Resizing(
        {f"{path}{name}": value for name, value in entries.items()}, tuple(resized)
    )


def _sizes_or_none(place: Place, settings: Settings) -> MapSizes | None:
    """Return a layer's sizes under a configuration; None if it is invalid, such as indivisible widths."""
    try:
        return replace(place, settings=settings).sizes
    except DataError:
        return None


def _entries(place: Place, here: MapSizes, wanted: MapSizes) -> dict[str, int] | None:
    """Return the fields to set, or None if a size does not have a field."""
    spec = place.spec
    settings = place.settings
    found: dict[str, int] = {}
    latent = spec.latent
    turned = place.count(spec.latent.turned) if spec.latent else 0
    plain = latent.plain if latent else place.width
    of_sizes = [
        (here.heads, wanted.heads, spec.heads),
        (here.width - turned, wanted.width - turned, plain),
    ]
    if latent:
        of_sizes.append((here.value_width, wanted.value_width, latent.value))
        of_sizes.append((here.rank or 0, wanted.rank or 0, latent.rank))
        of_sizes.append((here.q_rank or 0, wanted.q_rank or 0, latent.q_rank))
    for old, new, expression in of_sizes:
        if old != new:
            field = _field_read(expression, settings, place.layer)
            if field is None:
                return None
            found[field] = new
    groups = place.chosen(spec.groups) or spec.heads
    after = Settings({**settings.record, **found}, settings.where)
    if after.value(groups, place.layer) != wanted.groups:
        # Choose a field without effect on the number of heads; prefer the field in use.
        fields = [
            a
            for a in _alternatives(groups)
            if _is_plain(a) and a not in _alternatives(spec.heads)
        ]
        read = _field_read(groups, settings, place.layer)
        field = read if read in fields else next(iter(fields), None)
        if field is None:
            return None
        found[field] = wanted.groups
    return found


def _alternatives(expression: str) -> list[str]:
    return [alternative.strip() for alternative in expression.split("|")]


def _is_plain(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z_]\w*", name) is not None


def _field_read(expression: str, settings: Settings, layer: int) -> str | None:
    """Return the field with the current value, or None if it is not a plain field."""
    read = next(
        (a for a in _alternatives(expression) if settings.value(a, layer) is not None),
        "",
    )
    return read if _is_plain(read) else None


def _follows(old: MapSizes, new: MapSizes, here: MapSizes, wanted: MapSizes) -> bool:
    """Return True if another layer changes only sizes that the first layer changes, to the same values."""
    return all(
        now == before or now == asked != first
        for now, before, asked, first in zip(new, old, wanted, here, strict=True)
    )


def _is_free(place: Place, old: MapSizes, new: MapSizes, tensors: Tensors) -> bool:
    spec = place.spec
    settings = place.settings
    layer = place.layer
    position = place.position.kind
    norm = place.head_norm
    gains_of_heads = norm is not None and (
        norm.over == "all heads"
        or any("{head}" in name for name in (norm.q, norm.k))
        or (
            bool(norm.k)
            and len(tensors.infos[f"{place.site.module}.{norm.k}.weight"].shape) > 1
        )
    )
    if old.heads != new.heads:
        if spec.fixed_heads:
            return False
        size = settings.value(spec.size, layer) if spec.size else None
        if isinstance(size, int) and size % new.heads:
            return False
        if gains_of_heads or position in ("alibi", "distance table", "disentangled"):
            return False
    if old.groups != new.groups and gains_of_heads:
        return False
    if spec.latent:
        # `transformers` reads DeepSeek-V2's rotated channels as complex pairs, which need an even offset.
        return not ((new.rank or 0) % 2 or new.width % 2)
    if old.width == new.width:
        return True
    return norm is None and position not in ("rotary", "disentangled")


def path_of_record(checkpoint: Checkpoint, place: Place) -> str:
    """Return the prefix of the fields of a layer's record: "text_config." or ""."""
    for path in _alternatives(place.spec.settings):
        try:
            checkpoint.settings.below(path)
        except DataError:
            continue
        return f"{path}." if path else ""
    raise AssertionError(f"the record of {place.site.name} is not in its configuration")


@final
class Fitting:
    """Conversion of a rewritten layer to its format; see `write_layer` for the arguments."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        before: AttentionLayer,
        after: AttentionWeights,
        kept: Sequence[int] | None,
        same_sizes: bool,
    ) -> None:
        self.checkpoint = checkpoint
        self.layer = before
        self.same_sizes = same_sizes
        self.place = checkpoint.place(before.site)
        self.before = before.weights
        self.after = after
        self.semantics = before.weights.semantics
        # Head i of the rewritten layer is head `kept[i]` of the stored layer.
        self.kept = list(range(after.num_heads)) if kept is None else list(kept)
        self._require_kept(kept is not None)

    def fitted(self) -> AttentionWeights:
        """Return the rewritten layer as single maps q, k, v and o, with the scale of the file's reader."""
        old = sizes_of(self.before)
        whole = (
            self._through_latent() if self.place.spec.latent else self._one_map_a_side()
        )
        self._require_channels_of_old(whole)
        fitted = self._fit_widths(
            self._fit_groups(self._fit_heads(whole, old), old), old
        )
        # The file's reader scales by the configuration's value, or else by 1/√ of the new width.
        narrower = 1.0 if self.place.spec.scale else old.width / sizes_of(fitted).width
        scale = self.before.scale * math.sqrt(narrower)
        if math.isclose(scale, fitted.scale, rel_tol=1e-12):
            return fitted
        return fitted.to(torch.float64).with_scale(scale)

    def _require_kept(self, given: bool) -> None:
        heads = self.before.num_heads
        left = self.after.num_heads
        if left > heads:
            reject(f"there are {left} heads now, and the file has {heads}")
        if left < heads and not given:
            reject(f"{left} of {heads} heads are left, and `kept` does not say which")
        if (
            len(self.kept) != left
            or len(set(self.kept)) != left
            or not set(self.kept) <= set(range(heads))
        ):
            reject(
                f"kept is {self.kept}: it must name {left} different heads of 0 to {heads - 1}"
            )

    def _one_map_a_side(self) -> AttentionWeights:
        for side in SIDES:
            require_nothing_between(_NAME, side, self.after.chain(side)[:-1])
        # Key-value heads need a common number, so keys and values are repeated to the least common multiple.
        links = {}
        for side in SIDES:
            links[side] = replace(self.after.multiplied(side), learned=True, norm=None)
        heads = self.after.num_heads
        groups = math.lcm(links["k"].copies, links["v"].copies)
        return replace(
            self.after,
            q=(links["q"].repeat(heads),),
            k=(links["k"].repeat(groups),),
            v=(links["v"].repeat(groups),),
            o=(links["o"].repeat(heads),),
            norm=None,
            memory_norm=None,
        )

    def _through_latent(self) -> AttentionWeights:
        after = self.after
        # The format is fixed: queries keep their number of maps, too.
        if not is_latent(after) or len(after.q) != len(self.before.q):
            reject(
                f"in {self.checkpoint.written_as}'s format keys and values come through one latent and one "
                "rotary key, and queries as they did; here they do no longer",
                "leave out the step that takes them apart",
            )
        o = (after.multiplied("o").repeat(after.num_heads),)
        evened = {
            side: (*chain[:-1], chain[-1].repeat(after.num_heads))
            for side, chain in (("q", after.q), ("k", after.k), ("v", after.v))
        }
        return replace(after, **evened, o=o, norm=None, memory_norm=None)  # type: ignore[arg-type]

    def _can_resize_to(self, sizes: MapSizes) -> bool:
        return (
            not self.same_sizes
            and resizing(self.checkpoint, self.layer.site, sizes) is not None
        )

    def _fit_heads(self, whole: AttentionWeights, old: MapSizes) -> AttentionWeights:
        if whole.num_heads == old.heads:
            if self.kept != list(range(old.heads)):
                self._require_no_parameters_of_heads()
            return whole
        if self._can_resize_to(
            old._replace(heads=whole.num_heads, groups=whole.k[-1].copies)
        ):
            return whole
        return self._at_old_indices(whole, old)

    def _at_old_indices(
        self, whole: AttentionWeights, old: MapSizes
    ) -> AttentionWeights:
        heads = torch.tensor(self.kept)
        groups = heads // (old.heads // old.groups)
        q, k, v, o = (whole.chain(side)[-1] for side in SIDES)
        filled: dict[Side, Link] = {
            "q": _spread(q, heads, old.heads),
            "o": _spread(o, heads, old.heads),
        }
        both: tuple[tuple[Side, Link], ...] = ("k", k), ("v", v)
        for side, link in both:
            of_heads = link.repeat(whole.num_heads)
            filled[side] = _spread(of_heads, groups, old.groups)
            if not torch.equal(filled[side].weight[groups], of_heads.weight):
                reject(
                    f"{whole.num_heads} of {old.heads} heads are left, in their old places, and some of one "
                    f"group read different key-value heads: the file has {old.groups}",
                    "leave repeat_kv_heads out",
                )
        chains = {
            str(side): (*whole.chain(side)[:-1], link) for side, link in filled.items()
        }
        semantics = replace(
            self.semantics, scale=whole.scale
        )  # parameters of all old heads
        return replace(whole, num_heads=old.heads, semantics=semantics, **chains)  # type: ignore[arg-type]

    def _fit_groups(self, whole: AttentionWeights, old: MapSizes) -> AttentionWeights:
        groups = whole.k[-1].copies
        if groups == old.groups or self._can_resize_to(
            old._replace(heads=whole.num_heads, groups=groups)
        ):
            return whole
        if old.groups % groups:
            # Repetition keeps the function only if every head is repeated as often.
            reject(
                f"there are {groups} key-value heads now, and the file has {old.groups}, which its "
                "configuration "
                + (
                    "is to keep"
                    if self.same_sizes
                    else "has no field to change, or cannot for one layer"
                ),
                f"merge_kv_heads to {old.groups} or fewer",
            )
        return whole.with_even_copies(old.groups)

    def _fit_widths(self, whole: AttentionWeights, old: MapSizes) -> AttentionWeights:
        # Wider heads are refused. Narrower heads are padded with zeros, unless the configuration can change.
        sizes = sizes_of(whole)
        for what, now, there in (
            ("queries and keys", sizes.width, old.width),
            ("values", sizes.value_width, old.value_width),
            ("latents of keys and values", sizes.rank or 0, old.rank or 0),
        ):
            if now > there:
                reject(
                    f"{what} have {now} channels a head now, and the file has {there}",
                    f"truncate to {there} or fewer",
                )
        one_width = sizes.width == sizes.value_width or sizes.rank is not None
        if sizes != old and one_width and self._can_resize_to(sizes):
            return whole
        if sizes.rank is not None:
            return whole if sizes == old else widened_latent(whole, old)
        more_qk = old.width - sizes.width
        more_ov = old.value_width - sizes.value_width
        pad = torch.nn.functional.pad
        return replace(
            whole,
            q=(_widened(whole.q[0], more_qk),),
            k=(_widened(whole.k[0], more_qk),),
            v=(_widened(whole.v[0], more_ov),),
            o=(Link(pad(whole.o[0].weight, (0, 0, 0, more_ov))),),
        )

    def _require_no_parameters_of_heads(self) -> None:
        """Check that reordered heads leave no parameters of single heads behind."""
        positions = self.semantics.positions
        bias = self.semantics.bias
        have_maps = isinstance(bias, DisentangledBias) and not bias.through_maps
        if positions in ("alibi", "relative") or have_maps:
            reject(
                f"the heads are in another order, and {positions} positions, which are each head's own, stay "
                "in theirs",
                "leave permute_heads out",
            )

    def _require_channels_of_old(self, whole: AttentionWeights) -> None:
        """Check that channels are unchanged, in formats with clipping or embeddings of distances."""
        if self.semantics.clip is not None:
            sides = _INPUTS
            why = f"queries, keys and values are clipped at ±{self.semantics.clip:g}"
        elif isinstance(self.semantics.bias, DisentangledBias):
            sides = _INPUTS[:2]
            why = "distances meet queries and keys in their channels"
        else:
            return
        # A folded norm changes channels in a known way: compare with the stored maps after the same folding.
        expected = self.before.to(torch.float64)
        heads = self.kept
        if self.before.norm is not None and self.after.norm is None:
            expected = fold_norm(expected).weights
        for side in sides:
            wanted = expected.per_head(side)[heads]
            found = whole.per_head(side)
            if not _is_near(found, wanted) or not _is_near(
                _or_zeros(whole.head_bias(side), found),
                _or_zeros(expected.head_bias(side), expected.per_head(side))[heads],
            ):
                reject(
                    f"the map of {side} has other channels now, and {why}",
                    "leave the channels as they are",
                )


def reject(reason: str, advice: str = "") -> NoReturn:
    raise RewriteRefusedError(_NAME, reason, advice)


def _spread(link: Link, indices: Tensor, copies: int) -> Link:
    """Scatter the heads of a link to `indices` of a wider link; all other heads are zero maps."""

    def spread(part: Tensor) -> Tensor:
        whole = part.new_zeros(copies, *part.shape[1:])
        whole[indices] = part
        return whole

    return Link(spread(link.weight), None if link.bias is None else spread(link.bias))


def _widened(link: Link, more: int) -> Link:
    if not more:
        return link
    pad = torch.nn.functional.pad
    rows = pad(
        link.weight.mT, (0, 0, 0, more)
    )  # contiguous in the layout `[out, in]` of most formats
    return Link(rows.mT, None if link.bias is None else pad(link.bias, (0, more)))


def _or_zeros(bias: Tensor | None, weight: Tensor) -> Tensor:
    """Return the bias of a link, or zeros `[heads, width]` without a bias."""
    return torch.zeros_like(weight[:, 0, :]) if bias is None else bias


def _is_near(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return float((one - other).abs().max()) <= _ROUNDING * float(other.abs().max())
