"""A model over the documents of a text: its windows, and what its heads do in them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from triptych.attending.attention import Attention, LayerAttention, Stack, read_attention
from triptych.attending.behaviour import Behaviour, Kind, LayerBehaviour, RowFigures, Sums
from triptych.errors import UsageError
from triptych.models import LanguageModel
from triptych.opening import Reader, TextIds

CONTEXT = 256  # where the model itself sets no lower limit
MOST_TOKENS = 1 << 16
# Tokens of windows whose inputs of all layers are held at a time.
_TOKENS_AT_A_TIME = 2048

Told = Callable[[int, int], None]


@final
@dataclass(frozen=True, eq=False)
class Window:
    """A piece of a document that a model reads at once.

    Attributes:
        document: number of the document.
        text: what the model reads.
    """

    document: int
    text: TextIds

    @property
    def num_tokens(self) -> int:
        return len(self.text.ids) + len(self.text.source or ())


@final
@dataclass(frozen=True)
class Windows:
    """The windows of a text, in order.

    Attributes:
        windows: of two tokens at least.
        context: tokens of a window at most.
        num_documents: how many documents they are of.
    """

    windows: tuple[Window, ...]
    context: int
    num_documents: int

    @property
    def units(self) -> str:
        """What intervals are drawn over: documents, or of a single one its windows."""
        return "documents" if self.num_documents > 1 else "windows"

    @property
    def unit_of(self) -> tuple[int, ...]:
        """The unit of every window, numbered from 0 without gaps."""
        if self.num_documents == 1:
            return tuple(range(len(self.windows)))
        numbers = {document: i for i, document in enumerate(dict.fromkeys(w.document for w in self.windows))}
        return tuple(numbers[window.document] for window in self.windows)

    @property
    def num_units(self) -> int:
        return max(self.unit_of) + 1

    @property
    def num_tokens(self) -> int:
        """Of all windows, both sides of a translator."""
        return sum(window.num_tokens for window in self.windows)

    def within(self, most_tokens: int) -> "Windows":
        """The first windows, of about so many tokens, at least one window."""
        windows = tuple(_within(most_tokens, self.windows))
        return Windows(windows, self.context, len({window.document for window in windows}))


def cut_windows(
    reader: Reader,
    documents: Sequence[str],
    targets: Sequence[str] | None = None,
    *,
    context: int | None = None,
    most_tokens: int = MOST_TOKENS,
) -> Windows:
    """Cut documents into windows side by side; what is past `most_tokens` is left out.

    Every window of an encoder has the special tokens that its tokenizer puts around a text. Of an
    encoder-decoder a pair of texts is one window.
    """
    if isinstance(reader.model, LanguageModel):
        if targets is not None:
            raise UsageError(f"{reader.name} does not translate: leave out the target")
        context = _context(reader.model, context)
        windows = tuple(_within(most_tokens, _language_windows(reader, documents, context)))
    else:
        if context is not None:
            raise UsageError(f"{reader.name} reads whole lines: leave out the context")
        windows = tuple(_within(most_tokens, _pairs(reader, documents, targets)))
        context = max((max(len(w.text.ids), len(w.text.source or ())) for w in windows), default=0)
    if not windows:
        raise UsageError("the text has no window of two tokens: there is nothing to measure")
    return Windows(windows, context, len({window.document for window in windows}))


def _context(model: LanguageModel, context: int | None) -> int:
    limit = model.max_tokens
    if context is None:
        return min(model.context or CONTEXT, CONTEXT)
    if context < 2 or (limit is not None and context > limit):
        bounds = "at least 2" if limit is None else f"between 2 and the model's {limit:,} positions"
        raise UsageError(f"the context is {context:,} tokens: give {bounds}")
    return context


def _language_windows(reader: Reader, documents: Sequence[str], context: int) -> Iterator[Window]:
    causal, special = reader.opened.language_model.causal, reader.tokenizer.special_ids
    for number, document in enumerate(documents):
        if not document.strip():
            continue
        (ids,) = reader.tokenizer.encode([document], add_special=True)
        before = after = 0
        if not causal:
            plain = [i for i, token in enumerate(ids) if token not in special]
            if not plain:
                continue
            before, after = plain[0], len(ids) - 1 - plain[-1]
        step = context - before - after
        if step < 1:
            raise UsageError(
                f"the context is {context} tokens, and {before + after} of them are special ones"
            )
        start, stop = ids[:before], ids[len(ids) - after :]
        inner = ids[before : len(ids) - after]
        for place in range(0, len(inner), step):
            piece = (*start, *inner[place : place + step], *stop)
            if len(piece) > 1:
                yield Window(number, TextIds(piece))


def _pairs(reader: Reader, documents: Sequence[str], targets: Sequence[str] | None) -> Iterator[Window]:
    if targets is not None and len(targets) != len(documents):
        raise UsageError(
            f"there are {len(documents):,} texts and {len(targets):,} targets: give one for each"
        )
    kept = [i for i, text in enumerate(documents) if text.strip() and (targets is None or targets[i].strip())]
    for start in range(0, len(kept), _PAIRS_AT_A_TIME):
        part = kept[start : start + _PAIRS_AT_A_TIME]
        texts = [documents[i] for i in part]
        found = reader.encode(texts, None if targets is None else [targets[i] for i in part])
        yield from (Window(i, text) for i, text in zip(part, found, strict=True))


_PAIRS_AT_A_TIME = 64


def _within(most_tokens: int, windows: Iterable[Window]) -> Iterator[Window]:
    """The first ones, at least one."""
    left = most_tokens
    for window in windows:
        if left <= 0:
            return
        left -= window.num_tokens
        yield window


def read_windows(
    reader: Reader, windows: Windows, progress: Told = lambda done, total: None
) -> Iterator[tuple[int, Attention]]:
    """The attention on every window with the number of its unit, a few windows in memory at a time."""
    together, held, done = list[int](), 0, 0
    for number, window in enumerate(windows.windows):
        together.append(number)
        held += window.num_tokens
        if held < _TOKENS_AT_A_TIME and number + 1 < len(windows.windows):
            continue
        texts = [windows.windows[i].text for i in together]
        found = read_attention(reader, texts, windows.context)
        yield from ((windows.unit_of[i], one) for i, one in zip(together, found, strict=True))
        done += len(together)
        progress(done, len(windows.windows))
        together, held = [], 0


def kind_of(stack: Stack) -> Kind:
    """Which tokens the queries of a stack may look at."""
    if stack.kind == "cross":
        return "cross"
    return "causal" if stack.kind == "decoder" else "self"


def ids_of(attention: Attention, stack: Stack) -> tuple[Int[Tensor, " queries"], Int[Tensor, " keys"]]:
    """The tokens at the queries and at the keys of a stack, as ids.

    The decoder of an encoder-decoder reads what it produces one place later; its start token is -1.
    """
    if attention.source_ids is None:
        ids = torch.tensor(attention.ids)
        return ids, ids
    source = torch.tensor(attention.source_ids)
    if stack.kind == "encoder":
        return source, source
    if stack.kind == "cross":
        return torch.tensor(attention.ids), source
    read = torch.tensor([-1, *attention.ids[:-1]])
    return read, read


def layers_of(attention: Attention) -> Iterator[tuple[Stack, LayerAttention]]:
    """Every layer of every stack."""
    for stack in attention.stacks:
        for layer in stack.layers:
            yield stack, layer


@torch.no_grad()
def measure_behaviour(
    reader: Reader, windows: Windows, progress: Told = lambda done, total: None
) -> Behaviour:
    """What every head of a model does over a text."""
    units = windows.num_units
    found: dict[tuple[str, int, Kind], list[Sums | None]] = {}
    for unit, attention in read_windows(reader, windows, progress):
        shared: dict[str, RowFigures] = {}
        for stack, layer in layers_of(attention):
            compared, kind = layer.queries_and_keys(), kind_of(stack)
            visible = compared.visible()[0, 0].cpu()
            figures = shared.get(stack.kind)
            if figures is None or not torch.equal(figures.visible, visible):
                figures = RowFigures(kind, visible, *ids_of(attention, stack))
                shared[stack.kind] = figures
            sums = figures.sums(compared.weights()[0].cpu())
            own = found.setdefault((stack.kind, layer.number, kind), [None] * units)
            before = own[unit]
            own[unit] = sums if before is None else before + sums
    layers = tuple(
        LayerBehaviour.of_sums(stack, number, kind, [sums for sums in own if sums is not None])
        for (stack, number, kind), own in found.items()
    )
    return Behaviour(reader.name, layers, windows.units, units, windows.num_tokens, windows.context)
