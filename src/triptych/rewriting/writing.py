"""Rewritten attention as the tensors of its checkpoint, in the checkpoint's format.

A layer is converted to sizes supported by the format, written through its `LayerMap`, and cast once to the
stored dtype of each tensor. Anything else is refused.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor

from triptych.core.algebra.forms import are_finite
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.semantics import HeadGate
from triptych.core.algebra.weights import SIDES, AttentionWeights
from triptych.core.checkpoints.checkpoint import Checkpoint
from triptych.core.checkpoints.fitted_weights import Fitting, reject, resizing, sizes_of
from triptych.core.checkpoints.latents import is_latent, latent_parts
from triptych.core.checkpoints.layer_map import LayerMap, layer_map
from triptych.core.checkpoints.stored_layers import AttentionLayer, MapSizes
from triptych.rewriting.as_latent import as_latent


@final
@dataclass(frozen=True, eq=False)
class WrittenLayer:
    """Changes of a layer in its checkpoint."""

    # changed tensors by name, in their stored dtype and shape
    tensors: dict[str, Tensor]
    # new entries of `config.json`, by dotted path. All layers sharing a configuration must agree on them (see
    # `resizing`).
    settings: dict[str, Any]
    # the layer in the format's sizes, padding included (on the "meta" device), for its costs
    shapes: AttentionWeights
    # removed tensors, with the names of their replacements
    replaced: dict[str, tuple[str, ...]] = field(default_factory=dict)


def write_layer(
    checkpoint: Checkpoint,
    before: AttentionLayer,
    after: AttentionWeights,
    *,
    kept: Sequence[int] | None = None,
    same_sizes: bool = False,
) -> WrittenLayer:
    """Convert a rewritten layer to tensors of its checkpoint."""
    # Formats have fixed slots: a removed bias is stored as zeros, a folded norm as gain 1 and shift 0. New
    # head sizes are stored if the configuration allows; otherwise heads are padded, zeroed or repeated.
    try:
        return _LayerWriter(
            Fitting(checkpoint, before, after, kept, same_sizes)
        ).write()
    except RewriteRefusedError as error:
        raise error.at(before.site.name) from None


@final
class _LayerWriter:
    def __init__(self, fitting: Fitting) -> None:
        self.fitting, self.checkpoint, self.tensors = (
            fitting,
            fitting.checkpoint,
            fitting.checkpoint.tensors,
        )
        self.layer = fitting.layer
        self.before = fitting.before
        self.after = fitting.after
        self.place = fitting.place
        self.semantics = fitting.semantics
        self.kept = fitting.kept

    def write(self) -> WrittenLayer:
        in_place = self.kept == list(range(self.before.num_heads))
        if in_place and _are_same_weights(self.before, self.after):
            return WrittenLayer({}, {}, self.before.mapped(_to_meta))
        if why := self.place.spec.why_kept:
            reject(why, "leave this layer out")
        if is_latent(self.after) and not self.place.spec.latent:
            return self._as_latent()
        # Other layers fit the sizes of the format.
        fitted = self.fitting.fitted()
        old = sizes_of(self.before)
        new = sizes_of(fitted)
        found = resizing(self.checkpoint, self.layer.site, new) if new != old else None
        stored = layer_map(self.place, self.tensors, new)
        ours = (
            self._maps(fitted, stored)
            | self._norm()
            | dict(self._gains(old, new, stored))
        )
        if self.semantics.sinks is not None and len(self.kept) == new.heads:
            ours["sinks"] = self.semantics.sinks[self.kept]
        if (gate := self.after.semantics.gate) is not None:
            ours |= self._gate(gate, new.heads)
        changed = (
            (name, self._changed(name, full)) for name, full in stored.write(ours)
        )
        tensors = {name: tensor for name, tensor in changed if tensor is not None}
        shapes = _with_biases_of(self.before, fitted.mapped(_to_meta))
        return WrittenLayer(tensors, found.settings if found else {}, shapes)

    def _as_latent(self) -> WrittenLayer:
        found = as_latent(self.checkpoint, self.layer, self.after)
        changed = (
            (name, self._changed(name, full))
            for name, full in found.stored.write(found.parts | self._norm())
        )
        tensors = {name: tensor for name, tensor in changed if tensor is not None}
        return WrittenLayer(
            tensors, found.settings, found.weights.mapped(_to_meta), found.replaced
        )

    def _maps(self, fitted: AttentionWeights, stored: LayerMap) -> dict[str, Tensor]:
        """Return the maps and their biases, with zeros in slots of removed biases."""
        if self.place.spec.latent:
            ours = latent_parts(fitted)
        else:
            ours = {side: fitted.chain(side)[0].weight for side in SIDES[:3]}
            biases = {f"{side}.bias": fitted.chain(side)[0].bias for side in SIDES[:3]}
            ours |= {name: bias for name, bias in biases.items() if bias is not None}
        ours["o"] = fitted.o[0].weight
        if fitted.o_bias is not None:
            ours["o.bias"] = fitted.o_bias
        for name in stored.parts:
            side = name.removesuffix(".bias")
            if name != side and side in ours:
                zeros = torch.zeros_like(
                    ours[side][0, 0] if side == "o" else ours[side][:, 0]
                )
                ours.setdefault(name, zeros)
        # Nonzero parts without a slot are refused; zero parts are dropped.
        for name in ours.keys() - stored.parts:
            if bool(ours[name].any()):
                side = name.removesuffix(".bias")
                reject(
                    f"the map of {side} has a bias now, and the format has no place for one",
                    "leave out the step that makes it",
                )
            del ours[name]
        return ours

    def _norm(self) -> dict[str, Tensor]:
        """Return gain 1 and shift 0 if the norm was folded."""
        norm = self.before.norm
        if norm is None or self.after.norm is not None:
            return {}
        at = self.place.norm_module
        for other in self.checkpoint.sites:
            if (
                other != self.layer.site
                and at == self.checkpoint.place(other).norm_module
            ):
                reject(
                    f"the norm {at} was folded, and {other.name} reads it too",
                    "leave fold_norm out",
                )
        found = {"norm": torch.full_like(norm.weight, 1 - norm.offset)}
        return (
            found
            if norm.bias is None
            else found | {"norm.bias": torch.zeros_like(norm.bias)}
        )

    def _gains(
        self, old: MapSizes, new: MapSizes, stored: LayerMap
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield per-head gains and shifts of query and key norms in the new order of heads."""
        heads = torch.tensor(self.kept)
        # A changed number of heads is written only without per-head gains.
        if not len(heads) == new.heads == old.heads or self.kept == list(
            range(old.heads)
        ):
            return
        groups = (heads // (old.heads // old.groups)).view(old.groups, -1)
        for part, norm, order in (
            ("q_norm", self.semantics.q_norm, heads),
            ("k_norm", self.semantics.k_norm, groups[:, 0]),
        ):
            if norm is None or not norm.per_head:
                continue
            if not bool((groups == groups[:, :1]).all()):
                reject(
                    "heads of several groups are next to each other now, and the gains of their keys "
                    "belong to each group",
                    "leave permute_heads out",
                )
            for name in (part, f"{part}.bias"):
                if (name,) in stored.entries:
                    (gains,) = stored.entries[(name,)].read(
                        lambda name, _: self.tensors.read(name)
                    )
                    yield name, gains.view(len(order), -1)[order].view(gains.shape)

    def _gate(self, gate: HeadGate, heads: int) -> dict[str, Tensor]:
        """Return the gates, stored with the queries; removed heads get unused zeros."""
        parts = {"gate": gate.weight.mT} | (
            {} if gate.bias is None else {"gate.bias": gate.bias}
        )
        if len(self.kept) == heads:
            return parts
        return {
            name: part.new_zeros(heads, *part.shape[1:]).index_copy(
                0, torch.tensor(self.kept), part
            )
            for name, part in parts.items()
        }

    def _changed(self, name: str, full: Tensor) -> Tensor | None:
        """Return a tensor in its stored form; None if it is unchanged."""
        if (
            name not in self.tensors.infos
        ):  # a tensor of another format, in the dtype of the maps
            return full.to(self.before.dtype).contiguous()
        dtype = self.tensors.infos[name].dtype
        new = full.to(dtype).contiguous()
        old = self.tensors.read(name)
        if torch.equal(new, old):
            return None
        if how := self.tensors.packed_as(name):
            reject(
                f"tensor {name} is stored as {how}, which cannot take other numbers",
                "rewrite the checkpoint it was made from",
            )
        if not are_finite(new) and are_finite(old):
            largest = (
                f"up to {float(full.abs().max()):.3g}" if are_finite(full) else "now"
            )
            reject(
                f"tensor {name}: numbers {largest} do not fit {dtype}".replace(
                    "torch.", ""
                ),
                "store the checkpoint in bfloat16 or float32 first",
            )
        return new


def _to_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def _with_biases_of(
    before: AttentionWeights, fitted: AttentionWeights
) -> AttentionWeights:
    """Return the shapes of a layer with a bias in every slot of the file."""
    chains = {}
    for side in SIDES[:3]:
        (*first, link), there = fitted.chain(side), before.chain(side)[-1].bias
        bias = None if there is None else link.weight.new_empty(link.copies, link.d_out)
        chains[str(side)] = (*first, replace(link, bias=bias))
    o_bias = (
        None
        if before.o_bias is None
        else fitted.o[0].weight.new_empty(before.o_bias.shape)
    )
    return replace(fitted, o_bias=o_bias, **chains)  # type: ignore[arg-type]


def _are_same_weights(one: AttentionWeights, other: AttentionWeights) -> bool:
    """Return True if two layers have equal values in equal maps."""
    if one is other:
        return True
    alike = one.scale == other.scale and (one.norm is None) == (other.norm is None)
    alike = alike and (one.o_bias is None) == (other.o_bias is None)
    if not alike or any(
        len(one.chain(side)) != len(other.chain(side)) for side in SIDES
    ):
        return False
    mine = list(one.tensors())
    theirs = list(other.tensors())
    return len(mine) == len(theirs) and all(map(_are_equal, mine, theirs))


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have equal values, compared in float64 if dtypes differ."""
    if one.dtype == other.dtype or one.shape != other.shape:
        return torch.equal(one, other)
    return all(
        torch.equal(a.double(), b.double()) for a, b in zip(one, other, strict=True)
    )
