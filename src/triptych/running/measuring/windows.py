"""Windows over the documents of a text, and figures of heads with intervals over documents."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.core.algebra.resampling import ratio_intervals
from triptych.core.models import LanguageModel
from triptych.errors import UsageError
from triptych.literals import SpecialTokens
from triptych.running.measuring.stack_attention import StackAttention, read_stacks
from triptych.running.opening.layer_calls import TextIds
from triptych.running.opening.reader import Reader
from triptych.running.text.encoding import encode_texts
from triptych.running.text.framed import Frame

CONTEXT = 256  # default window length in tokens, unless the model's context is shorter
MOST_TOKENS = 1 << 16
# Tokens of a group of windows: the inputs of all their layers are in memory at once.
_TOKENS_AT_A_TIME = 2048
_PAIRS_AT_A_TIME = 64

Told = Callable[[int, int], None]
# Stack of a layer, and layer number within the stack.
Place = tuple[str, int]


@final
@dataclass(frozen=True, eq=False)
class DocumentWindow:
    """A piece of a document within the model's context."""

    document: int  # number of the document
    text: TextIds  # token ids of the window
    label: int | None = None  # number of the text's class; None without labels

    @property
    def num_tokens(self) -> int:
        return len(self.text.ids) + len(self.text.source or ())


@final
@dataclass(frozen=True)
class Windows:
    """The windows of a text, in order."""

    windows: tuple[DocumentWindow, ...]  # windows of at least two tokens
    context: int  # maximum number of tokens of a window
    num_documents: int  # number of documents with windows

    @property
    def are_labelled(self) -> bool:
        """Return True if every window is a whole text with its class."""
        return self.windows[0].label is not None

    @property
    def units(self) -> str:
        """The resampling units of intervals: documents, or the windows of a single document."""
        return "documents" if self.num_documents > 1 else "windows"

    @property
    def unit_of(self) -> tuple[int, ...]:
        """The unit number of every window; units are numbered from 0 without gaps."""
        if self.num_documents == 1:
            return tuple(range(len(self.windows)))
        numbers = {
            document: i
            for i, document in enumerate(
                dict.fromkeys(w.document for w in self.windows)
            )
        }
        return tuple(numbers[window.document] for window in self.windows)

    @property
    def num_units(self) -> int:
        return max(self.unit_of) + 1

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all windows, including source tokens of a translator."""
        return sum(window.num_tokens for window in self.windows)

    def within(self, most_tokens: int) -> "Windows":
        """Return the first windows with about `most_tokens` tokens, but at least one window."""
        windows = tuple(_first_windows(most_tokens, self.windows))
        return Windows(
            windows, self.context, len({window.document for window in windows})
        )


def cut_windows(
    reader: Reader,
    documents: Sequence[str],
    targets: Sequence[str] | None = None,
    *,
    context: int | None = None,
    most_tokens: int = MOST_TOKENS,
    special_tokens: SpecialTokens = "tokens",
) -> Windows:
    """Cut documents into adjacent windows; text past `most_tokens` is left out.

    Every window of an encoder has the special tokens of its tokenizer around it. A window of an
    encoder-decoder is a pair of texts.
    """
    # Causal models and encoders have windows of a fixed context, encoder-decoders windows of whole lines.
    if isinstance(reader.model, LanguageModel):
        if targets is not None:
            raise UsageError(f"{reader.name} does not translate: leave out the target")
        context = _context(reader.model, context)
        windows = tuple(
            _first_windows(
                most_tokens,
                _language_windows(reader, documents, context, special_tokens),
            )
        )
    else:
        if context is not None:
            raise UsageError(f"{reader.name} reads whole lines: leave out the context")
        windows = tuple(
            _first_windows(
                most_tokens, _pair_windows(reader, documents, targets, special_tokens)
            )
        )
        context = max(
            (max(len(w.text.ids), len(w.text.source or ())) for w in windows), default=0
        )
    if not windows:
        raise UsageError(
            "the text has no window of two tokens: there is nothing to measure"
        )
    return Windows(windows, context, len({window.document for window in windows}))


def _context(model: LanguageModel, context: int | None) -> int:
    limit = model.max_tokens
    if context is None:
        return min(model.context or CONTEXT, CONTEXT)
    if context < 2 or (limit is not None and context > limit):
        bounds = (
            "at least 2"
            if limit is None
            else f"between 2 and the model's {limit:,} positions"
        )
        raise UsageError(f"the context is {context:,} tokens: give {bounds}")
    return context


def _language_windows(
    reader: Reader,
    documents: Sequence[str],
    context: int,
    special_tokens: SpecialTokens,
) -> Iterator[DocumentWindow]:
    causal = reader.language_model.causal
    frame = Frame((), ()) if causal else Frame.of(reader.tokenizer)
    # Every window of an encoder repeats the special tokens around the document.
    before = len(frame.before)
    after = len(frame.after)
    for number, document in enumerate(documents):
        if not document:
            continue
        (ids,) = encode_texts(reader.tokenizer, [document], special_tokens)
        step = context - before - after
        if step < 1:
            raise UsageError(
                f"the context is {context} tokens, and {before + after} of them are special ones"
            )
        start = ids[:before]
        stop = ids[len(ids) - after :]
        inner = ids[before : len(ids) - after]
        for place in range(0, len(inner), step):
            piece = (*start, *inner[place : place + step], *stop)
            if len(piece) > 1:
                yield DocumentWindow(number, TextIds(piece))


def _pair_windows(
    reader: Reader,
    documents: Sequence[str],
    targets: Sequence[str] | None,
    special_tokens: SpecialTokens,
) -> Iterator[DocumentWindow]:
    if targets is not None and len(targets) != len(documents):
        raise UsageError(
            f"there are {len(documents):,} texts and {len(targets):,} targets: give one for each"
        )
    # Leave out pairs with an empty text. If `targets` is None, `encode` translates the texts.
    kept = [
        i
        for i, text in enumerate(documents)
        if text.strip() and (targets is None or targets[i].strip())
    ]
    for start in range(0, len(kept), _PAIRS_AT_A_TIME):
        part = kept[start : start + _PAIRS_AT_A_TIME]
        texts = [documents[i] for i in part]
        of_texts = None if targets is None else [targets[i] for i in part]
        found = reader.encode(texts, of_texts, special_tokens=special_tokens)
        yield from (
            DocumentWindow(i, text) for i, text in zip(part, found, strict=True)
        )


def _first_windows(
    most_tokens: int, windows: Iterable[DocumentWindow]
) -> Iterator[DocumentWindow]:
    """Yield windows until `most_tokens` is reached, but at least one window."""
    left = most_tokens
    for window in windows:
        if left <= 0:
            return
        left -= window.num_tokens
        yield window


def read_windows(
    reader: Reader, windows: Windows, progress: Told
) -> Iterator[tuple[int, TextIds, tuple[StackAttention, ...]]]:
    """Yield the unit, the token ids and the attention of every window."""
    # Windows run in groups of limited size, since a recording stores the inputs of all layers.
    together = list[int]()
    held = 0
    done = 0
    unit_of = windows.unit_of
    for number, window in enumerate(windows.windows):
        together.append(number)
        held += window.num_tokens
        if held < _TOKENS_AT_A_TIME and number + 1 < len(windows.windows):
            continue
        texts = [windows.windows[i].text for i in together]
        found = read_stacks(reader, texts, windows.context)
        yield from (
            (unit_of[i], text, own)
            for i, text, own in zip(together, texts, found, strict=True)
        )
        done += len(together)
        progress(done, len(windows.windows))
        together = []
        held = 0


@final
@dataclass(frozen=True, eq=False)
class HeadFigures:
    """A figure of every head of a layer."""

    value: Float[
        Tensor, " heads"
    ]  # mean over the text; NaN if it is undefined for every query
    # lower and upper end of the 95 % interval; None without an interval
    low: Float[Tensor, " heads"] | None = None
    high: Float[Tensor, " heads"] | None = None
    even: float | None = (
        None  # value of uniform attention over the visible keys; None if not applicable
    )
    count: int = 0  # number of queries (or tokens) in the mean


@final
class UnitSums:
    """Sums and counts of figures by layer and unit.

    A figure is the ratio of sum and count over all units; its interval is over the units.
    """

    def __init__(self, num_units: int) -> None:
        self._num_units = num_units
        self._found: dict[
            Place, dict[tuple[str, ...], tuple[Tensor, Tensor, Tensor | None]]
        ] = {}

    def add(
        self,
        unit: int,
        place: Place,
        names: tuple[str, ...],
        sums: Float[Tensor, "figures heads"],
        counts: Float[Tensor, "figures #heads"],
        even: Float[Tensor, " figures"] | None = None,
    ) -> None:
        """Add sums and counts for a part of a unit; `even` has the sums for uniform attention."""
        # Units without text keep a sum and a count of 0.
        held = self._found.setdefault(place, {})
        if names not in held:
            empty = torch.zeros(self._num_units, *sums.shape, dtype=torch.float64)
            held[names] = (
                empty,
                empty.clone(),
                None if even is None else empty[:, :, 0].clone(),
            )
        for whole, part in zip(held[names], (sums, counts, even), strict=True):
            if whole is not None and part is not None:
                whole[unit] += part.double().cpu()

    def figures(self) -> dict[Place, dict[str, HeadFigures]]:
        """Return every figure by layer and name."""
        found: dict[Place, dict[str, HeadFigures]] = {}
        for place, groups in self._found.items():
            own = found.setdefault(place, {})
            for names, (sums, counts, even) in groups.items():
                total = counts.sum(dim=0)
                divisor = total.where(
                    total > 0, torch.nan
                )  # NaN for figures without queries
                value, (low, high) = (
                    sums.sum(dim=0) / divisor,
                    ratio_intervals(sums, counts),
                )
                evenly = (
                    None if even is None else (even.sum(dim=0) / divisor[:, 0]).tolist()
                )
                for i, name in enumerate(names):
                    level = None if evenly is None else evenly[i]
                    own[name] = HeadFigures(
                        value[i], low[i], high[i], level, int(total[i, 0])
                    )
        return found
