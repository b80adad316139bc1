"""The truncation rewrite, and the allocation of its ranks."""

from collections.abc import Iterable
from typing import Any, Literal, final

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from triptych.core.algebra.legality import CHANNELS_FREE, CHANNELS_OR_PAIRS
from triptych.core.algebra.rewritten import RewriteRefusedError, Rewritten
from triptych.core.algebra.weights import SIDES, AttentionWeights
from triptych.errors import UsageError
from triptych.rewriting.functions.budget import allocate
from triptych.rewriting.functions.channels import Form
from triptych.rewriting.functions.rank import Rotary, measure_energies, truncate
from triptych.rewriting.functions.rewrite import LayerRewrite, LayerToRewrite

Criterion = Literal["free", "uncentred", "centred"]
# Tolerance of a kept share of energy.
_SHARE_ROUNDING = 1e-10


@final
class Truncate(LayerRewrite):
    """Lower the rank of W_QK and W_OV; of rotary heads, the rank of W_Q and W_K before the rotation.

    Attributes:
        ranks: of every form of every layer and group of heads, once `prepare` has shared them out.
    """

    name = "truncate"
    tier = "bounded unless nothing is cut"
    requires = (CHANNELS_OR_PAIRS, CHANNELS_FREE["ov"])
    place = 6
    why_here = "the basis and the order of heads depend on what is left"
    resizes = True

    forms: tuple[Form, ...] = Field(("qk", "ov"), description="qk, ov or both")
    rank: int | None = Field(
        None, ge=1, description="rank of every form; a rotary pair counts as two"
    )
    energy: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of every form's energy that each head keeps at least",
    )
    budget: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of all channels that is kept, spread over layers and heads",
    )
    criterion: Criterion = Field(
        "free",
        description="keep the forms (free), or their work on a text with means (uncentred) or not (centred)",
    )
    rotary: Rotary = Field(
        "maps",
        description="cut from W_QK of rotary heads: the rank of the maps, or whole rotary pairs",
    )
    ranks: dict[str, dict[Form, tuple[int, ...]]] = Field(
        default_factory=dict, exclude=True
    )

    @field_validator("energy", "budget", mode="before")
    @classmethod
    def _require_share(cls, share: Any) -> Any:
        if isinstance(share, int | float) and not 0 < share <= 1:
            raise ValueError(
                f"it is a share above 0 and up to 1, such as 0.5, and not {share:g}"
            )
        return share

    @model_validator(mode="after")
    def _one_way(self) -> "Truncate":
        given = [
            name
            for name in ("rank", "energy", "budget")
            if getattr(self, name) is not None
        ]
        if len(given) != 1:
            said = " and ".join(given) or "none"
            raise ValueError(f"give one of rank, energy and budget (given: {said})")
        if not self.forms or len(set(self.forms)) < len(self.forms):
            raise ValueError(
                f"forms is {','.join(self.forms) or 'empty'}: give qk, ov or both"
            )
        return self

    @property
    def needs_text(self) -> bool:
        return self.criterion != "free"

    def prepare(
        self, layers: Iterable[LayerToRewrite], *, skip_refused: bool = False
    ) -> "Truncate":
        """Compute the ranks of every form of every layer."""
        if self.rank is not None:
            self._require_rank(layers)
            return self
        places = []
        spectra = []
        costs = []
        chosen = []
        for layer in layers:
            for form in self.forms:
                try:
                    found = measure_energies(layer.weights, form, **self._how(layer))
                    if self.energy is not None:
                        chosen += self._ranks_that_keep(self.energy, layer, form, found)
                except RewriteRefusedError as refused:
                    if not skip_refused:
                        raise RewriteRefusedError(self.name, refused.reason).at(
                            layer.name
                        ) from None
                    continue  # `apply` refuses the layer again
                for group, energies in enumerate(found):
                    places.append((layer.name, form, group))
                    spectra.append(energies)
                    costs.append(
                        float(
                            _numbers_a_channel(layer.weights, form)
                            * self._step(layer, form)
                        )
                    )
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
            name: {form: tuple(values) for form, values in found.items()}
            for name, found in ranks.items()
        }
        return self.model_copy(update={"ranks": fixed})

    def _ranks_that_keep(
        self, energy: float, layer: LayerToRewrite, form: Form, spectrum: Tensor
    ) -> list[int]:
        """Return the lowest rank of each group to keep a share of the energy of all its heads."""
        low = allocate(list(spectrum), [1.0] * len(spectrum), energy=energy)
        high = [spectrum.shape[1]] * len(spectrum)
        first = True
        # Energies are only estimates for groups: try them first, then bisect by measured loss.
        while low != high:
            tried = (
                low
                if first
                else [(one + other) // 2 for one, other in zip(low, high, strict=True)]
            )
            first = False
            lost = torch.tensor(self._cut(layer, {form: tried}).record.cuts[0].lost)
            enough = (
                lost.view(len(tried), -1)
                .amax(dim=1)
                .le(1 - energy + _SHARE_ROUNDING)
                .tolist()
            )
            high = [
                rank if kept else most
                for rank, kept, most in zip(tried, enough, high, strict=True)
            ]
            low = [
                least if kept else min(rank + 1, most)
                for rank, kept, least, most in zip(
                    tried, enough, low, high, strict=True
                )
            ]
        return high

    def apply(self, layer: LayerToRewrite) -> Rewritten:
        return self._cut(layer, {form: self._ranks(layer, form) for form in self.forms})

    def _cut(self, layer: LayerToRewrite, ranks: dict[Form, list[int]]) -> Rewritten:
        return truncate(
            layer.weights,
            qk_rank=ranks.get("qk"),
            ov_rank=ranks.get("ov"),
            **self._how(layer),
        )

    def _how(self, layer: LayerToRewrite) -> dict[str, Any]:
        """Return the options of the metric: the forms themselves, or their effect on the text."""
        moments = layer.moments if self.needs_text else None
        return {
            "moments": moments,
            # None: wherever the layer allows it, with a note in the record.
            "centred": None if self.criterion == "centred" else False,
            "rotary": self.rotary,
            # Largest distance between tokens: in the text if there is a text, else in the model's context.
            "longest": layer.longest_text if moments is None else moments.longest,
        }

    def _step(self, layer: LayerToRewrite, form: Form) -> int:
        """Return the number of channels per unit of rank: two for rotary pairs."""
        turned = layer.weights.semantics.rotary is not None
        return 2 if form == "qk" and turned and self.rotary == "pairs" else 1

    def _require_rank(self, layers: Iterable[LayerToRewrite]) -> None:
        """Require a layer with heads at least as wide as the rank; narrower layers are unchanged."""
        assert self.rank is not None
        widest = 0
        for layer in layers:
            widest = max(
                widest, *(_form_width(layer.weights, form) for form in self.forms)
            )
            if widest >= self.rank:
                return
        raise UsageError(
            f"truncate: rank is {self.rank}, and the widest head has {widest} channels"
        )

    def _ranks(self, layer: LayerToRewrite, form: Form) -> list[int]:
        """Return one rank per group of heads, in pairs of channels for rotary pairs."""
        copies = _num_groups(layer.weights, form)
        if self.rank is None:
            return list(self.ranks.get(layer.name, {}).get(form, ())) or [1] * copies
        rank = min(self.rank, _form_width(layer.weights, form))
        return [max(1, rank // self._step(layer, form))] * copies


def _form_width(weights: AttentionWeights, form: Form) -> int:
    return weights.multiplied("q" if form == "qk" else "v").d_out


def _num_groups(weights: AttentionWeights, form: Form) -> int:
    return weights.num_key_heads if form == "qk" else weights.num_value_heads


def _numbers_a_channel(weights: AttentionWeights, form: Form) -> int:
    """Count the parameters of one channel of one group, over all heads reading it."""
    sides: tuple[Literal["q", "k", "v", "o"], ...] = (
        ("q", "k") if form == "qk" else ("v", "o")
    )
    widths = {
        side: sum(link.weight.shape[1] for link in weights.chain(side)[:1])
        for side in SIDES
    }
    widths["o"] = weights.o[-1].d_out if weights.o else weights.d_model
    served = weights.num_heads // _num_groups(weights, form)
    own = "q" if form == "qk" else "o"
    return sum(widths[side] * (served if side == own else 1) for side in sides)
