"""The loss of a model and of changed models on a held-out text.

The loss on a sentence is a poor measure of a change: it can fall where the loss on a longer text rises. The
text is read in parts of a few hundred tokens, so that callers can interleave other work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.core.algebra.resampling import ratio_intervals
from triptych.errors import UsageError
from triptych.running.measuring import (
    batches_of,
    cut_windows,
    given_lines,
    given_texts,
    require_loss,
)
from triptych.running.opening import Reader

# About 50 kB of text.
MOST_TOKENS = 1 << 14
_TOKENS_OF_A_PART = 512


@final
@dataclass(frozen=True)
class LossChange:
    """The loss on a text before and after a change, in nats per token.

    Attributes:
        before: loss without the change.
        after: loss with the change, on the same tokens.
        interval: 95 % interval of `after` − `before`; None if the text has a single window.
    """

    before: float
    after: float
    interval: tuple[float, float] | None

    @property
    def difference(self) -> float:
        return self.after - self.before


@final
class HeldOutText:
    """A held-out text for a model and its changes, read in parts.

        text = HeldOutText(model.reader, Path("valid.txt"))
        text.compare(model.tie("*", "W_Q", "W_K").reader)  # the loss before and after, with an interval

    A few kB of text outside the training data suffice; the loss on one sentence is too noisy.

    Attributes:
        name: file name; "" without a file.
        num_parts: number of parts.
        num_tokens: number of predicted tokens.
        units: sampling units of intervals: documents, or the windows of a single document.
        windows: the windows of the text.
    """

    def __init__(
        self,
        reader: Reader,
        text: str | Path | Sequence[str],
        targets: str | Path | Sequence[str] | None = None,
        *,
        context: int | None = None,
        most_tokens: int | None = None,
    ) -> None:
        """Cut a text into windows.

        Args:
            reader: reader of the model.
            text: a text, its file, or several documents; a translator needs the sentences, or their file with
                one sentence per line.
            targets: translations of the lines, for a translator.
            context: tokens per window. Default: a run's context, or the model's positions; at most 256.
            most_tokens: maximum number of tokens to read. Default: 16,384.

        Raises:
            UsageError: the model does not have a loss, or the text does not fit it.
        """
        if most_tokens is not None and most_tokens < 1:
            raise UsageError(
                f"the number of tokens to read is {most_tokens}: it has to be 1 or more"
            )
        require_loss(reader, "a held-out text")
        if reader.translates and targets is None:
            raise UsageError(
                f"{reader.name} translates: give the translations of the held-out sentences, too "
                "(--held-out-targets)"
            )
        texts = given_texts(reader, text)
        lines = None if targets is None else given_lines(targets)
        windows = cut_windows(
            reader,
            texts,
            lines,
            context=context,
            most_tokens=most_tokens or MOST_TOKENS,
        )
        reader.check([window.text for window in windows.windows], None)
        self.name = text.name if isinstance(text, Path) else ""
        self.units = windows.units
        self.windows = windows
        self._reader = reader
        self._batches = [*batches_of(reader, windows, _TOKENS_OF_A_PART)]
        # Predicted tokens of each unit.
        self._counts = torch.zeros(windows.num_units, dtype=torch.float64)
        for batch in self._batches:
            self._counts.index_add_(0, batch.units, batch.counts.double().cpu())
        self.num_parts, self.num_tokens = len(self._batches), int(self._counts.sum())

    def compare(self, changed: Reader) -> LossChange:
        """Measure the change of the loss; `changed` is the reader of the changed model (`Model.reader`)."""
        before, after = (
            sum(
                (self.losses(reader, part) for part in range(self.num_parts)),
                torch.zeros_like(self._counts),
            )
            for reader in (self._reader, changed)
        )
        return self.compared(before, after)

    @torch.no_grad()
    def losses(self, reader: Reader, part: int) -> Float[Tensor, " units"]:
        """Compute the losses of one part with a model or a changed model, in nats, summed over each unit."""
        batch = self._batches[part]
        run = reader.run(batch.texts)
        sums = batch.losses(reader, run.hidden)[0].cpu()
        return torch.zeros_like(self._counts).index_add_(0, batch.units, sums)

    def compared(
        self, before: Float[Tensor, " units"], after: Float[Tensor, " units"]
    ) -> LossChange:
        """Compute the change of the loss from the sums of all parts."""
        total = self._counts.sum()
        interval = None
        if len(self._counts) > 1:
            low, high = ratio_intervals(after - before, self._counts)
            interval = float(low), float(high)
        return LossChange(
            float(before.sum() / total), float(after.sum() / total), interval
        )
