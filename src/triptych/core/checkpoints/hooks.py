"""Family code that TOML cannot express, selected by `hook` in a family file."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from triptych.core.algebra.forms import at_least_float32
from triptych.core.algebra.positions import DisentangledBias, ScoreBias
from triptych.core.algebra.weights import Link
from triptych.core.checkpoints.layer_map import LayerMap, Take, head_rows, module_map
from triptych.core.checkpoints.stored_layers import Place
from triptych.core.checkpoints.stored_positions import yarn_magnitude
from triptych.core.storage.settings import Settings
from triptych.core.storage.tensors import Tensors
from triptych.errors import DataError, UsageError
from triptych.untrusted import shown


class Hook(ABC):
    fields: tuple[str, ...] = ()  # fields of the configuration that the hook reads

    @abstractmethod
    def scale(self, place: Place, width: float) -> float:
        """Return the factor of the scores, instead of 1/√width."""

    def bias(
        self, place: Place, tensors: Tensors, take: Take, q: Link, k: Link, scale: float
    ) -> ScoreBias | None:
        """Return the positional bias of the scores, from the last maps of queries and keys."""
        return None


@final
class GPT2(Hook):
    """Division of the scores of layer n by n + 1."""

    fields = ("scale_attn_by_inverse_layer_idx",)

    def scale(self, place: Place, width: float) -> float:
        times = (
            1 / (place.layer + 1)
            if place.holds("scale_attn_by_inverse_layer_idx")
            else 1.0
        )
        return times / math.sqrt(width)


@final
class DeepSeek(Hook):
    """Scores multiplied by the square of YaRN's magnitude, if `mscale_all_dim` is set."""

    def scale(self, place: Place, width: float) -> float:
        scaling = Settings(
            place.rope_scaling, f"{place.settings.where}, scaling of rope"
        )
        if not scaling.value("mscale_all_dim") or scaling.value("rope_type | type") in (
            None,
            "default",
        ):
            return 1 / math.sqrt(width)
        magnitude = yarn_magnitude(
            scaling.number("factor"), scaling.number("mscale_all_dim")
        )
        return magnitude**2 / math.sqrt(width)


@final
class DeBERTa(Hook):
    """Embeddings of distances, mapped by separate maps or by the maps of queries and keys."""

    fields = (
        "pos_att_type",
        "max_relative_positions",
        "norm_rel_ebd",
        "layer_norm_eps",
        "position_buckets",
    )

    def scale(self, place: Place, width: float) -> float:
        # DeBERTa's first version counts the addends even where positions are not disentangled.
        counted = (
            place.position.kind == "disentangled"
            or place.value("model_type") == "deberta"
        )
        addends = 1 + len(_parts(place)) if counted else 1
        return 1 / math.sqrt(width) / math.sqrt(addends)

    def bias(
        self, place: Place, tensors: Tensors, take: Take, q: Link, k: Link, scale: float
    ) -> ScoreBias | None:
        spec = place.position
        if spec.kind != "disentangled":
            return None
        parts = _parts(place)
        if not parts:
            return None
        longest = _above_0(place, "max_relative_positions") or place.count(
            "max_position_embeddings"
        )
        buckets = _above_0(place, spec.buckets) if spec.buckets else None
        span = buckets or longest
        if buckets and not 0 < buckets // 2 < longest - 1:
            raise DataError(
                f"{place.settings.where}: {buckets} buckets of distances up to {longest}: half of them are "
                "for one distance each, and at least 1 and fewer than the longest are needed"
            )
        rows = take(place.beside(spec.table), (None, k.d_in))
        if len(rows) < 2 * span:
            raise DataError(
                f"{tensors.name}, tensor {place.beside(spec.table)}: {len(rows)} rows, "
                f"where {2 * span:,} are used"
            )
        # Values derived from stored values are computed in float32 or wider.
        table = _normed(place, take, at_least_float32(rows[: 2 * span]))
        shared = bool(spec.shared_maps) and place.holds(spec.shared_maps)

        def through(link: Link, own: str) -> Tensor:
            used = link if shared else _link(place, tensors, take, own, link)
            bias = None if used.bias is None else at_least_float32(used.bias)
            return replace(used, weight=at_least_float32(used.weight), bias=bias)(
                table[None, None]
            )[0]

        return DisentangledBias(
            keys=through(k, spec.key_map) if "c2p" in parts else None,
            queries=through(q, spec.query_map) if "p2c" in parts else None,
            span=span,
            max_distance=longest if buckets else None,
            scale=scale,
            through_maps=shared,
        )


def _above_0(place: Place, expression: str) -> int | None:
    """Return a count, or None if it is missing, 0 or negative."""
    found = place.optional_number(expression)
    return None if found is None or found <= 0 else place.count(expression)


def _parts(place: Place) -> list[str]:
    """Return the products added to the scores, out of "c2p" and "p2c"."""
    found = place.value("pos_att_type")
    found = (
        [part.strip() for part in found.lower().split("|")]
        if isinstance(found, str)
        else found or []
    )
    if not isinstance(found, list) or sorted(map(str, found)) not in (
        [],
        ["c2p"],
        ["p2c"],
        ["c2p", "p2c"],
    ):
        raise DataError(
            f"{place.settings.where}: pos_att_type is {shown(found)}, which is not supported: "
            "give c2p, p2c or both"
        )
    return found


def _normed(place: Place, take: Take, table: Tensor) -> Tensor:
    module = place.position.table_norm
    if not module or "layer_norm" not in str(place.value("norm_rel_ebd") or ""):
        return table
    gain, shift = (
        at_least_float32(take(place.beside(f"{module}.{part}"), table.shape[1:]))
        for part in ("weight", "bias")
    )
    return torch.nn.functional.layer_norm(
        table, gain.shape, gain, shift, place.number("layer_norm_eps | 1e-7")
    )


def _link(place: Place, tensors: Tensors, take: Take, module: str, like: Link) -> Link:
    """Read a map with the numbers of heads and channels of the map `like`."""
    rows = like.copies * like.d_out
    entries = module_map(place, tensors, "map", module, (rows, None))
    found = LayerMap(
        {(part,): stored.then(head_rows(like.copies)) for part, stored in entries}
    ).read(take)
    return Link(found["map"], found.get("map.bias"))


HOOKS: Mapping[str, Hook] = {
    "deberta": DeBERTa(),
    "deepseek": DeepSeek(),
    "gpt2": GPT2(),
}


def hook_of(name: str) -> Hook | None:
    """Return the hook of a name in a family file, or None for the empty name."""
    if not name:
        return None
    if name not in HOOKS:
        raise UsageError(
            f"hook is {name!r} in the family file: there are {', '.join(HOOKS)}"
        )
    return HOOKS[name]
