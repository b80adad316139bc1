"""The worth of a head: the rise of a model's loss when this head alone is left out.

All heads of a layer are left out in one batch, with a copy of the rows for every head. The output of a head
is replaced before W_O. The blocks before the layer are not run again.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from triptych.core.algebra.function import channels, gated
from triptych.core.algebra.resampling import ratio_intervals
from triptych.core.attention import for_heads
from triptych.core.models import (
    AttentionSite,
    EncoderDecoder,
    LanguageModel,
    attention_sites,
    blocks_of,
)
from triptych.errors import UsageError
from triptych.literals import Instead
from triptych.running.batching import (
    EvaluationMode,
)
from triptych.running.measuring.window_losses import (
    WindowBatch,
    batches_of,
    require_classes,
    require_loss,
)
from triptych.running.measuring.windows import (
    HeadFigures,
    Place,
    Told,
    Windows,
)
from triptych.running.opening.layer_calls import (
    LayerCall,
)
from triptych.running.opening.reader import Reader
from triptych.running.opening.rerunning import begins_anywhere, run_from

# Every token is run once per head of the model.
MOST_TOKENS_OF_WORTH = 1 << 13
# Tokens of a batch, including the repeated rows for each head.
_TOKENS_AT_A_TIME = 1 << 13


@final
@dataclass(frozen=True)
class HeadWorth:
    """The worth of one head."""

    stack: str  # "encoder", "decoder" or "cross"
    layer: int  # layer number within the stack
    head: int  # head number within the layer
    change: (
        float  # rise of the loss without the head, in nats per token or labelled text
    )
    low: float  # lower end of the 95 % interval; `high` is the upper end
    high: float
    # root mean square length of the head's contribution to the layer's output, the criterion of
    # `prune_heads` with `on_text`
    added: float


@final
@dataclass(frozen=True)
class Worth:
    """The worth of all heads of a model on a text."""

    # replacement of a head's output: "zero", its "mean" over the text, or its output for uniform ("even")
    # attention over the visible keys
    instead: Instead
    heads: tuple[HeadWorth, ...]  # heads by descending `change`
    loss: float  # loss of the whole model, in nats per token or labelled text
    tokens: int  # number of predicted tokens, or of labelled texts
    per: Literal["token", "text"] = (
        "token"  # unit of the loss: a token, or a labelled text
    )

    def of(self, stack: str, layer: int) -> tuple[float, ...]:
        """Return the rise of the loss without each head of a layer, by number: an order for `prune_heads`."""
        return tuple(self.figures()[stack, layer]["worth"].value.tolist())

    def figures(self) -> dict[Place, dict[str, HeadFigures]]:
        """Return `change` (as "worth") and `added` by layer, in the format of other figures of heads."""
        own: dict[Place, list[HeadWorth]] = {}
        for one in sorted(self.heads, key=lambda one: one.head):
            own.setdefault((one.stack, one.layer), []).append(one)
        found = {}
        for place, heads in own.items():
            numbers = torch.tensor(
                [[one.change, one.low, one.high, one.added] for one in heads],
                dtype=torch.float64,
            )
            change, low, high, added = numbers.mT
            found[place] = {
                "worth": HeadFigures(change, low, high),
                "added": HeadFigures(added),
            }
        return found


def measure_worth(
    reader: Reader,
    windows: Windows,
    instead: Instead,
    progress: Told = lambda done, total: None,
    *,
    together: Sequence[Sequence[str]] | None = None,
    expect: Callable[[float], None] = lambda seconds: None,
) -> Worth:
    """Measure the loss of a model on a text with a single head left out, for all heads.

    `expect` is called once, before the first head is left out, with the expected time in seconds.

    `together` has groups of layers of a stack, by their names in order. The layers of a group lose a head at
    once; the result is given for the first layer, and `added` is a mean over the group. By default, every
    layer is a group.
    """
    # loss(windows without head) - loss(windows) is summed by unit, so that intervals can resample the units.
    require_worth(reader, of_classes=windows.are_labelled)
    model = reader.model
    by_name = {site.name: site for site in attention_sites(model)}
    groups = [
        [by_name[name] for name in names]
        for names in together or [[name] for name in by_name]
    ]
    sites = [*chain.from_iterable(groups)]
    most_heads = max(site.layer.num_heads for site in sites)
    batches = [*batches_of(reader, windows, _TOKENS_AT_A_TIME // most_heads)]
    losses, counts = torch.zeros(2, windows.num_units, dtype=torch.float64)
    changes = {
        first.name: torch.zeros(
            windows.num_units, first.layer.num_heads, dtype=torch.float64
        )
        for first, *_ in groups
    }
    squares = {
        first.name: torch.zeros(first.layer.num_heads, dtype=torch.float64)
        for first, *_ in groups
    }
    num_added = dict.fromkeys(squares, 0)
    done = 0
    total = len(batches) * len(groups)
    with torch.no_grad(), EvaluationMode(model):
        means = _mean_outputs(reader, sites, batches) if instead == "mean" else {}
        for number, batch in enumerate(batches):
            began = time.perf_counter()
            with head_outputs(sites) as outputs:
                run = reader.run(batch.texts, residuals=True)
            ran = time.perf_counter()
            whole = batch.losses(reader, run.hidden)[0].cpu()
            if number == 0:
                share = (
                    sum(one.tokens.numel() for one in batches) / batch.tokens.numel()
                )
                scored = time.perf_counter() - ran
                expect(
                    share
                    * sum(
                        _expected(model, first, ran - began, scored)
                        for first, *_ in groups
                    )
                )
            losses.index_add_(0, batch.units, whole)
            counts.index_add_(0, batch.units, batch.counts.double().cpu())
            calls = {call.site.name: call for call in run.calls}
            for group in groups:
                first = group[0]
                others = {
                    site.name: torch.zeros_like(outputs[site.name][:1])
                    for site in group
                }
                if instead == "mean":
                    others = {site.name: means[site.name] for site in group}
                elif instead == "even":
                    others = {
                        site.name: even_output(calls[site.name]) for site in group
                    }
                with _heads_left_out(group, others):
                    hidden = run_from(model, run, first, first.layer.num_heads)
                    without = batch.losses(reader, hidden)
                changes[first.name].index_add_(
                    0, batch.units, (without.cpu() - whole).mT
                )
                for site in group:
                    z = outputs[site.name].transpose(1, 2)[batch.tokens_of(site)]
                    added = torch.einsum("thv,hvd->thd", z, site.layer.weights().W_O)
                    squares[first.name] += added.double().square().sum(dim=(0, 2)).cpu()
                    num_added[first.name] += len(z)
                done += 1
                progress(done, total)
    found = []
    for first, *_ in groups:
        low, high = ratio_intervals(changes[first.name], counts[:, None])
        change = changes[first.name].sum(dim=0) / counts.sum()
        added = (squares[first.name] / max(1, num_added[first.name])).sqrt()
        for head, numbers in enumerate(
            torch.stack([change, low, high, added], dim=1).tolist()
        ):
            found.append(HeadWorth(first.stack, first.block, head, *numbers))
    ordered = tuple(sorted(found, key=lambda one: -one.change))
    return Worth(
        instead,
        ordered,
        float(losses.sum() / counts.sum()),
        int(counts.sum()),
        "text" if windows.are_labelled else "token",
    )


def _expected(
    model: LanguageModel | EncoderDecoder,
    site: AttentionSite,
    run_seconds: float,
    loss_seconds: float,
) -> float:
    """Estimate the time of measuring a layer's heads, from the seconds of a run and of its losses."""
    # Blocks before the layer are not run again; a change in the encoder affects the whole decoder.
    num_blocks = len(blocks_of(model, site.stack))
    is_memory = isinstance(model, EncoderDecoder) and site.stack == "encoder"
    share = 1.0 if is_memory else (num_blocks - site.block) / num_blocks
    return site.layer.num_heads * (share * run_seconds + loss_seconds)


def require_worth(reader: Reader, *, of_classes: bool = False) -> None:
    """Check that the model has a loss (of classes, or of tokens), and that a run can start at any block."""
    if not begins_anywhere(reader.model):
        raise UsageError(
            f"{reader.name} has blocks that read more than the stream before them: heads cannot be left out "
            "one layer at a time (--worth)"
        )
    if of_classes:
        require_classes(reader)
    else:
        require_loss(reader, "leaving heads out (--worth)")


def _mean_outputs(
    reader: Reader, sites: Sequence[AttentionSite], batches: Sequence[WindowBatch]
) -> dict[str, Float[Tensor, "1 heads 1 d_v"]]:
    """Compute the mean input of W_O over the tokens of the text, by site."""
    # Sums over many tokens are kept in float64.
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    for batch in batches:
        with head_outputs(sites) as found:
            reader.run(batch.texts)
        for site in sites:
            z = found[site.name].transpose(1, 2)[batch.tokens_of(site)]
            sums[site.name] = sums.get(site.name, 0.0) + z.sum(
                dim=0, dtype=torch.float64
            )
            counts[site.name] = counts.get(site.name, 0) + len(z)
    return {
        site.name: (sums[site.name] / counts[site.name])[None, :, None].to(
            next(site.layer.parameters()).dtype
        )
        for site in sites
    }


@contextmanager
def head_outputs(sites: Sequence[AttentionSite]) -> Iterator[dict[str, Tensor]]:
    """Record the input of W_O in layers by site, `[rows, heads, length, d_v]`."""
    found: dict[str, Tensor] = {}

    def keep(module: nn.Module, given: tuple[Tensor, ...], *, name: str) -> None:
        found[name] = given[0].detach()

    with ExitStack() as stack:
        for site in sites:
            hook = partial(keep, name=site.name)
            stack.callback(
                site.layer.before_output.register_forward_pre_hook(hook).remove
            )
        yield found


@contextmanager
def _heads_left_out(
    sites: Sequence[AttentionSite], instead: Mapping[str, Tensor]
) -> Iterator[None]:
    """Replace the output of head i in the i-th copy of the rows."""

    def replace(
        module: nn.Module, given: tuple[Tensor, ...], *, other: Tensor
    ) -> tuple[Tensor, ...]:
        (z,) = given
        num_heads = z.shape[
            1
        ]  # also the number of repetitions along the first dimension
        parts = z.clone().view(num_heads, -1, *z.shape[1:])
        other = other.expand(parts.shape[1:])
        for head in range(num_heads):
            parts[head, :, head] = other[:, head]
        return (parts.view(z.shape),)

    with ExitStack() as stack:
        for site in sites:
            hook = partial(replace, other=instead[site.name])
            stack.callback(
                site.layer.before_output.register_forward_pre_hook(hook).remove
            )
        yield


def even_output(call: LayerCall) -> Float[Tensor, "rows heads length d_v"]:
    """Compute the input of W_O for uniform attention of every head over the visible keys."""
    weights = call.layer.weights()
    v = for_heads(channels(weights, call.x, call.memory).v, weights.num_heads)
    even = call.queries_and_keys().visible().to(v.dtype)
    return gated(
        weights, call.x, even / even.sum(dim=-1, keepdim=True).clamp(min=1) @ v
    )
