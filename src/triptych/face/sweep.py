"""Every head in turn, patched from a run on one text into a run on another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.algebra.resampling import ratio_intervals
from triptych.attention import Activation
from triptych.errors import UsageError
from triptych.face.run import Run
from triptych.progress import Progress

if TYPE_CHECKING:
    from triptych.face.model import Model


@final
@dataclass(frozen=True, eq=False)
class Sweep:
    """What patching each head does to a metric.

    Attributes:
        what: the activation that was patched.
        heads: the heads, `3.2`.
        values: `[heads, texts]`, the metric of the corrupted text with the head's clean activation.
        clean: `[texts]`, the metric of the clean texts; likewise `corrupted`.
        corrupted: without a patch.
        low: `[heads]`, lower end of the 95 % bootstrap interval over texts of the mean; likewise `high`. For
            a single text it has no width.
        high: upper end.
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
        """The mean over texts of each head."""
        return self.values.mean(dim=1)

    def rows(self) -> list[dict[str, Any]]:
        """One record per head: its place, the mean, its interval."""
        columns = zip(self.heads, self.mean.tolist(), self.low.tolist(), self.high.tolist(), strict=True)
        return [{"head": head, "mean": mean, "low": low, "high": high} for head, mean, low, high in columns]

    def top(self, count: int = 10) -> list[tuple[str, float]]:
        """The heads whose patch moves the metric most from that of the corrupted texts."""
        moved = (self.mean - self.corrupted.mean()).abs()
        return [(self.heads[i], float(self.mean[i])) for i in moved.argsort(descending=True)[:count].tolist()]

    def __repr__(self) -> str:
        best = "; ".join(f"{head} {value:.4g}" for head, value in self.top(3))
        return (
            f"Sweep of {self.what}: {len(self.heads)} heads, {self.values.shape[1]} texts\n"
            f"  metric: clean {float(self.clean.mean()):.4g}, corrupted {float(self.corrupted.mean()):.4g}\n"
            f"  most moved by: {best}"
        )


def sweep_heads(
    model: "Model",
    clean: str | Sequence[str],
    corrupted: str | Sequence[str],
    metric: Callable[[Run], float | Tensor],
    what: Activation,
    progress: Progress,
) -> Sweep:
    """See `Model.sweep`."""
    pairs = [[one] if isinstance(one, str) else list(one) for one in (clean, corrupted)]
    if len(pairs[0]) != len(pairs[1]) or not pairs[0]:
        raise UsageError(
            f"there are {len(pairs[0])} clean and {len(pairs[1])} corrupted texts: give one for each"
        )
    before = [(model.run(one), model.run(other)) for one, other in zip(*pairs, strict=True)]
    for number, (one, other) in enumerate(before, start=1):
        if len(one.ids) != len(other.ids):
            raise UsageError(
                f"pair {number} has {len(one.ids)} and {len(other.ids)} tokens: a patch goes to the same "
                "positions"
            )
    heads = [f"{layer.name}.{head}" for layer in model.layers for head in range(layer.num_heads)]
    values = torch.empty(len(heads), len(before))
    for place, head in enumerate(heads):
        progress(head, place, len(heads))
        for text, ((one, _), other) in enumerate(zip(before, pairs[1], strict=True)):
            values[place, text] = float(metric(model.patch(head, one, what).run(other)))
    of_clean, of_corrupted = (torch.tensor([float(metric(pair[side])) for pair in before]) for side in (0, 1))
    texts = values.T.double()
    low, high = ratio_intervals(texts, torch.ones_like(texts))
    return Sweep(what, tuple(heads), values, of_clean, of_corrupted, low, high)
