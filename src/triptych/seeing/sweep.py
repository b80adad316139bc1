"""Activation patching of every head, from a run on one text into a run on another."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.core.algebra.resampling import ratio_intervals
from triptych.core.models import EncoderDecoder
from triptych.errors import UsageError
from triptych.literals import Activation
from triptych.printable import table_html
from triptych.progress import Progress
from triptych.running.changing import patch, patching_tap
from triptych.running.opened_source import Opened
from triptych.running.run import Run, logit_difference, run_texts, tapped_runs
from triptych.running.text import GivenText, Text, as_texts, refuse_file_name

# Tokens of a batch, with a copy of the text for each head: inputs of all layers are in memory at once.
_TOKENS_AT_A_TIME = 2048


@final
@dataclass(frozen=True, eq=False)
class Sweep:
    """Effect of patching each head on a metric.

    Attributes:
        what: patched activation.
        heads: names of the heads, such as `3.2`.
        values: metric of the corrupted text with the head's clean activation, `[heads, texts]`.
        clean: metric of the clean texts, `[texts]`.
        corrupted: metric of the corrupted texts without a patch, `[texts]`.
        low: lower end of the mean's 95 % bootstrap interval over texts, `[heads]`; of zero width for a single
            text.
        high: upper end of the interval, `[heads]`.
    """

    what: Activation
    heads: tuple[str, ...]
    values: Float[Tensor, "heads texts"]
    clean: Float[Tensor, " texts"]
    corrupted: Float[Tensor, " texts"]
    low: Float[Tensor, " heads"]
    high: Float[Tensor, " heads"]

    @property
    def mean(self) -> Float[Tensor, " heads"]:
        """Mean over texts for each head."""
        return self.values.mean(dim=1)

    def rows(self) -> list[dict[str, Any]]:
        """Return one record per head: name, mean and interval."""
        columns = zip(
            self.heads,
            self.mean.tolist(),
            self.low.tolist(),
            self.high.tolist(),
            strict=True,
        )
        return [
            {"head": head, "mean": mean, "low": low, "high": high}
            for head, mean, low, high in columns
        ]

    def top(self, count: int = 10) -> list[tuple[str, float]]:
        """Return the heads with the largest effect on the metric of the corrupted texts."""
        moved = (self.mean - self.corrupted.mean()).abs()
        return [
            (self.heads[i], float(self.mean[i]))
            for i in moved.argsort(descending=True)[:count].tolist()
        ]

    def __repr__(self) -> str:
        best = "; ".join(f"{head} {value:.4g}" for head, value in self.top(3))
        return (
            f"Sweep of {self.what}: {len(self.heads)} heads, {self.values.shape[1]} texts\n"
            f"  metric: clean {float(self.clean.mean()):.4g}, corrupted {float(self.corrupted.mean()):.4g}\n"
            f"  most moved by: {best}"
        )

    def _repr_html_(self) -> str:
        rows = [(head, f"{value:.4g}") for head, value in self.top(10)]
        title = f"Sweep of {self.what}: the heads that move the metric most"
        return table_html(title, rows, ("head", "metric after its patch"))


def sweep_heads(
    opened: Opened,
    clean: GivenText | Sequence[GivenText],
    corrupted: GivenText | Sequence[GivenText],
    metric: Callable[[Run], float | Tensor] | tuple[str | int, str | int],
    what: Activation,
    progress: Progress,
) -> Sweep:
    """Patch each head separately."""
    measure = metric if callable(metric) else logit_difference(*metric)
    texts = [as_texts(refuse_file_name(one)).texts for one in (clean, corrupted)]
    if len(texts[0]) != len(texts[1]) or not texts[0]:
        raise UsageError(
            f"there are {len(texts[0])} clean and {len(texts[1])} corrupted texts: give one for each"
        )

    # Patched positions must exist in both texts.
    before = [
        (_run(opened, one), _run(opened, other))
        for one, other in zip(*texts, strict=True)
    ]
    for number, (one, other) in enumerate(before, start=1):
        if len(one.ids) != len(other.ids):
            raise UsageError(
                f"pair {number} has {len(one.ids)} and {len(other.ids)} tokens: a patch goes to the same "
                "positions"
            )
    of_clean, of_corrupted = (
        torch.tensor(
            [float(measure(pair[side])) for pair in before], dtype=torch.float64
        )
        for side in (0, 1)
    )
    for number, pair in enumerate(
        torch.stack((of_clean, of_corrupted), dim=1), start=1
    ):
        if not pair.isfinite().all():
            raise UsageError(
                f"the metric of pair {number} is {pair.tolist()}, and has to be a number: the loss of a text "
                "needs two tokens"
            )
    model = opened.reader.model
    is_pair = isinstance(model, EncoderDecoder)
    sites = opened.sites_of(model)
    heads = [
        f"{layer.name}.{head}"
        for layer in opened.layers[: len(sites)]
        for head in range(layer.num_heads)
    ]
    values = torch.empty(len(heads), len(before), dtype=torch.float64)
    place = 0
    for layer in range(len(sites)):
        progress(heads[place], place, len(heads))
        own = slice(place, place + sites[layer].layer.num_heads)
        for text, (one, other) in enumerate(before):
            patched: Iterable[Run]
            if is_pair:
                # The target is searched anew with each patch.
                patched = (
                    _run(patch(opened, head, one, what), texts[1][text])
                    for head in heads[own]
                )
            else:
                patched = _patched_runs(opened, layer, heads[own], one, other, what)
            values[own, text] = torch.tensor(
                [float(measure(found)) for found in patched], dtype=torch.float64
            )
        place = own.stop
    by_text = values.T
    low, high = ratio_intervals(by_text, torch.ones_like(by_text))
    return Sweep(what, tuple(heads), values, of_clean, of_corrupted, low, high)


def _run(opened: Opened, text: Text) -> Run:
    (found,) = run_texts(opened, [refuse_file_name(text)])
    return found


def _patched_runs(
    opened: Opened,
    layer: int,
    heads: Sequence[str],
    clean: Run,
    corrupted: Run,
    what: Activation,
) -> Iterator[Run]:
    """Yield the run on the corrupted text for every head of a layer, patched from the clean run.

    A run is the run of `patch(opened, head, clean, what)`. Heads are patched in rows of one batch.
    """
    at_a_time = max(1, _TOKENS_AT_A_TIME // len(corrupted.ids))
    for start in range(0, len(heads), at_a_time):
        taps = [
            patching_tap(opened, layer, head, clean, what)
            for head in heads[start : start + at_a_time]
        ]
        yield from tapped_runs(opened, corrupted, layer, taps)
