"""The steps that a checkpoint's attention can be put through, as a recipe says them.

Each step is one rewrite of `algebra.rewrites` for the attention layers of a checkpoint. Some look at more
than one layer before they begin (a budget is spread over all heads), some at what the layers do on a text.
"""

import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, ClassVar, Literal, final

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from torch import Tensor

from triptych.algebra import rewrites
from triptych.algebra.budget import allocate
from triptych.algebra.function import Scoring
from triptych.algebra.moments import Moments
from triptych.algebra.rewrites import Form, RewriteRefusedError, Rewritten
from triptych.algebra.rewrites.channels import newly_apart
from triptych.algebra.weights import SIDES, AttentionWeights
from triptych.errors import UsageError

Criterion = Literal["free", "uncentred", "centred"]
Rotary = Literal["maps", "planes"]


@final
@dataclass(frozen=True, eq=False)
class Layer:
    """A layer on its way through the steps.

    Attributes:
        name: for messages.
        weights: as they are now, float64.
        scoring: what it does besides.
        longest_text: positions that the model is made for.
        moments: of the layer as it is now over the calibration text; None without one.
    """

    name: str
    weights: AttentionWeights
    scoring: Scoring
    longest_text: int = 2048
    moments: Moments | None = None


class Step(BaseModel, ABC):
    """One rewrite.

    Attributes:
        place: steps come in this order.
        by_groups: whether it treats each group of heads by itself.
        needs_text: whether it looks at what layers do on a text.
        resizes: whether tensors may come out with other shapes.
        layers: numbers of the layers that it is for, in every stack; all if None.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    place: ClassVar[int]
    by_groups: ClassVar[bool] = False
    resizes: ClassVar[bool] = False

    rewrite: str
    layers: tuple[int, ...] | None = None

    @property
    def needs_text(self) -> bool:
        """Whether moments have to be there."""
        return False

    def prepare(self, layers: Iterable[Layer], *, skip_refused: bool = False) -> "Step":
        """The step with what only all layers together can tell."""
        return self

    @abstractmethod
    def apply(self, layer: Layer) -> Rewritten:
        """Do it to one layer.

        Raises:
            RewriteRefusedError: with the reason.
        """

    def kept_heads(self, layer: Layer) -> tuple[int, ...] | None:
        """Which heads are left, in order; None for all as they are."""
        return None


@final
class FoldMaps(Step):
    """Products of maps, the fourth matrix among them, as one map; `keep` "cheaper" leaves what costs less."""

    place = 0
    resizes = True
    rewrite: Literal["fold_maps"] = "fold_maps"
    keep: Literal["cheaper", "folded"] = "cheaper"

    def apply(self, layer: Layer) -> Rewritten:
        """Fold."""
        return rewrites.fold(layer.weights, keep=self.keep)


@final
class Expand(Step):
    """A map of its own for everything that shares one."""

    place = 1
    resizes = True
    rewrite: Literal["expand"] = "expand"

    def apply(self, layer: Layer) -> Rewritten:
        """Expand."""
        return rewrites.expand(layer.weights)


@final
class FoldNorm(Step):
    """Gain and shift of the norm before, in the maps that read it."""

    place = 2
    by_groups = True
    rewrite: Literal["fold_norm"] = "fold_norm"

    def apply(self, layer: Layer) -> Rewritten:
        """Fold."""
        return rewrites.fold_norm(layer.weights)


@final
class DropKeyBias(Step):
    """No key bias, where the softmax is blind to it."""

    place = 3
    by_groups = True
    rewrite: Literal["drop_key_bias"] = "drop_key_bias"

    def apply(self, layer: Layer) -> Rewritten:
        """Drop."""
        return _still_tied(layer, rewrites.drop_key_bias(layer.weights))


@final
class FoldValueBias(Step):
    """The value bias in that of the output."""

    place = 3
    by_groups = True
    rewrite: Literal["fold_value_bias"] = "fold_value_bias"

    def apply(self, layer: Layer) -> Rewritten:
        """Fold."""
        return _still_tied(layer, rewrites.fold_value_bias(layer.weights))


@final
class PruneHeads(Step):
    """Heads left out: dead ones, or those that do least.

    Attributes:
        heads: by number, in every layer that the step is for; or
        number: how many of each layer, those that do least (on the text if there is one); or neither: heads
            that do nothing at all.
    """

    place = 4
    resizes = True
    rewrite: Literal["prune_heads"] = "prune_heads"
    heads: tuple[int, ...] | None = None
    number: int | None = Field(None, ge=1)
    on_text: bool = False

    @model_validator(mode="after")
    def _one_way(self) -> "PruneHeads":
        if self.heads is not None and self.number is not None:
            raise ValueError("heads names them, number lets us choose: give one of the two")
        return self

    @property
    def needs_text(self) -> bool:
        """If importance is to be measured on one."""
        return self.on_text

    def apply(self, layer: Layer) -> Rewritten:
        """Leave them out."""
        bounded = self.heads is not None or self.number is not None
        return rewrites.prune_heads(layer.weights, self._chosen(layer), bounded=bounded)

    def kept_heads(self, layer: Layer) -> tuple[int, ...]:
        """All others."""
        gone = set(self._chosen(layer))
        return tuple(head for head in range(layer.weights.num_heads) if head not in gone)

    def _chosen(self, layer: Layer) -> list[int]:
        weights = layer.weights
        if self.heads is not None:
            return list(self.heads)
        if self.number is None:
            does = rewrites.measure_importance(weights)
            dead = [head for head in range(weights.num_heads) if float(does[head]) == 0]
            return dead if len(dead) < weights.num_heads else dead[1:]
        if self.number >= weights.num_heads:
            raise RewriteRefusedError(
                "prune_heads", f"number is {self.number}, and there are {weights.num_heads} heads"
            )
        does = rewrites.measure_importance(weights, layer.moments if self.on_text else None)
        return sorted(does.argsort()[: self.number].tolist())


@final
class MergeKVHeads(Step):
    """Fewer key-value heads, several query heads to each.

    Attributes:
        num_kv_heads: how many are left.
        bounded: whether heads that differ may be merged.
    """

    place = 5
    resizes = True
    rewrite: Literal["merge_kv_heads"] = "merge_kv_heads"
    num_kv_heads: int = Field(ge=1)
    bounded: bool = True

    def apply(self, layer: Layer) -> Rewritten:
        """Merge."""
        if layer.scoring.rotation is not None:
            return rewrites.merge_rotary_kv_heads(
                layer.weights, layer.scoring.rotation, self.num_kv_heads, bounded=self.bounded
            )
        return rewrites.merge_kv_heads(layer.weights, self.num_kv_heads, bounded=self.bounded)


@final
class Truncate(Step):
    """Lower rank of W_QK and W_OV; of rotary heads, of W_Q and W_K before they are turned.

    Attributes:
        forms: which of the two.
        rank: of every form (planes count two); or
        energy: share of each form's energy that is kept at least; or
        budget: share of all channels that are kept, spread over layers and heads by what they are worth.
        criterion: what is kept: "free" of data, the forms themselves; "uncentred" or "centred", what they do
            on the calibration text, means of keys and of values counted, or taken off where that is free.
        rotary: what rotary heads lose of W_QK: rank of their "maps", which stay as wide; or whole "planes",
            a much narrower choice, which could leave keys fewer channels.
    """

    place = 6
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
        places, spectra, costs = [], [], []
        for layer in layers:
            for form in self.forms:
                try:
                    found = self._spectrum(layer, form)
                except RewriteRefusedError as refused:
                    if not skip_refused:
                        raise refused.at(layer.name) from None
                    continue  # it refuses again when it is cut
                for group, energies in enumerate(found):
                    places.append((layer.name, form, group))
                    spectra.append(energies)
                    costs.append(float(_numbers_a_channel(layer.weights, form) * self._step(layer, form)))
        of_kind = dict.fromkeys(self.forms, 0.0)
        for (_, form, _), energies in zip(places, spectra, strict=True):
            of_kind[form] += float(energies.sum())
        shares = [
            energies / (of_kind[form] or 1.0) for (_, form, _), energies in zip(places, spectra, strict=True)
        ]
        chosen = allocate(shares, costs, energy=self.energy, share=self.budget)
        ranks: dict[str, dict[Form, list[int]]] = {}
        for (name, form, _), rank in zip(places, chosen, strict=True):
            ranks.setdefault(name, {}).setdefault(form, []).append(rank)
        fixed = {
            name: {form: tuple(values) for form, values in found.items()} for name, found in ranks.items()
        }
        return self.model_copy(update={"ranks": fixed})

    def apply(self, layer: Layer) -> Rewritten:
        """Cut."""
        results = []
        weights = layer.weights
        for form in self.forms:
            results.append(self._cut(replace(layer, weights=weights), form))
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

    def _cut(self, layer: Layer, form: Form) -> Rewritten:
        ranks = self._ranks(layer, form)
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
        if self.rank is None:
            return list(self.ranks.get(layer.name, {}).get(form, ())) or [1] * _groups(layer.weights, form)
        copies = _groups(layer.weights, form)
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


@final
class GaugeFix(Step):
    """The canonical basis of each head; where only one of the two forms has a gauge, of that one."""

    place = 7
    by_groups = True
    rewrite: Literal["gauge_fix"] = "gauge_fix"
    forms: tuple[Form, ...] | None = None

    def apply(self, layer: Layer) -> Rewritten:
        """Fix."""
        return _still_tied(layer, self._fixed(layer))

    def _fixed(self, layer: Layer) -> Rewritten:
        if self.forms is not None:
            return rewrites.gauge_fix(layer.weights, forms=self.forms)
        try:
            return rewrites.gauge_fix(layer.weights)
        except RewriteRefusedError as refused:
            for form in rewrites.FORMS:
                try:
                    done = rewrites.gauge_fix(layer.weights, forms=(form,))
                except RewriteRefusedError:
                    continue
                notes = (*done.record.notes, f"only W_{form.upper()}: {refused.reason}")
                return Rewritten(done.weights, replace(done.record, notes=notes))
            raise


@final
class SortHeads(Step):
    """Heads in order of the size of W_OV, groups with theirs."""

    place = 8
    rewrite: Literal["sort_heads"] = "sort_heads"

    def apply(self, layer: Layer) -> Rewritten:
        """Sort."""
        return rewrites.permute_heads(layer.weights, self.kept_heads(layer))

    def kept_heads(self, layer: Layer) -> tuple[int, ...]:
        """The order."""
        weights = layer.weights
        groups = max(1, min(weights.num_key_heads, weights.num_value_heads))
        served = weights.num_heads // groups
        sizes = weights.ov.frobenius_norm().view(groups, served)
        by_group = sizes.norm(dim=-1).argsort(descending=True, stable=True).tolist()
        inside = sizes.argsort(dim=-1, descending=True, stable=True).tolist()
        return tuple(group * served + head for group in by_group for head in inside[group])


@final
class RepeatKVHeads(Step):
    """A key-value head for every query head."""

    place = 9
    resizes = True
    rewrite: Literal["repeat_kv_heads"] = "repeat_kv_heads"

    def apply(self, layer: Layer) -> Rewritten:
        """Repeat."""
        return rewrites.repeat_kv_heads(layer.weights)


@final
class ToLatent(Step):
    """Keys and values of all heads from one latent."""

    place = 9
    resizes = True
    rewrite: Literal["to_latent"] = "to_latent"
    rank: int | None = Field(None, ge=1)

    def apply(self, layer: Layer) -> Rewritten:
        """Write it so."""
        return rewrites.to_latent(layer.weights, rank=self.rank)


AnyStep = Annotated[
    FoldMaps
    | Expand
    | FoldNorm
    | DropKeyBias
    | FoldValueBias
    | PruneHeads
    | MergeKVHeads
    | Truncate
    | GaugeFix
    | SortHeads
    | RepeatKVHeads
    | ToLatent,
    Field(discriminator="rewrite"),
]
_NAMES = tuple(step.model_fields["rewrite"].default for step in Step.__subclasses__())
# Every exact rewrite that makes nothing larger.
EXACT: tuple[AnyStep, ...] = (
    FoldMaps(),
    FoldNorm(),
    DropKeyBias(),
    FoldValueBias(),
    PruneHeads(),
    GaugeFix(),
    SortHeads(),
)


@final
class RewriteRecipe(BaseModel):
    """A `rewrite.toml`.

    Attributes:
        step: in the order in which they are done.
        skip_refused: whether a layer that refuses a step is left as it is, and said so; else it is an error.
        calibration: the text for the steps that look at one; relative to the recipe's folder.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: tuple[AnyStep, ...] = Field(min_length=1)
    skip_refused: bool = False
    calibration: Path | None = None


def read_rewrite_recipe(path: Path) -> RewriteRecipe:
    """A recipe from a file.

    Raises:
        UsageError: it is not there, no TOML, or names what there is not.
    """
    try:
        record = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from None
    try:
        recipe = RewriteRecipe.model_validate(record)
    except ValidationError as error:
        raise UsageError(f"{path}: {_first_problem(error)}") from None
    if recipe.calibration is not None and not recipe.calibration.is_absolute():
        recipe = recipe.model_copy(update={"calibration": path.parent / recipe.calibration})
    require_order(recipe.step)
    return recipe


def validated_step(record: dict[str, object]) -> AnyStep:
    """A step from its record.

    Raises:
        UsageError: it says something that there is not.
    """
    adapter: TypeAdapter[AnyStep] = TypeAdapter(AnyStep)
    try:
        return adapter.validate_python(record)
    except ValidationError as error:
        raise UsageError(_first_problem(error)) from None


def require_order(steps: Sequence[Step]) -> None:
    """Steps that undo or spoil what comes before them are refused.

    Raises:
        UsageError: two steps in the wrong order, with the reason.
    """
    for before, after in pairwise(steps):
        if after.place < before.place:
            reason = _WHY_BEFORE.get(type(after), "what it does would undo that, or be undone by it")
            raise UsageError(f"{after.rewrite} must come before {before.rewrite}: {reason}")


_WHY_BEFORE: dict[type[Step], str] = {
    FoldMaps: "products of maps are folded while they are products",
    Expand: "maps that are shared cannot change for one side only",
    FoldNorm: "a norm's shift becomes biases of the maps, which would be there again",
    DropKeyBias: "the biases go before channels and heads are mixed",
    FoldValueBias: "the biases go before channels and heads are mixed",
    PruneHeads: "heads that go should not take part in what is shared out",
    MergeKVHeads: "heads are merged while all their channels are there",
    Truncate: "the basis and the order of heads depend on what is left",
    GaugeFix: "the order of heads is that of what is left",
    SortHeads: "copies of key-value heads come last",
}


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    if first["type"] == "union_tag_invalid":
        return f"there is no rewrite {first['ctx']['tag']}: there are {', '.join(_NAMES)}"
    where = ".".join(str(part) for part in first["loc"] if part not in ("function-after",))
    what = first["msg"].removeprefix("Value error, ")
    return f"{where}: {what}" if where else what


def _still_tied(layer: Layer, done: Rewritten) -> Rewritten:
    """The result, if maps that were one still are.

    Raises:
        RewriteRefusedError: they are not, and the layer would have become larger on the way.
    """
    if apart := newly_apart(layer.weights, done.weights):
        name = done.record.name
        raise RewriteRefusedError(name, f"it takes shared maps apart: {apart[0]}", "expand the layer first")
    return done


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
