"""The interface of models on texts: run by triptych (`Reader`) or by `transformers`."""

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
# Meaning of a row of `TextReader.outputs`: logits of tokens or of classes, one number per label (regression,
# spans), or the hidden state of a token.
Output = Literal["tokens", "classes", "numbers", "hidden states"]


@final
@dataclass(frozen=True, eq=False)
class Window:
    """The input of a model for a piece of text."""

    # token ids `[1, length]` by argument: `input_ids`, and `decoder_input_ids` for pairs
    inputs: Mapping[str, Tensor]
    # next token at each position, `[length]`; None for models without a next-token prediction
    targets: Tensor | None = None


@final
@dataclass(frozen=True, eq=False)
class Seen:
    """The inputs of a layer: `x` for the queries, and `memory` for keys and values in cross-attention."""

    x: Tensor
    memory: Tensor | None


class TextReader(ABC):
    """A model run on texts, by triptych (`Reader`) or by `transformers`."""

    name: str  # path, or name on the Hub
    by: str  # library of the implementation
    model: nn.Module

    @property
    @abstractmethod
    def kind(self) -> TextKind: ...

    @abstractmethod
    def copied(self) -> "TextReader":
        """Return the same with a copy of the module, safe to modify."""

    def windows(self, text: Path, most_tokens: int) -> Iterator[Window]:
        """Yield windows: 128 tokens for causal models, a line for encoders, a line with a tab for pairs."""
        if self.kind == "pairs":
            pairs = (
                self._pair(source, target) for source, target in read_tab_pairs(text)
            )
            return _up_to(most_tokens, pairs)
        whole = read_whole_text(text)
        length = min(WINDOW_TOKENS, self._longest())
        if self.kind == "causal":
            ids = torch.tensor(self._encode(whole, False)[: most_tokens + 1])
            return _windows_of_length(ids, length)
        lines = (
            self._encode(line, True)[:length]
            for line in whole.splitlines()
            if line.strip()
        )
        return _up_to(
            most_tokens, (Window({"input_ids": torch.tensor([ids])}) for ids in lines)
        )

    @abstractmethod
    def random_windows(self, seed: int) -> Iterator[Window]:
        """Yield windows of random tokens."""

    @abstractmethod
    def outputs(self, window: Window) -> Tensor:
        """Compute logits, or hidden states of a model without an output head, `[length, width]`."""

    @property
    @abstractmethod
    def output(self) -> Output:
        """The meaning of the rows of `outputs`."""

    @abstractmethod
    def inputs(
        self, window: Window, source: AttentionSource, sites: Sequence[Site]
    ) -> dict[str, list[Seen]]:
        """Run a window; return the inputs of every attention layer by name of its weights."""

    def runs(self, site: Site) -> bool:
        """Return True if the model runs an attention layer of the checkpoint."""
        return True

    @abstractmethod
    def attention_modules(self, site: Site) -> Sequence[nn.Module]:
        """Return the modules of the attention layers at a site."""

    def attention_outputs(
        self, source: AttentionSource, window: Window
    ) -> list[tuple[str, Tensor]]:
        """Return the outputs of attention layers with their names, in execution order."""
        # A hook records the output; modules of transformers return it first in a tuple.
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
        """Return the maximum text length of the model in tokens."""

    @abstractmethod
    def _encode(self, text: str, special: bool) -> list[int]: ...

    @abstractmethod
    def _pair(self, source: str, target: str) -> Window: ...


def _windows_of_length(ids: Tensor, length: int) -> Iterator[Window]:
    """Yield windows of `length` tokens; every token but the first is a target once."""
    for start in range(0, len(ids) - 1, length):
        piece = ids[start : start + length + 1]
        yield Window({"input_ids": piece[None, :-1]}, piece[1:])


def _up_to(most_tokens: int, windows: Iterable[Window]) -> Iterator[Window]:
    """Yield windows until `most_tokens` is reached, counting targets, or inputs without targets."""
    done = 0
    for window in windows:
        yield window
        done += (
            window.inputs["input_ids"].shape[1]
            if window.targets is None
            else len(window.targets)
        )
        if done >= most_tokens:
            return


def read_tab_pairs(path: Path) -> Iterator[tuple[str, str]]:
    """Yield source and target of each line, separated by a tab."""
    for number, line in enumerate(iterate_file(path), start=1):
        source, tab, target = line.partition("\t")
        if not tab:
            raise UsageError(
                f"{path}, line {number}: expected a source, a tab and a target"
            )
        yield source, target


def read_whole_text(path: Path) -> str:
    """Read the text of a plain, .gz or .zst file; all line endings become line feeds."""
    return "".join(iterate_blocks(path)).replace("\r\n", "\n").replace("\r", "\n")
