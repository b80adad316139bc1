"""What a head is worth: the loss of a model on a text when a single head is left out.

All heads of a layer are left out at once, each in rows of its own; see `leaving_out`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.algebra.resampling import ratio_intervals
from triptych.attending.leaving_out import (
    Batch,
    Instead,
    WholeRun,
    batches_of,
    head_outputs,
    heads_left_out,
    run_whole,
)
from triptych.attending.over_text import Told, Windows
from triptych.decoding.batches import EvaluationMode
from triptych.errors import UsageError
from triptych.models import EncoderDecoder
from triptych.models.sites import AttentionSite, attention_sites
from triptych.opening import Reader

# Every one is read as often as the model has heads.
MOST_TOKENS = 1 << 13


@final
@dataclass(frozen=True)
class HeadWorth:
    """What one head is worth.

    Attributes:
        stack: "encoder", "decoder" or "cross".
        layer: its number in the stack.
        head: its number.
        change: by which the loss rises without it, in nats per token.
        low: lower end of the 95 % interval; likewise `high`.
        added: root mean square length of what it adds to its layer's output, by which
            `prune_heads` with `on_text` chooses.
    """

    stack: str
    layer: int
    head: int
    change: float
    low: float
    high: float
    added: float


@final
@dataclass(frozen=True)
class Worth:
    """What all heads of a model are worth on a text.

    Attributes:
        model: its name.
        instead: what takes the place of a head's output: "zero", its "mean" over the text, or what it
            would be if the head looked at all visible keys "even"ly.
        heads: the most important one first.
        loss: of the whole model, in nats per token.
        tokens: that are predicted.
        units: what intervals are drawn over, "documents" or "windows".
        num_units: how many there are.
    """

    model: str
    instead: Instead
    heads: tuple[HeadWorth, ...]
    loss: float
    tokens: int
    units: str
    num_units: int

    def of(self, stack: str, layer: int) -> tuple[float, ...]:
        """By which the loss rises without each head of a layer, by number: an order for `prune_heads`."""
        own = [head for head in self.heads if (head.stack, head.layer) == (stack, layer)]
        return tuple(head.change for head in sorted(own, key=lambda head: head.head))


def measure_worth(
    reader: Reader,
    windows: Windows,
    instead: Instead = "mean",
    progress: Told = lambda done, total: None,
) -> Worth:
    """Leave every head of a model out in turn, and measure the loss on a text."""
    require_loss(reader)
    model = reader.model
    sites = attention_sites(model)
    batches = [*batches_of(reader, windows, max(site.layer.num_heads for site in sites))]
    measured = _Measured(sites, windows.num_units)
    done, total = 0, len(batches) * len(sites)
    with torch.no_grad(), EvaluationMode(model):
        means = _mean_outputs(reader, sites, batches) if instead == "mean" else {}
        for batch in batches:
            whole = WholeRun.of(model, sites, batch)
            measured.add_whole(batch, whole)
            for site in sites:
                calls = whole.outputs[site.name]
                others = [torch.zeros_like(calls[0][:1]) for _ in calls]
                if instead == "mean":
                    others = [means[site.name] for _ in calls]
                elif instead == "even":
                    others = whole.even_outputs(site)
                with heads_left_out(site, others):
                    measured.add_without(site, batch, whole.losses_from(site))
                done += 1
                progress(done, total)
    return measured.result(reader.name, instead, windows)


def require_loss(reader: Reader) -> None:
    """The model predicts tokens: the next ones, or those that a mask hides."""
    model = reader.model
    if isinstance(model, EncoderDecoder):
        return
    if model.head is None or model.head.config.outputs not in (None, model.vocab_size):
        raise UsageError(
            f"{reader.name} has no head that predicts tokens, and so no loss: leaving heads out (--worth) "
            "needs one"
        )
    if not model.causal and reader.tokenizer.mask_id is None:
        raise UsageError(
            f"the tokenizer of {reader.name} has no mask token: an encoder has no loss (--worth) without it"
        )


def _mean_outputs(
    reader: Reader, sites: Sequence[AttentionSite], batches: Sequence[Batch]
) -> dict[str, Float[Tensor, " joined"]]:
    """The mean over the text of what meets W_O, by site."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    for batch in batches:
        with head_outputs(sites) as found:
            run_whole(reader.model, batch)
        for site in sites:
            rows = batch.tokens_of(site, reader.model)
            for joined in found[site.name]:
                sums[site.name] = sums.get(site.name, 0.0) + joined[rows].sum(dim=0, dtype=torch.float64)
                counts[site.name] = counts.get(site.name, 0) + int(rows.sum())
    return {
        site.name: (sums[site.name] / counts[site.name]).to(next(site.layer.parameters()).dtype)
        for site in sites
    }


@final
class _Measured:
    """Sums by unit, of the whole model and without every head."""

    def __init__(self, sites: Sequence[AttentionSite], units: int) -> None:
        self._sites, self._units = sites, units
        self._tokens = torch.zeros(units, dtype=torch.float64)
        self._whole = torch.zeros(units, dtype=torch.float64)
        self._changes = {
            site.name: torch.zeros(units, site.layer.num_heads, dtype=torch.float64) for site in sites
        }
        self._squares = {site.name: torch.zeros(site.layer.num_heads, dtype=torch.float64) for site in sites}
        self._counts = dict.fromkeys(self._squares, 0)

    def add_whole(self, batch: Batch, whole: WholeRun) -> None:
        """Take in the losses of the whole model, and the sizes of what heads add."""
        self._last = whole.losses.cpu()
        rows = torch.tensor(batch.rows)
        self._whole.index_add_(0, rows, self._last)
        self._tokens.index_add_(0, rows, batch.predicts.sum(dim=1).double().cpu())
        for site in self._sites:
            W_O = site.layer.weights().o[-1].weight.permute(2, 0, 1)  # [d_model, heads, d_v]
            kept = batch.tokens_of(site, whole.model)
            for joined in whole.outputs[site.name]:
                z = joined[kept].view(-1, *W_O.shape[1:])
                squares = torch.einsum("thv,dhv->thd", z, W_O).double().square().sum(dim=(0, 2))
                self._squares[site.name] += squares.cpu()
                self._counts[site.name] += len(z)

    def add_without(self, site: AttentionSite, batch: Batch, losses: Float[Tensor, "heads rows"]) -> None:
        """Take in the losses without each head of a layer."""
        self._changes[site.name].index_add_(0, torch.tensor(batch.rows), (losses.cpu() - self._last).mT)

    def result(self, model: str, instead: Instead, windows: Windows) -> Worth:
        tokens = float(self._tokens.sum())
        found = []
        for site in self._sites:
            changes = self._changes[site.name]
            low, high = ratio_intervals(changes, self._tokens[:, None])
            added = (self._squares[site.name] / max(1, self._counts[site.name])).sqrt()
            for head in range(site.layer.num_heads):
                found.append(
                    HeadWorth(
                        site.stack,
                        site.block,
                        head,
                        float(changes[:, head].sum()) / tokens,
                        float(low[head]),
                        float(high[head]),
                        float(added[head]),
                    )
                )
        loss = float(self._whole.sum()) / tokens
        ordered = tuple(sorted(found, key=lambda one: -one.change))
        return Worth(model, instead, ordered, loss, int(tokens), windows.units, self._units)
