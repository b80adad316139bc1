"""What a model that can be run is, and how two of them are compared on text."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from triptych.checkpoints.layer import AttentionSource, Site
from triptych.errors import UsageError

WINDOW_TOKENS = 128
RANDOM_WINDOWS = 4
_FARTHEST = 4
RunnableKind = Literal["causal", "pairs", "encoder"]


@final
@dataclass(frozen=True, eq=False)
class Window:
    """The input of a model for a piece of text.

    Attributes:
        inputs: token ids by argument, `[1, length]` each.
        targets: the token that comes next at each position, `[length]`; None where nothing is predicted.
    """

    inputs: Mapping[str, Tensor]
    targets: Tensor | None


@final
@dataclass(frozen=True, eq=False)
class Seen:
    """The inputs of a layer: `x` for the queries, and `memory` for keys and values in cross-attention."""

    x: Tensor
    memory: Tensor | None


class RunnableModel(ABC):
    """A model that can be run.

    Attributes:
        by: the library that runs it.
        kind: how it reads text.
        model: its module.
        seen: the inputs of the watched layers in the last run, by name, one for each use of the layer.
    """

    by: str
    kind: RunnableKind
    model: nn.Module
    seen: dict[str, list[Seen]]

    @abstractmethod
    def windows(self, text: Path, most_tokens: int) -> Iterator[Window]:
        """Cut a text into windows."""

    @abstractmethod
    def random_windows(self, seed: int) -> Iterator[Window]:
        """Windows of random tokens."""

    @abstractmethod
    def outputs(self, window: Window) -> Tensor:
        """Logits, or hidden states of a model without a vocabulary on top, `[length, width]`."""

    @abstractmethod
    def watch(self, source: AttentionSource, sites: Sequence[Site]) -> "contextlib.ExitStack":
        """Record the inputs of attention layers in `seen`, until the returned stack is closed."""

    @abstractmethod
    def attention_module(self, site: Site) -> nn.Module:
        """The module of an attention layer."""

    def attention_outputs(self, source: AttentionSource, window: Window) -> list[tuple[str, Tensor]]:
        """The outputs of attention layers with their names, in the order in which they run."""
        found: list[tuple[str, Tensor]] = []

        def keep(module: nn.Module, given: Any, output: Any, *, name: str) -> None:
            found.append((name, output if isinstance(output, Tensor) else output[0]))

        with contextlib.ExitStack() as stack:
            for site in source.sites:
                hook = partial(keep, name=site.name)
                stack.callback(self.attention_module(site).register_forward_hook(hook).remove)
            self.outputs(window)
        return found


class Compared(NamedTuple):
    """Comparison of two models on the same windows.

    Attributes:
        tokens: number of predicted tokens.
        worst_logit: largest difference of a logit.
        divergence_nats: mean KL divergence of the second model's next token from the first's.
        loss_before_nats: loss of the first model per token; None if nothing is predicted. Likewise
            `loss_after_nats` of the second.
        farthest: the windows on which logits differ most, the worst first.
    """

    tokens: int
    worst_logit: float
    divergence_nats: float
    loss_before_nats: float | None
    loss_after_nats: float | None
    farthest: tuple[Window, ...] = ()


@torch.inference_mode()
def compared(original: RunnableModel, rewritten: RunnableModel, windows: Iterator[Window]) -> Compared:
    """Compare two models on a text."""
    tokens, worst, divergence, predicted = 0, 0.0, 0.0, 0
    losses, farthest = [0.0, 0.0], list[tuple[float, Window]]()
    for window in windows:
        one, other = original.outputs(window).double(), rewritten.outputs(window).double()
        apart = largest_difference(one, other)
        worst = max(worst, apart)
        farthest = sorted([*farthest, (apart, window)], key=lambda pair: -pair[0])[:_FARTHEST]
        log_p, log_q = one.log_softmax(dim=-1), other.log_softmax(dim=-1)
        divergence += float((log_p.exp() * (log_p - log_q)).sum().clamp(min=0))
        tokens += len(one)
        if window.targets is not None:
            predicted += len(window.targets)
            for place, found in enumerate((log_p, log_q)):
                losses[place] -= float(found.gather(-1, window.targets[:, None]).sum())
    if not tokens:
        raise UsageError("the text is empty: there is nothing to compare on")
    before, after = (loss / predicted if predicted else None for loss in losses)
    return Compared(
        tokens, worst, divergence / tokens, before, after, tuple(window for _, window in farthest)
    )


def largest_difference(one: Tensor, other: Tensor) -> float:
    """The largest difference of two outputs; infinite if an entry is NaN in only one of them."""
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    return float((one - other).abs().nan_to_num(nan=torch.inf).masked_fill(same, 0.0).max())


def windows_of_text(
    text: Path,
    most_tokens: int,
    length: int,
    encode: Callable[[str, bool], Sequence[int]],
    *,
    causal: bool,
) -> Iterator[Window]:
    """Windows of a text for a model that reads one sequence."""
    whole = read_whole_text(text)
    if causal:
        ids = torch.tensor(encode(whole, False))
        return _side_by_side(ids[: most_tokens + 1], length)
    lines = (line for line in whole.splitlines() if line.strip())
    return up_to(most_tokens, (_window_of_line(encode(line, True)[:length]) for line in lines))


def _side_by_side(ids: Tensor, length: int) -> Iterator[Window]:
    """Windows of so many tokens, each token after the first predicted once."""
    for start in range(0, len(ids) - 1, length):
        piece = ids[start : start + length + 1]
        yield Window({"input_ids": piece[None, :-1]}, piece[1:])


def up_to(most_tokens: int, windows: Iterable[Window]) -> Iterator[Window]:
    """Windows until so many tokens are predicted, or read where nothing is predicted."""
    done = 0
    for window in windows:
        yield window
        done += window.inputs["input_ids"].shape[1] if window.targets is None else len(window.targets)
        if done >= most_tokens:
            return


def _window_of_line(ids: Sequence[int]) -> Window:
    """The window of a line in which nothing is predicted."""
    return Window({"input_ids": torch.tensor([ids])}, None)


def read_pairs(path: Path) -> Iterator[tuple[str, str]]:
    """The lines of a text, each a source, a tab and a target."""
    for number, line in enumerate(read_whole_text(path).splitlines(), start=1):
        source, tab, target = line.partition("\t")
        if not tab:
            raise UsageError(f"{path}, line {number}: expected a source, a tab and a target")
        yield source, target


def read_whole_text(path: Path) -> str:
    """Read a text file."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: it is not UTF-8: {error.reason} at byte {error.start}") from None


def first_line(error: Exception) -> str:
    """The first line of an error that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]
