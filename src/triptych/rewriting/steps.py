"""The steps that a checkpoint's attention can be put through, as a recipe says them.

Each step is one rewrite of `algebra.rewrites` for the attention layers of a checkpoint. Some look at more
than one layer before they begin (a budget is spread over all heads), some at what the layers do on a text.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, final

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from triptych.algebra import rewrites
from triptych.algebra.function import Scoring
from triptych.algebra.moments import Moments
from triptych.algebra.rewrites import Form, OtherReaders, RewriteRefusedError, Rewritten
from triptych.algebra.rewrites.channels import Move, newly_apart
from triptych.algebra.weights import AttentionWeights


@final
@dataclass(frozen=True, eq=False)
class Layer:
    """A layer on its way through the steps, or a few groups of its heads.

    Attributes:
        name: for messages.
        weights: as they are now, float64.
        scoring: what it does besides.
        longest_text: positions that the model is made for.
        moments: of the layer as it is now over the calibration text; None without one.
        others: what else reads its norm; None if nothing does that is known.
        first_head: of the layer as it is now, that is the first one here.
    """

    name: str
    weights: AttentionWeights
    scoring: Scoring
    longest_text: int = 2048
    moments: Moments | None = None
    others: OtherReaders | None = None
    first_head: int = 0


class Selected(NamedTuple):
    """Heads that a step leaves, or puts in another order, told from all of them.

    Attributes:
        done: the result, and the record.
        kept: which are left, in order.
    """

    done: Rewritten
    kept: tuple[int, ...]


class Step(BaseModel, ABC):
    """One rewrite.

    Attributes:
        place: steps come in this order.
        needs_text: whether it looks at what layers do on a text.
        resizes: whether tensors may come out with other shapes.
        layers: numbers of the layers that it is for, in every stack; all if None.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    place: ClassVar[int]
    resizes: ClassVar[bool] = False

    rewrite: str
    layers: tuple[int, ...] | None = None

    @property
    def needs_text(self) -> bool:
        """Whether moments have to be there."""
        return False

    def prepare(self, layers: Iterable[Layer], *, skip_refused: bool = False) -> "Step":
        """The step with what only all layers together can tell.

        Args:
            layers: each whole, or in parts one after the other.
            skip_refused: whether a layer that refuses the step is left as it is.
        """
        return self


class AttentionStep(Step, ABC):
    """A rewrite of attention layers.

    Attributes:
        by_groups: whether it treats each group of heads by itself, but for what `select` decides.
        selects: whether it leaves heads out, or puts them in another order (`select`).
        at_end: whether it only copies numbers, so that it can be done to those that are stored, as long as no
            other step comes after it.
    """

    by_groups: ClassVar[bool] = False
    selects: ClassVar[bool] = False
    at_end: ClassVar[bool] = False

    @abstractmethod
    def apply(self, layer: Layer) -> Rewritten:
        """Do it to one layer.

        Raises:
            RewriteRefusedError: with the reason.
        """

    def look(self, layer: Layer) -> tuple[Tensor, ...]:
        """What `select` has to know of some heads, one number for each."""
        return ()

    def select(self, whole: AttentionWeights, seen: tuple[Tensor, ...]) -> Selected:
        """Leave heads out or sort them, for steps that do.

        Args:
            whole: the layer; its shapes (on the "meta" device) are enough.
            seen: what `look` saw of all heads.

        Raises:
            RewriteRefusedError: with the reason.
        """
        raise NotImplementedError(self.rewrite)


@final
class FoldMaps(AttentionStep):
    """Products of maps, the fourth matrix among them, as one map; `keep` "cheaper" leaves what costs less."""

    place = 0
    by_groups = True
    resizes = True
    rewrite: Literal["fold_maps"] = "fold_maps"
    keep: Literal["cheaper", "folded"] = "cheaper"

    def apply(self, layer: Layer) -> Rewritten:
        """Fold."""
        return rewrites.fold(layer.weights, keep=self.keep)


@final
class Expand(AttentionStep):
    """A map of its own for everything that shares one."""

    place = 1
    by_groups = True
    resizes = True
    rewrite: Literal["expand"] = "expand"

    def apply(self, layer: Layer) -> Rewritten:
        """Expand."""
        return rewrites.expand(layer.weights)


@final
class FoldNorm(AttentionStep):
    """Gain and shift of the norm before, in the maps that read it, those outside the attention as well."""

    place = 2
    by_groups = True
    rewrite: Literal["fold_norm"] = "fold_norm"

    def apply(self, layer: Layer) -> Rewritten:
        """Fold."""
        return rewrites.fold_norm(layer.weights, layer.others)


@final
class FoldOtherNorms(Step):
    """Gain and shift of norms that no attention reads, in the maps that do: of the MLP, and that to logits.

    Norms after the last layer are in no layer: they are left alone where `layers` are named.
    """

    place = 2
    rewrite: Literal["fold_other_norms"] = "fold_other_norms"


@final
class DropKeyBias(AttentionStep):
    """No key bias, where the softmax is blind to it."""

    place = 3
    by_groups = True
    rewrite: Literal["drop_key_bias"] = "drop_key_bias"

    def apply(self, layer: Layer) -> Rewritten:
        """Drop."""
        return _still_tied(layer, rewrites.drop_key_bias(layer.weights))


@final
class FoldValueBias(AttentionStep):
    """The value bias in that of the output."""

    place = 3
    by_groups = True
    rewrite: Literal["fold_value_bias"] = "fold_value_bias"

    def apply(self, layer: Layer) -> Rewritten:
        """Fold."""
        return _still_tied(layer, rewrites.fold_value_bias(layer.weights))


@final
class PruneHeads(AttentionStep):
    """Heads left out: dead ones, or those that do least.

    Attributes:
        heads: by number, in every layer that the step is for; or
        number: how many of each layer, those that do least (on the text if there is one); or neither: heads
            that do nothing at all.
    """

    place = 4
    by_groups = True
    selects = True
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
        return self.select(layer.weights, self.look(layer)).done

    def look(self, layer: Layer) -> tuple[Tensor, ...]:
        """What every head does: its form and its bias, and on the text."""
        does = rewrites.measure_heads(layer.weights)
        importance = does.whole
        if self.number is not None and self.on_text:
            importance = rewrites.measure_importance(layer.weights, layer.moments)
        return (*does, importance)

    def select(self, whole: AttentionWeights, seen: tuple[Tensor, ...]) -> Selected:
        """All but those chosen."""
        form, bias, importance = seen
        gone = self._chosen(whole.num_heads, importance)
        bounded = self.heads is not None or self.number is not None
        # Where distances have maps of their own, heads that are left stay in their places.
        done = rewrites.prune_heads(
            whole, gone, bounded=bounded, does=Move(form, bias), distances_follow=True
        )
        return Selected(done, tuple(head for head in range(whole.num_heads) if head not in gone))

    def _chosen(self, heads: int, does: Tensor) -> list[int]:
        if self.heads is not None:
            return list(self.heads)
        if self.number is None:
            dead = [head for head in range(heads) if float(does[head]) == 0]
            return dead if len(dead) < heads else dead[1:]
        if self.number >= heads:
            raise RewriteRefusedError("prune_heads", f"number is {self.number}, and there are {heads} heads")
        return sorted(does.argsort()[: self.number].tolist())


@final
class MergeKVHeads(AttentionStep):
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
class GaugeFix(AttentionStep):
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
class SortHeads(AttentionStep):
    """Heads in order of the size of W_OV, groups with theirs."""

    place = 8
    by_groups = True
    selects = True
    at_end = True
    rewrite: Literal["sort_heads"] = "sort_heads"

    def apply(self, layer: Layer) -> Rewritten:
        """Sort."""
        return self.select(layer.weights, self.look(layer)).done

    def look(self, layer: Layer) -> tuple[Tensor, ...]:
        """The size of W_OV of every head."""
        return (layer.weights.ov.frobenius_norm(),)

    def select(self, whole: AttentionWeights, seen: tuple[Tensor, ...]) -> Selected:
        """All of them, sorted."""
        order = self._order(whole, seen)
        # They follow where they share the maps of queries and keys; the format refuses the others.
        return Selected(rewrites.permute_heads(whole, order, distances_follow=True), order)

    def _order(self, whole: AttentionWeights, seen: tuple[Tensor, ...]) -> tuple[int, ...]:
        groups = max(1, min(whole.num_key_heads, whole.num_value_heads))
        served = whole.num_heads // groups
        sizes = seen[0].view(groups, served)
        by_group = sizes.norm(dim=-1).argsort(descending=True, stable=True).tolist()
        inside = sizes.argsort(dim=-1, descending=True, stable=True).tolist()
        return tuple(group * served + head for group in by_group for head in inside[group])


@final
class RepeatKVHeads(AttentionStep):
    """More key-value heads, copies of those there are.

    Attributes:
        num_kv_heads: how many there are then; one for every query head if None.
    """

    place = 9
    by_groups = True
    at_end = True
    resizes = True
    rewrite: Literal["repeat_kv_heads"] = "repeat_kv_heads"
    num_kv_heads: int | None = Field(None, ge=1)

    def apply(self, layer: Layer) -> Rewritten:
        """Repeat."""
        return rewrites.repeat_kv_heads(layer.weights, self.num_kv_heads)


@final
class ToLatent(AttentionStep):
    """Keys and values of all heads from one latent."""

    place = 9
    resizes = True
    rewrite: Literal["to_latent"] = "to_latent"
    rank: int | None = Field(None, ge=1)

    def apply(self, layer: Layer) -> Rewritten:
        """Write it so."""
        return rewrites.to_latent(layer.weights, rank=self.rank)


def _still_tied(layer: Layer, done: Rewritten) -> Rewritten:
    """The result, if maps that were one still are.

    Raises:
        RewriteRefusedError: they are not, and the layer would have become larger on the way.
    """
    if apart := newly_apart(layer.weights, done.weights):
        name = done.record.name
        raise RewriteRefusedError(name, f"it takes shared maps apart: {apart[0]}", "expand the layer first")
    return done
