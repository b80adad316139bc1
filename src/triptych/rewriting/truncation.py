"""The step that lowers ranks, and how ranks are shared out."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal, final

import torch
from pydantic import Field, model_validator
from torch import Tensor

from triptych.algebra import rewrites
from triptych.algebra.budget import allocate
from triptych.algebra.moments import Moments
from triptych.algebra.rewrites import Form, RewriteRefusedError, Rewritten
from triptych.algebra.weights import SIDES, AttentionWeights
from triptych.errors import UsageError
from triptych.rewriting.steps import AttentionStep, Layer

Criterion = Literal["free", "uncentred", "centred"]


Rotary = Literal["maps", "planes"]
# Of a share of energy: what is met but for rounding is met.
_SHARE_ROUNDING = 1e-10


@final
class Truncate(AttentionStep):
    """Lower rank of W_QK and W_OV; of rotary heads, of W_Q and W_K before they are turned.

    Attributes:
        forms: which of the two.
        rank: of every form (planes count two); or
        energy: share of the energy of every head's form that is kept at least, by the lowest ranks found that
            do: of its squares; of rotary scores, of their mean square over distances; with a criterion that
            looks at a text, of the mean square of what the head does on it (about means, where those were
            taken off); or
        budget: share of all channels that are kept, spread over layers and heads by what they are worth.
        criterion: what is kept: "free" of data, the forms themselves; "uncentred" or "centred", what they do
            on the calibration text, means of keys and of values counted, or taken off where that is free.
        rotary: what rotary heads lose of W_QK: rank of their "maps", which stay as wide; or whole "planes",
            a much narrower choice, which could leave keys fewer channels.
    """

    place = 6
    by_groups = True
    resizes = True
    rewrite: Literal["truncate"] = "truncate"
    forms: tuple[Form, ...] = ("qk", "ov")
    rank: int | None = Field(None, ge=1)
    energy: float | None = Field(None, gt=0, le=1)
    budget: float | None = Field(None, gt=0, le=1)
    criterion: Criterion = "free"
    rotary: Rotary = "maps"
    ranks: dict[str, dict[Form, tuple[int, ...]]] = Field(default_factory=dict, exclude=True)

    @model_validator(mode="after")
    def _one_way(self) -> "Truncate":
        given = [name for name in ("rank", "energy", "budget") if getattr(self, name) is not None]
        if len(given) != 1:
            said = " and ".join(given) or "none"
            raise ValueError(f"give one of rank, energy and budget (given: {said})")
        if not self.forms or len(set(self.forms)) < len(self.forms):
            raise ValueError(f"forms is {','.join(self.forms) or 'empty'}: give qk, ov or both")
        return self

    @property
    def needs_text(self) -> bool:
        """For the criteria that look at one."""
        return self.criterion != "free"

    def prepare(self, layers: Iterable[Layer], *, skip_refused: bool = False) -> "Truncate":
        """Ranks of every form of every layer.

        Scores and outputs have different units: what a channel carries counts as its share of what all forms
        of its kind carry.

        Raises:
            UsageError: a rank that no head has.
        """
        if self.rank is not None:
            self._require_rank(layers)
            return self
        places, spectra, costs, chosen = [], [], [], []
        for layer in layers:
            for form in self.forms:
                try:
                    found = self._spectrum(layer, form)
                    if self.energy is not None:
                        chosen += self._ranks_that_keep(self.energy, layer, form, found)
                except RewriteRefusedError as refused:
                    if not skip_refused:
                        raise RewriteRefusedError(self.rewrite, refused.reason).at(layer.name) from None
                    continue  # it refuses again when it is cut
                for group, energies in enumerate(found):
                    places.append((layer.name, form, group))
                    spectra.append(energies)
                    costs.append(float(_numbers_a_channel(layer.weights, form) * self._step(layer, form)))
        if self.budget is not None:
            of_kind = dict.fromkeys(self.forms, 0.0)
            for (_, form, _), energies in zip(places, spectra, strict=True):
                of_kind[form] += float(energies.sum())
            shares = [
                energies / (of_kind[form] or 1.0)
                for (_, form, _), energies in zip(places, spectra, strict=True)
            ]
            chosen = allocate(shares, costs, share=self.budget)
        ranks: dict[str, dict[Form, list[int]]] = {}
        for (name, form, _), rank in zip(places, chosen, strict=True):
            ranks.setdefault(name, {}).setdefault(form, []).append(rank)
        fixed = {
            name: {form: tuple(values) for form, values in found.items()} for name, found in ranks.items()
        }
        return self.model_copy(update={"ranks": fixed})

    def _ranks_that_keep(self, energy: float, layer: Layer, form: Form, spectrum: Tensor) -> list[int]:
        """For each group the lowest rank with which all its heads keep a share of their energy.

        What a group keeps as a whole is where to begin: one of its heads may keep less than another, and
        queries are cut as well as keys. Then by halves, each rank tried out; the full rank keeps everything.
        """
        low = allocate(list(spectrum), [1.0] * len(spectrum), energy=energy)
        high, first = [spectrum.shape[1]] * len(spectrum), True
        while low != high:
            tried = low if first else [(one + other) // 2 for one, other in zip(low, high, strict=True)]
            first = False
            lost = torch.tensor(self._cut(layer, form, tried).record.cuts[0].lost)
            enough = lost.view(len(tried), -1).amax(dim=1).le(1 - energy + _SHARE_ROUNDING).tolist()
            high = [rank if kept else most for rank, kept, most in zip(tried, enough, high, strict=True)]
            low = [
                least if kept else min(rank + 1, most)
                for rank, kept, least, most in zip(tried, enough, low, high, strict=True)
            ]
        return high

    def apply(self, layer: Layer) -> Rewritten:
        """Cut."""
        results = []
        weights = layer.weights
        for form in self.forms:
            now = replace(layer, weights=weights)
            results.append(self._cut(now, form, self._ranks(now, form)))
            weights = results[-1].weights
        return results[0] if len(results) == 1 else _as_one("truncate", layer.weights, results)

    def _require_rank(self, layers: Iterable[Layer]) -> None:
        """Some layer has heads as wide; those that are narrower stay as they are.

        Raises:
            UsageError: none has.
        """
        assert self.rank is not None
        widest = 0
        for layer in layers:
            widest = max(widest, *(_width(layer.weights, form) for form in self.forms))
            if widest >= self.rank:
                return
        raise UsageError(f"truncate: rank is {self.rank}, and the widest head has {widest} channels")

    def _cut(self, layer: Layer, form: Form, ranks: list[int]) -> Rewritten:
        moments = layer.moments if self.needs_text else None
        weights, rotation = layer.weights, layer.scoring.rotation
        if form == "qk" and rotation is not None:
            longest = _longest(layer, moments)
            if self.rotary == "planes":
                return rewrites.truncate_planes(
                    weights, rotation, planes=ranks, moments=moments, longest=longest
                )
            return rewrites.truncate_rotary_maps(
                weights, rotation, qk_rank=ranks, moments=moments, longest=longest
            )
        if moments is not None:
            return (
                rewrites.truncate_on_data(weights, moments, qk_rank=ranks, centred=self._centred)
                if form == "qk"
                else rewrites.truncate_on_data(weights, moments, ov_rank=ranks, centred=self._centred)
            )
        return (
            rewrites.truncate(weights, qk_rank=ranks)
            if form == "qk"
            else rewrites.truncate(weights, ov_rank=ranks)
        )

    @property
    def _centred(self) -> bool | None:
        """None: wherever the layer allows, as the record then says."""
        return None if self.criterion == "centred" else False

    def _ranks(self, layer: Layer, form: Form) -> list[int]:
        """One a group of heads; planes for rotary ones."""
        copies = _groups(layer.weights, form)
        if self.rank is None:
            first = layer.first_head * copies // layer.weights.num_heads
            return list(self.ranks.get(layer.name, {}).get(form, ())[first : first + copies]) or [1] * copies
        rank = min(self.rank, _width(layer.weights, form))
        return [max(1, rank // self._step(layer, form))] * copies

    def _step(self, layer: Layer, form: Form) -> int:
        """Channels that go together."""
        planes = form == "qk" and layer.scoring.rotation is not None and self.rotary == "planes"
        return 2 if planes else 1

    def _spectrum(self, layer: Layer, form: Form) -> Tensor:
        """Energy of each direction (plane) of each group, largest first, `[groups, directions]`."""
        moments = layer.moments if self.needs_text else None
        rotation = layer.scoring.rotation if form == "qk" else None
        if rotation is not None:
            measure = (
                rewrites.measure_plane_energies
                if self.rotary == "planes"
                else rewrites.measure_rotary_energies
            )
            return measure(layer.weights, rotation, moments, _longest(layer, moments))
        centred = self._centred if moments is not None else None
        return rewrites.measure_energies(layer.weights, form, moments, centred=centred)


def _as_one(name: str, before: AttentionWeights, results: Sequence[Rewritten]) -> Rewritten:
    """Several results of one step as one record."""
    records = [result.record for result in results]
    exact = all(record.tier != "bounded" for record in records)
    record = replace(
        records[-1],
        name=name,
        tier="rounding-exact" if exact else "bounded",
        checked=tuple(dict.fromkeys(said for record in records for said in record.checked)),
        before=records[0].before,
        choice="; ".join(record.choice for record in records if record.choice),
        cuts=tuple(cut for record in records for cut in record.cuts),
        notes=tuple(dict.fromkeys(said for record in records for said in record.notes)),
        bound=max(record.bound for record in records),
        error=max((record.error for record in records if record.error is not None), default=None),
    )
    return Rewritten(results[-1].weights, record)


def _width(weights: AttentionWeights, form: Form) -> int:
    return weights.multiplied("q" if form == "qk" else "v").d_out


def _longest(layer: Layer, moments: Moments | None) -> int:
    """How far apart tokens come: in the text if there is one, else in what the model is made for."""
    return layer.longest_text if moments is None else moments.longest


def _groups(weights: AttentionWeights, form: Form) -> int:
    return weights.num_key_heads if form == "qk" else weights.num_value_heads


def _numbers_a_channel(weights: AttentionWeights, form: Form) -> int:
    """Parameters that one channel of one group costs, over all heads that read it."""
    sides: tuple[Literal["q", "k", "v", "o"], ...] = ("q", "k") if form == "qk" else ("v", "o")
    widths = {side: sum(link.weight.shape[1] for link in weights.chain(side)[:1]) for side in SIDES}
    widths["o"] = weights.o[-1].d_out if weights.o else weights.d_model
    served = weights.num_heads // _groups(weights, form)
    own = "q" if form == "qk" else "o"
    return sum(widths[side] * (served if side == own else 1) for side in sides)
