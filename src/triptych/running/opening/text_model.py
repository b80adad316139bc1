"""What reads texts: a model of ours (`Reader`), or one of a family that `transformers` runs."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from triptych.core.checkpoints.stored_layers import AttentionSource, Site
from triptych.errors import UsageError
from triptych.running.text.lines import iterate_blocks, iterate_file

WINDOW_TOKENS = 128
RANDOM_WINDOWS = 4
RANDOM_TOKENS = 32
TextKind = Literal["causal", "pairs", "encoder"]


@final
@dataclass(frozen=True, eq=False)
class Window:
    """The input of a model for a piece of text."""

    # token ids by argument, `[1, length]` each: `input_ids`, and `decoder_input_ids` for pairs
    inputs: Mapping[str, Tensor]
    # the token that comes next at each position, `[length]`; None where nothing is predicted
    targets: Tensor | None = None


@final
@dataclass(frozen=True, eq=False)
class Seen:
    """The inputs of a layer: `x` for the queries, and `memory` for keys and values in cross-attention."""

    x: Tensor
    memory: Tensor | None


class TextModel(ABC):
    """A model that reads texts."""

    name: str  # its path, or its name on the Hub
    by: str  # the library that runs it

    @property
    @abstractmethod
    def kind(self) -> TextKind: ...

    @property
    @abstractmethod
    def model(self) -> nn.Module: ...

    @abstractmethod
    def copied(self) -> "TextModel":
        """The same with a copy of the module, which may be changed."""

    def windows(self, text: Path, most_tokens: int) -> Iterator[Window]:
        """Windows of 128 tokens side by side; for encoders a line is one, for pairs a line with a tab."""
        if self.kind == "pairs":
            pairs = (self._pair(source, target) for source, target in read_tab_pairs(text))
            return _up_to(most_tokens, pairs)
        whole = read_whole_text(text)
        length = min(WINDOW_TOKENS, self._longest())
        if self.kind == "causal":
            ids = torch.tensor(self._encode(whole, False)[: most_tokens + 1])
            return _windows_of_length(ids, length)
        lines = (self._encode(line, True)[:length] for line in whole.splitlines() if line.strip())
        return _up_to(most_tokens, (Window({"input_ids": torch.tensor([ids])}) for ids in lines))

    @abstractmethod
    def random_windows(self, seed: int) -> Iterator[Window]:
        """Windows of random tokens."""

    @abstractmethod
    def outputs(self, window: Window) -> Tensor:
        """Logits, or hidden states of a model without a vocabulary on top, `[length, width]`."""

    @abstractmethod
    def inputs(self, window: Window, source: AttentionSource, sites: Sequence[Site]) -> dict[str, list[Seen]]:
        """Run a window: the inputs of attention layers by the name of their weights, one for each layer."""

    def runs(self, site: Site) -> bool:
        """Whether it runs an attention layer, and does not leave it aside."""
        return True

    @abstractmethod
    def attention_modules(self, site: Site) -> Sequence[nn.Module]:
        """Return the modules of the attention layers that have some weights."""

    def attention_outputs(self, source: AttentionSource, window: Window) -> list[tuple[str, Tensor]]:
        """The outputs of attention layers with their names, in the order in which they run."""
        found: list[tuple[str, Tensor]] = []

        def keep(module: nn.Module, given: Any, output: Any, *, name: str) -> None:
            found.append((name, output if isinstance(output, Tensor) else output[0]))

        with ExitStack() as stack:
            for site in filter(self.runs, source.sites):
                hook = partial(keep, name=site.name)
                for module in self.attention_modules(site):
                    stack.callback(module.register_forward_hook(hook).remove)
            self.outputs(window)
        return found

    @abstractmethod
    def _longest(self) -> int:
        """Tokens of a text that the model is made for."""

    @abstractmethod
    def _encode(self, text: str, special: bool) -> list[int]: ...

    @abstractmethod
    def _pair(self, source: str, target: str) -> Window: ...


def _windows_of_length(ids: Tensor, length: int) -> Iterator[Window]:
    """Windows of `length` tokens, each token after the first predicted once."""
    for start in range(0, len(ids) - 1, length):
        piece = ids[start : start + length + 1]
        yield Window({"input_ids": piece[None, :-1]}, piece[1:])


def _up_to(most_tokens: int, windows: Iterable[Window]) -> Iterator[Window]:
    """Windows until enough tokens are predicted, or read where nothing is predicted."""
    done = 0
    for window in windows:
        yield window
        done += window.inputs["input_ids"].shape[1] if window.targets is None else len(window.targets)
        if done >= most_tokens:
            return


def read_tab_pairs(path: Path) -> Iterator[tuple[str, str]]:
    """The lines of a text, each a source, a tab and a target."""
    for number, line in enumerate(iterate_file(path), start=1):
        source, tab, target = line.partition("\t")
        if not tab:
            raise UsageError(f"{path}, line {number}: expected a source, a tab and a target")
        yield source, target


def read_whole_text(path: Path) -> str:
    """The text of a plain, .gz or .zst file; every line ends at a line feed."""
    return "".join(iterate_blocks(path)).replace("\r\n", "\n").replace("\r", "\n")
