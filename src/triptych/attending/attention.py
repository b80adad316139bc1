"""Attention weights of a text: by kind, layer, head and token."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, final, overload

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.attending.alignment import align_words, words_of
from triptych.attending.maps import DenseMap, HeadMap, RowKeeper
from triptych.attending.page import AttentionPage, ViewedHead, ViewedKind, ViewedLayer, ViewedText, join_pages
from triptych.attending.steps import HeadSteps
from triptych.attending.viewing import notebook_html
from triptych.attention import QueriesAndKeys, WeightBlock
from triptych.errors import UsageError
from triptych.opening import AttentionKind, LayerCall, Reader, TextIds

# Of more weights a page has the largest of every query only.
MOST_WEIGHTS_OF_A_PAGE, _KEPT = 4_500_000, 16
_TITLE = 80


@final
@dataclass(frozen=True, eq=False)
class LayerAttention:
    """The attention of one layer on one text. Weights are computed when they are asked for.

    Attributes:
        number: of the layer in its stack; a layer that runs several times has a number for each.
        call: the layer and its inputs, batch size 1.
    """

    number: int
    call: LayerCall

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self.call.layer.num_heads

    @torch.no_grad()
    def queries_and_keys(self) -> QueriesAndKeys:
        """Queries and keys as the layer compares them, batch size 1."""
        return self.call.queries_and_keys()

    @torch.no_grad()
    def weights(
        self, rows: slice = slice(None), heads: Sequence[int] | None = None
    ) -> Float[Tensor, "heads rows keys"]:
        """Attention weights."""
        self.require_heads(heads)
        return self.queries_and_keys().weights(rows, heads)[0]

    @torch.no_grad()
    def blocks(self, heads: Sequence[int] | None = None) -> Iterator[WeightBlock]:
        """All weights, some queries at a time, `[heads, rows, keys]`; see `QueriesAndKeys.blocks`."""
        self.require_heads(heads)
        for block in self.queries_and_keys().blocks(heads):
            yield WeightBlock(block.rows, block.weights[0])

    def maps(self, k: int | None = None, heads: Sequence[int] | None = None) -> tuple[HeadMap, ...]:
        """The weights of every head as a page or a file shows them."""
        if k is None:
            return tuple(DenseMap(weights.float().cpu().numpy()) for weights in self.weights(heads=heads))
        compared = self.queries_and_keys()
        num_heads = self.num_heads if heads is None else len(heads)
        keeper = RowKeeper(num_heads, compared.query_len, compared.key_len, k)
        for block in self.blocks(heads):
            keeper.add(block.weights)
        return keeper.maps()

    def require_heads(self, heads: Sequence[int] | None) -> None:
        """The layer has these heads."""
        for head in heads or ():
            if not 0 <= head < self.num_heads:
                raise UsageError(
                    f"there is no head {head} in layer {self.number}: its heads are 0 to {self.num_heads - 1}"
                )


@final
@dataclass(frozen=True, eq=False)
class Stack:
    """The layers of one kind of attention, on one text: `stack[3]` is `[heads, queries, keys]` of layer 3.

    Attributes:
        kind: "encoder", "decoder" (self-attention) or "cross" (of target tokens to source tokens).
        queries: the tokens that look, readable.
        keys: the tokens looked at.
        layers: in the order in which they run.
    """

    kind: AttentionKind
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    layers: tuple[LayerAttention, ...]

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def __iter__(self) -> Iterator[Float[Tensor, "heads queries keys"]]:
        return (layer.weights() for layer in self.layers)

    def __getitem__(self, number: int) -> Float[Tensor, "heads queries keys"]:
        """The weights of a layer."""
        return self.layer(number).weights()

    def layer(self, number: int) -> LayerAttention:
        """A layer, whose weights can be asked for in parts."""
        if not -len(self.layers) <= number < len(self.layers):
            raise UsageError(f"there is no {self.kind} layer {number}: they are 0 to {len(self.layers) - 1}")
        return self.layers[number]


class Part(NamedTuple):
    """Some heads of a layer.

    Attributes:
        stack: that the layer is of.
        layer: the layer.
        heads: their numbers, at least one.
    """

    stack: Stack
    layer: LayerAttention
    heads: tuple[int, ...]

    @property
    def num_weights(self) -> int:
        """How many weights these heads have."""
        return len(self.heads) * len(self.stack.queries) * len(self.stack.keys)


class HeadNote(NamedTuple):
    """What a page says of a head.

    Attributes:
        label: a few words beside its number, such as "previous token".
        facts: name and value of what is known of it.
    """

    label: str = ""
    facts: tuple[tuple[str, str], ...] = ()


@final
@dataclass(frozen=True, eq=False)
class Attention:
    """Attention of a model on one text.

    Attributes:
        model: its name: the path, or the id on the Hub.
        ids: the tokens read by the encoder or the decoder; of an encoder-decoder those that its decoder
            produces, the end of sentence last.
        tokens: the same, readable.
        num_generated: how many of them, the last ones, the model produced itself.
        stacks: of an encoder-decoder "encoder", "decoder" and "cross".
        source_ids: the tokens that the encoder of an encoder-decoder read; None for other models.
        source_tokens: the same, readable.
        reader: what ran the model.
    """

    model: str
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    num_generated: int
    stacks: tuple[Stack, ...]
    source_ids: tuple[int, ...] | None
    source_tokens: tuple[str, ...] | None
    reader: Reader

    def __getitem__(self, place: int | str | tuple[int | str, int]) -> Tensor:
        """The weights of a layer, `[heads, queries, keys]`, or of a head, `[queries, keys]`.

        `attention[3]` and `attention[3, 2]` or `attention["3.2"]`; of an encoder-decoder
        `attention["cross.3", 2]` or `attention["cross.3.2"]`.
        """
        _, layer, head = self._place(place)
        return layer.weights() if head is None else layer.weights(heads=[head])[0]

    def steps(self, layer: int | str, head: int, query: int = -1) -> HeadSteps:
        """One row of a head's attention step by step: `attention.steps(3, 2, query=5)`.

        Args:
            layer: its number; of an encoder-decoder as in `"cross.3"`.
            head: its number.
            query: number of the token that looks; the last one if -1.

        Raises:
            UsageError: no such layer, head or token.
        """
        stack, found, _ = self._place((layer, head))
        text = TextIds(self.ids, self.source_ids, self.num_generated)
        name = str(found.number) if len(self.stacks) == 1 else f"{stack.kind}.{found.number}"
        tokens = stack.queries, stack.keys
        return HeadSteps(self.reader, text, found.call, found.number, head, query, tokens, name)

    def align(self, layer: int | str, head: int) -> list[tuple[str, str]]:
        """Each word of the translation with the source word that a head of cross-attention looks at most.

        Args:
            layer: of cross-attention, as in `"cross.3"`.
            head: its number.

        Raises:
            UsageError: no such layer or head, or no cross-attention.
        """
        stack, found, _ = self._place((layer, head))
        if stack.kind != "cross" or self.source_ids is None:
            raise UsageError(f"{self.model}: layer {layer} is no cross-attention, which aligns words")
        source, target = (
            words_of(pieces, [token in tokenizer.special_ids for token in ids])
            for pieces, ids, tokenizer in (
                (stack.keys, self.source_ids, self.reader.source_tokenizer),
                (stack.queries, self.ids, self.reader.tokenizer),
            )
        )
        links = align_words(found.weights(heads=[head])[0], source, target) if source else []
        return [(word.text, source[i].text) for word, i in zip(target, links, strict=False)]

    def _place(self, place: int | str | tuple[int | str, int]) -> tuple[Stack, LayerAttention, int | None]:
        """A layer with its stack, and a head of it; None for all."""
        layer, head = place if isinstance(place, tuple) else (place, None)
        parts = str(layer).split(".")
        kind = "" if parts[0].lstrip("-").isdigit() else parts.pop(0)
        if head is None and len(parts) == 2 and parts[1].isdigit():
            head = int(parts.pop())
        if len(parts) != 1 or not parts[0].lstrip("-").isdigit():
            raise UsageError(f'"{layer}" is no place: write a layer as 3 or cross.3, a head as 3.2')
        if not kind and len(self.stacks) > 1:
            names = ", ".join(f"{stack.kind}.{layer}" for stack in self.stacks)
            raise UsageError(f"{layer} could be {names}: give one of these")
        stack = self.of(kind) if kind else self.stacks[0]
        found = stack.layer(int(parts[0]))
        found.require_heads(None if head is None else [head])
        return stack, found, head

    @property
    def kinds(self) -> tuple[AttentionKind, ...]:
        """The kinds of attention that the model has."""
        return tuple(stack.kind for stack in self.stacks)

    @property
    def weights(self) -> Stack:
        """The weights of every layer; of an encoder-decoder the cross-attention."""
        return self.stacks[-1]

    @property
    def is_generated(self) -> tuple[bool, ...]:
        """Of each token, whether the model produced it."""
        given = len(self.tokens) - self.num_generated
        return tuple(place >= given for place in range(len(self.tokens)))

    def of(self, kind: str) -> Stack:
        """The layers of one kind of attention.

        Raises:
            UsageError: the model has no such attention.
        """
        for stack in self.stacks:
            if stack.kind == kind:
                return stack
        raise UsageError(f"{self.model} has no {kind} attention: its kinds are {', '.join(self.kinds)}")

    def parts(
        self,
        kinds: Sequence[str] | None = None,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
    ) -> list[Part]:
        """Chosen heads, layer by layer.

        Args:
            kinds: of attention; all if None.
            layers: numbers of layers; all if None.
            heads: numbers of heads, the same of every layer; all if None.

        Raises:
            UsageError: the model has no such kind, layer or head; the message says which there are.
        """
        stacks = self.stacks if kinds is None else [self.of(kind) for kind in kinds]
        most = max(map(len, stacks))
        for number in layers or ():
            if not 0 <= number < most:
                raise UsageError(f"there is no layer {number}: layers are 0 to {most - 1}")
        found: list[Part] = []
        for stack in stacks:
            for layer in stack.layers:
                if layers is None or layer.number in layers:
                    own = range(layer.num_heads) if heads is None else heads
                    layer.require_heads(own)
                    found.append(Part(stack, layer, tuple(own)))
        return found

    def page(
        self,
        title: str | None = None,
        *,
        parts: Sequence[Part] | None = None,
        keep: int | None = None,
        notes: Mapping[tuple[str, int, int], HeadNote] = MappingProxyType({}),
        progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    ) -> AttentionPage:
        """What `triptych attend --html` shows of this text.

        Args:
            title: the heading; the model's name if None.
            parts: the heads; all if None.
            keep: weights of every query that the page has, the largest ones, and the sum of the others.
                If None all, or the 16 largest where all are too many for a page.
            notes: what is said of a head, by kind, layer and head.
            progress: told what is done, how many layers, and of how many.
        """
        chosen = self.parts() if parts is None else parts
        if keep is None and sum(part.num_weights for part in chosen) > MOST_WEIGHTS_OF_A_PAGE:
            keep = _KEPT
        layers: dict[AttentionKind, list[ViewedLayer]] = {}
        for done, (stack, layer, heads) in enumerate(chosen):
            progress(f"{stack.kind} layer {layer.number}", done, len(chosen))
            viewed = [
                ViewedHead(drawn, *notes.get((stack.kind, layer.number, head), HeadNote()), head)
                for head, drawn in zip(heads, layer.maps(keep, heads), strict=True)
            ]
            layers.setdefault(stack.kind, []).append(ViewedLayer(tuple(viewed), layer.number))
        kinds = tuple(self._viewed(self.of(kind), own) for kind, own in layers.items())
        text = ViewedText(_shown("".join(map(_readable, self.source_tokens or self.tokens))), kinds)
        facts = () if title is None else (("model", self.model),)
        return AttentionPage(title or self.model, (text,), facts)

    def _repr_html_(self) -> str:
        """The page, for a notebook."""
        return notebook_html(self.page())

    def _viewed(self, stack: Stack, layers: Sequence[ViewedLayer]) -> ViewedKind:
        produced = self.source_ids is not None and stack.kind != "encoder"
        given = len(self.tokens) - self.num_generated
        marked = self.num_generated > 0 and (produced or self.source_ids is None)
        # A decoder beside an encoder reads what it produced one place later.
        first_key = given + 1 if produced else given
        return ViewedKind(
            stack.kind,
            tuple(map(_readable, stack.queries)),
            tuple(map(_readable, stack.keys)),
            tuple(layers),
            given if marked else None,
            first_key if marked and stack.kind != "cross" and first_key < len(stack.keys) else None,
        )


def _readable(token: str) -> str:
    return token.replace("▁", " ")


def _shown(text: str) -> str:
    """A text as the title of itself."""
    line = " ".join(text.split())
    return line if len(line) <= _TITLE else f"{line[: _TITLE - 1]}…"


@final
class BatchWeights:
    """The weights of a batch by layer: `weights[3]` is `[batch, heads, queries, keys]`, 0 at padding."""

    def __init__(self, stacks: Sequence[Stack]) -> None:
        """Of the same kind of attention on several texts."""
        self._stacks = tuple(stacks)

    def __len__(self) -> int:
        """Number of layers."""
        return len(self._stacks[0])

    def __iter__(self) -> Iterator[Float[Tensor, "batch heads queries keys"]]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Float[Tensor, "batch heads queries keys"]:
        """The weights of a layer."""
        found = [stack[number] for stack in self._stacks]
        rows, columns = (max(weights.shape[side] for weights in found) for side in (1, 2))
        whole = found[0].new_zeros(len(found), found[0].shape[0], rows, columns)
        for place, weights in enumerate(found):
            whole[place, :, : weights.shape[1], : weights.shape[2]] = weights
        return whole


@final
class AttentionBatch:
    """Attention of a model on several texts: `batch[2]` is that of the third."""

    def __init__(self, texts: Sequence[Attention]) -> None:
        """Of one model, at least one text."""
        self.texts = tuple(texts)

    def __len__(self) -> int:
        """Number of texts."""
        return len(self.texts)

    def __iter__(self) -> Iterator[Attention]:
        return iter(self.texts)

    def __getitem__(self, number: int) -> Attention:
        """The attention of one text."""
        return self.texts[number]

    def page(self, title: str | None = None) -> AttentionPage:
        """What `triptych attend --html` shows of these texts, with this heading."""
        return join_pages([text.page(title) for text in self.texts])

    def _repr_html_(self) -> str:
        """The page, for a notebook."""
        return notebook_html(self.page())

    @property
    def tokens(self) -> tuple[tuple[str, ...], ...]:
        """The tokens of every text, without padding."""
        return tuple(text.tokens for text in self.texts)

    @property
    def weights(self) -> BatchWeights:
        """The weights of every layer; of encoder-decoders the cross-attention."""
        return BatchWeights([text.weights for text in self.texts])

    def of(self, kind: str) -> BatchWeights:
        """The layers of one kind of attention."""
        return BatchWeights([text.of(kind) for text in self.texts])


@overload
def attend(  # type: ignore[overload-overlap]
    reader: Reader,
    text: str,
    target: str | None = None,
    max_new_tokens: int = 0,
    max_tokens: int | None = None,
) -> Attention: ...


@overload
def attend(
    reader: Reader,
    text: Sequence[str],
    target: Sequence[str] | None = None,
    max_new_tokens: int = 0,
    max_tokens: int | None = None,
) -> AttentionBatch: ...


def attend(
    reader: Reader,
    text: str | Sequence[str],
    target: str | Sequence[str] | None = None,
    max_new_tokens: int = 0,
    max_tokens: int | None = None,
) -> Attention | AttentionBatch:
    """Where every head of a model looks on a text.

    The model runs as it is, with its own kernels. The weights are computed afterwards from the inputs of its
    layers, by the plain formula in float32 at least, when they are asked for:
    `softmax(q kᵀ · scale + bias + mask)`, `[heads, queries, keys]`.

    Row i of a language model is what token i looked at when it was read. Row i of an encoder-decoder's
    decoder is what was looked at to produce target token i.
    """
    if isinstance(text, str):
        if target is not None and not isinstance(target, str):
            raise TypeError("the target of one text is one text")
        targets = None if target is None else [target]
        (found,) = read_attention(
            reader, reader.encode([text], targets, max_new_tokens, max_tokens), max_tokens
        )
        return found
    if isinstance(target, str):
        raise TypeError("the targets of several texts are a sequence")
    return AttentionBatch(
        read_attention(reader, reader.encode(text, target, max_new_tokens, max_tokens), max_tokens)
    )


def read_attention(
    reader: Reader, texts: Sequence[TextIds], max_tokens: int | None = None
) -> list[Attention]:
    """The attention on texts that are token ids already, those of like length in one batch."""
    found: dict[int, Attention] = {}
    for places, recording in reader.record(texts, max_tokens):
        for row, place in enumerate(places):
            found[place] = _of_row(reader, texts[place], recording.calls, row)
    return [found[place] for place in range(len(texts))]


def _of_row(reader: Reader, text: TextIds, calls: Sequence[LayerCall], row: int) -> Attention:
    stacks = []
    for kind, (queries, keys) in reader.tokens(text).items():
        own = [call.of_row(row, len(queries), len(keys)) for call in calls if call.kind == kind]
        layers = tuple(LayerAttention(number, call) for number, call in enumerate(own))
        stacks.append(Stack(kind, queries, keys, layers))
    return Attention(
        reader.name,
        text.ids,
        tuple(reader.tokenizer.pieces(text.ids)),
        text.num_generated,
        tuple(stacks),
        text.source,
        None if text.source is None else tuple(reader.source_tokenizer.pieces(text.source)),
        reader,
    )
