"""`Attention`: where every head of a model looks on a text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.core.places import PlaceNames, head_of
from triptych.errors import UsageError
from triptych.files import write_text
from triptych.literals import SpecialTokens
from triptych.printable import shortened
from triptych.progress import Progress, untold
from triptych.running.measuring.stack_attention import LayerAttention, Part, StackAttention, read_stacks
from triptych.running.opening import AttentionKind, Reader, TextIds
from triptych.running.text import as_texts
from triptych.seeing.attending.alignment import AlignedWords, word_weights, words_of
from triptych.seeing.attending.attention_files import Saved, json_pieces, write_attention_csv, write_npz
from triptych.seeing.attending.attention_page import (
    AttentionPage,
    HeadNote,
    ViewedHead,
    ViewedKind,
    ViewedLayer,
    ViewedText,
    join_pages,
    notebook_html,
    write_attention_page,
)
from triptych.seeing.attending.looks import Looks, strongest_looks
from triptych.seeing.attending.over import OverText, attend_over
from triptych.seeing.attending.picture import head_svg
from triptych.seeing.attending.steps import HeadSteps
from triptych.seeing.attending.written_tokens import NEAREST, TokenWriter
from triptych.seeing.reports import short_name

# If there are more weights, a page has only the largest of every query.
MOST_WEIGHTS_OF_A_PAGE = 4_500_000
_KEPT = 16
_TITLE = 80


@final
class Attention:
    """Attention of a model on one text: `attention[3, 2]` is `[queries, keys]` of head 2 of layer 3.

    Attributes:
        model: its name: the path, or the id on the Hub.
        ids: the tokens read by the encoder or the decoder; of an encoder-decoder, what its decoder
            produces, the end of sentence last.
        tokens: the same, readable.
        num_generated: how many of them, the last ones, the model produced itself.
        stacks: of an encoder-decoder "encoder", "decoder" and "cross".
        source_ids: the tokens that the encoder of an encoder-decoder read; None for other models.
        source_tokens: the same, readable.
    """

    def __init__(self, reader: Reader, text: TextIds, stacks: tuple[StackAttention, ...]) -> None:
        """Use `attend`."""
        self.model = reader.name
        self.stacks = stacks
        self._reader = reader
        self._text = text
        self.ids = text.ids
        self.source_ids = text.source
        self.num_generated = text.num_generated
        self._layers = [(stack, layer) for stack in stacks for layer in stack.layers]
        self._places = PlaceNames([(stack.kind, layer.number) for stack, layer in self._layers], reader.name)
        self.tokens = tuple(reader.tokenizer.pieces(text.ids))
        self.source_tokens = (
            None if text.source is None else tuple(reader.source_tokenizer.pieces(text.source))
        )

    def __getitem__(self, place: int | str | tuple[int | str, int]) -> Tensor:
        """The weights of a layer, `[heads, queries, keys]`, or of a head, `[queries, keys]`.

        `attention[3]` and `attention[3, 2]` or `attention["3.2"]`; of an encoder-decoder
        `attention["cross.3", 2]` or `attention["cross.3.2"]`.

        Raises:
            UsageError: there is no such layer or head, or the number could be of several stacks.
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
        stack, found, head = self._head(layer, head)
        name = self._name(stack, found)
        tokens = (stack.queries, stack.keys)
        return HeadSteps(self._reader, self._text, found.call, found.number, head, query, tokens, name)

    def top(self, k: int = 3, *, per_head: bool = False) -> Looks:
        """Return the k strongest looks of all heads, the strongest first.

        Looks at the token itself and at the first token are left out if there are others.

        Args:
            k: how many.
            per_head: k of every head, head by head.

        Raises:
            UsageError: k is below 1.
        """
        if k < 1:
            raise UsageError(f"the {k} strongest looks: at least 1 is needed")
        found = [
            look
            for part in self.parts()
            for head in strongest_looks(part, k, self._name(part.stack, part.layer))
            for look in head.looks
        ]
        return Looks(found if per_head else sorted(found, key=lambda look: -look.weight)[:k])

    def over(
        self, text: str | Path | Sequence[str], targets: Sequence[str] | Path | None = None, **options: Any
    ) -> OverText:
        """What every head of this model does over a whole text; see `Model.attend_over`."""
        return attend_over(self._reader, text, targets, **options)

    def align(self, layer: int | str, head: int) -> list[tuple[str, str]]:
        """Each word of the translation with the source word that a head of cross-attention looks at most.

        Args:
            layer: of cross-attention, as in `"cross.3"`.
            head: its number.

        Raises:
            UsageError: no such layer or head, or no cross-attention.
        """
        stack, found, head = self._head(layer, head)
        if stack.kind != "cross":
            raise UsageError(f"{self.model}: layer {layer} is not cross-attention, which aligns words")
        words = self._words(found.weights(heads=[head])[0])
        return [(word.text, words.source[i].text) for word, i in zip(words.target, words.links, strict=False)]

    def words(self) -> AlignedWords:
        """The words of source and translation, aligned by the mean of all heads of the last two layers.

        Each source word's weights are divided by their sum: otherwise a few words get the most of all. Source
        of the layers: Garg et al. 2019, arXiv 1909.02074, who take the last but one.
        """
        layers = self.of("cross").layers[-2:]
        words = self._words(torch.stack([of.weights().mean(dim=0) for of in layers]).mean(dim=0))
        totals = words.weights.sum(dim=0).clamp_min(torch.finfo(words.weights.dtype).tiny)
        return words._replace(weights=words.weights / totals)

    def _words(self, weights: Float[Tensor, "queries keys"]) -> AlignedWords:
        stack = self.of("cross")
        source, target = (
            words_of(pieces, [token in tokenizer.special_ids for token in ids])
            for pieces, ids, tokenizer in (
                (stack.keys, self.source_ids or (), self._reader.source_tokenizer),
                (stack.queries, self.ids, self._reader.tokenizer),
            )
        )
        return AlignedWords(source, target, word_weights(weights, source, target))

    def writes(self, layer: int | str, head: int, k: int = NEAREST) -> list[tuple[str, tuple[str, ...]]]:
        """Each token that a head may look at, with the k tokens nearest to what the head writes for it.

        The head writes `y W_V W_O` for the input y of the token, without biases. It is read through a norm
        that follows the layer, the last norm and the output table; in an encoder without an output table,
        through its embedding table.

        Args:
            layer: its number; of an encoder-decoder as in `"cross.3"`.
            head: its number.
            k: number of tokens, the nearest first.

        Raises:
            UsageError: no such layer or head, k below 1, or no table that reads what they write (the encoder
                of an encoder-decoder, embeddings of another width).
        """
        stack, found, head = self._head(layer, head)
        nearest = TokenWriter(self._reader, k).of(Part(stack, found, (head,)), head)
        if nearest is None:
            raise UsageError(f"{self.model}: no output table reads what {stack.kind} layers write")
        return list(zip(stack.keys, nearest, strict=False))

    def _name(self, stack: StackAttention, layer: LayerAttention) -> str:
        """A layer as it is spelled: `3`, or of an encoder-decoder `cross.3`."""
        return str(layer.number) if len(self.stacks) == 1 else f"{stack.kind}.{layer.number}"

    def _place(
        self, place: int | str | tuple[int | str, int]
    ) -> tuple[StackAttention, LayerAttention, int | None]:
        """A layer with its stack, and a head of it; None for all."""
        number, head = self._places.find(place)
        return (*self._layers[number], None) if head is None else self._head(self._places.names[number], head)

    def _head(self, layer: int | str, head: int) -> tuple[StackAttention, LayerAttention, int]:
        """A layer with its stack, and the number of a head of it."""
        stack, found = self._layers[self._places.layer(layer)]
        return stack, found, head_of(head, found.num_heads, f"layer {self._name(stack, found)}")

    @property
    def kinds(self) -> tuple[AttentionKind, ...]:
        """The kinds of attention that the model has."""
        return tuple(stack.kind for stack in self.stacks)

    @property
    def weights(self) -> StackAttention:
        """The weights of every layer; of an encoder-decoder the cross-attention."""
        return self.stacks[-1]

    @property
    def is_generated(self) -> tuple[bool, ...]:
        """Whether the model produced each token."""
        given = len(self.tokens) - self.num_generated
        return tuple(place >= given for place in range(len(self.tokens)))

    def of(self, kind: str) -> StackAttention:
        """The layers of one kind of attention.

        Raises:
            UsageError: the model has no such attention.
        """
        for stack in self.stacks:
            if stack.kind == kind:
                return stack
        raise UsageError(f"{self.model} has no {kind} attention: its kinds are {', '.join(self.kinds)}")

    def parts(self, heads: str | Sequence[str] = "*") -> list[Part]:
        """Chosen heads, layer by layer.

        Args:
            heads: `"3.2"`, `"3"` for a layer, `"*.2"`, `"cross.*"`; several, separated by commas.

        Raises:
            UsageError: there is no such head; the message says which there are.
        """
        found = self._places.heads(heads, [layer.num_heads for _, layer in self._layers])
        return [Part(*self._layers[number], own) for number, own in found.items()]

    def page(self, path: str | Path, title: str | None = None, *, over: OverText | None = None) -> None:
        """Write a page with every head, which works offline, as `triptych attend --html` does.

        Args:
            path: the file.
            title: the heading; the name of the model if None.
            over: what the heads do over a text, which the page says of each.
        """
        AttentionBatch([self]).page(path, title, over=over)

    def save(self, path: str | Path, *, heads: str | Sequence[str] = "*", top: int | None = None) -> None:
        """Write weights: `.json`, `.csv`, `.npz`, or as a picture of one head `.svg`.

        Args:
            path: the file, whose ending says the format.
            heads: as in `parts`.
            top: the weights of each query that are written, the largest; all if None.

        Raises:
            UsageError: another ending, heads that are not there, top below 1, more weights than a file may
                have, or a picture of more than one head.
        """
        path = Path(path)
        saved = self.saved(heads, top)
        match path.suffix:
            case ".json":
                write_text(path, "".join(json_pieces(saved)))
            case ".csv":
                write_attention_csv([saved], path)
            case ".npz":
                write_npz([saved], path)
            case ".svg":
                write_text(path, self.picture(saved.parts))
            case other:
                raise UsageError(f'{path}: "{other}" is not a format of weights: .json, .csv, .npz or .svg')

    def saved(
        self, heads: str | Sequence[str] = "*", top: int | None = None, writes: int | None = None
    ) -> Saved:
        """What a file has of the text; `writes` is how many tokens it has of what each head writes."""
        if top is not None and top < 1:
            raise UsageError(f"the {top} largest weights: at least 1 is needed")
        record: dict[str, Any] = {
            "model": self.model,
            "tokens": self.tokens,
            "ids": self.ids,
            "num_generated": self.num_generated,
        }
        if self.source_ids is not None:
            record |= {"source_tokens": self.source_tokens, "source_ids": self.source_ids}
        writer = None if writes is None else TokenWriter(self._reader, writes)
        return Saved(record, self.parts(heads), top, writer)

    def picture(self, parts: Sequence[Part]) -> str:
        """One head as SVG."""
        if len(parts) != 1 or len(parts[0].heads) != 1:
            number = sum(len(part.heads) for part in parts)
            raise UsageError(
                f"a picture shows one head, and {number} are chosen: give one (--heads 3.2), and one text"
            )
        ((stack, layer, (head,)),) = parts
        (kind,) = self.viewed(parts=parts).texts[0].kinds
        return head_svg(kind, f"{self.model}, {stack.kind} layer {layer.number}, head {head}")

    def viewed(
        self,
        title: str | None = None,
        *,
        parts: Sequence[Part] | None = None,
        keep: int | None = None,
        notes: Mapping[tuple[str, int, int], HeadNote] = MappingProxyType({}),
        progress: Progress = untold,
    ) -> AttentionPage:
        """What the page shows of this text.

        It has the `keep` largest weights of every query and the sum of the others. If `keep` is None, it has
        all, or the 16 largest where all are too many for a page.
        """
        chosen = self.parts() if parts is None else parts
        if keep is None and sum(part.num_weights for part in chosen) > MOST_WEIGHTS_OF_A_PAGE:
            keep = _KEPT
        layers: dict[AttentionKind, list[ViewedLayer]] = {}
        for done, (stack, layer, heads) in enumerate(chosen):
            progress(f"{stack.kind} layer {layer.number}", done, len(chosen))
            viewed = [
                ViewedHead(head, drawn, notes.get((stack.kind, layer.number, head), HeadNote()))
                for head, drawn in zip(heads, layer.maps(keep, heads), strict=True)
            ]
            layers.setdefault(stack.kind, []).append(ViewedLayer(layer.number, tuple(viewed)))
        kinds = tuple(self._viewed(self.of(kind), own) for kind, own in layers.items())
        line = " ".join("".join(map(readable, self.source_tokens or self.tokens)).split())
        text = ViewedText(shortened(line, _TITLE), kinds)
        heading = title or f"Attention of {short_name(self.model)}"
        return AttentionPage(heading, (text,), (("model", self.model),))

    def _viewed(self, stack: StackAttention, layers: Sequence[ViewedLayer]) -> ViewedKind:
        produced = self.source_ids is not None and stack.kind != "encoder"
        given = len(self.tokens) - self.num_generated
        marked = self.num_generated > 0 and (produced or self.source_ids is None)
        # The decoder of an encoder-decoder reads what it produced one place later.
        first_key = given + 1 if produced else given
        return ViewedKind(
            stack.kind,
            tuple(map(readable, stack.queries)),
            tuple(map(readable, stack.keys)),
            tuple(layers),
            given if marked else None,
            first_key if marked and stack.kind != "cross" and first_key < len(stack.keys) else None,
        )

    def __repr__(self) -> str:
        said = "" if self.source_tokens is None else f"{len(self.source_tokens)} source tokens, "
        made = f", {self.num_generated} of them generated" if self.num_generated else ""
        lines = [f"Attention of {self.model}: {said}{len(self.tokens)} tokens{made}"]
        for stack in self.stacks:
            heads = sorted({layer.num_heads for layer in stack.layers})
            lines.append(
                f"  {stack.kind}: {len(stack)} layers × {' or '.join(map(str, heads))} heads, weights "
                f"[{len(stack.queries)}, {len(stack.keys)}]"
            )
        place = self._name(*self._layers[-1])
        return "\n".join(
            (
                *lines,
                f'  attention["{place}.0"], steps({place!r}, 0, query=-1), top(k), page(path), save(path)',
            )
        )

    def _repr_html_(self) -> str:
        """The page, for a notebook."""
        return notebook_html(self.viewed())


def readable(token: str) -> str:
    """A token with a space in place of SentencePiece's mark."""
    return token.replace("▁", " ")


@final
class BatchWeights:
    """The weights of a batch by layer: `weights[3]` is `[batch, heads, queries, keys]`, 0 at padding."""

    def __init__(self, stacks: Sequence[StackAttention]) -> None:
        """Join the same kind of attention on several texts."""
        self._stacks = tuple(stacks)

    def __len__(self) -> int:
        return len(self._stacks[0])

    def __iter__(self) -> Iterator[Float[Tensor, "batch heads queries keys"]]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Float[Tensor, "batch heads queries keys"]:
        found = [stack[number] for stack in self._stacks]
        rows, columns = (max(weights.shape[side] for weights in found) for side in (1, 2))
        whole = found[0].new_zeros(len(found), found[0].shape[0], rows, columns)
        for place, weights in enumerate(found):
            whole[place, :, : weights.shape[1], : weights.shape[2]] = weights
        return whole


@final
class AttentionBatch:
    """Attention of a model on several texts: `batch[2]` is the third text's."""

    def __init__(self, texts: Sequence[Attention]) -> None:
        """Join the attention of one model on at least one text."""
        self.texts = tuple(texts)

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[Attention]:
        return iter(self.texts)

    def __getitem__(self, number: int) -> Attention:
        return self.texts[number]

    def page(
        self,
        path: str | Path,
        title: str | None = None,
        *,
        over: OverText | None = None,
        saved: Sequence[Saved] = (),
        progress: Progress = untold,
    ) -> None:
        """Write a page with every text, or with what is to be saved of each; see `Attention.page`."""
        page = self.viewed(title, over=over, saved=saved, progress=progress)
        write_attention_page(page, Path(path), progress)

    def viewed(
        self,
        title: str | None = None,
        *,
        over: OverText | None = None,
        saved: Sequence[Saved] = (),
        progress: Progress = untold,
    ) -> AttentionPage:
        """What the page shows of these texts."""
        notes = {} if over is None else over.notes()
        chosen = saved or [text.saved() for text in self.texts]
        page = join_pages(
            [
                text.viewed(title, parts=own.parts, keep=own.top, notes=notes, progress=progress)
                for text, own in zip(self.texts, chosen, strict=True)
            ]
        )
        return page if over is None else replace(page, notes=(over.notes_origin(),))

    def __repr__(self) -> str:
        lengths = [len(text.tokens) for text in self.texts]
        return (
            f"Attention of {self.texts[0].model} on {len(self)} texts of {min(lengths)} to {max(lengths)} "
            "tokens; batch[0], page(path)"
        )

    def _repr_html_(self) -> str:
        """The page, for a notebook."""
        return notebook_html(self.viewed())

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


def attend(
    reader: Reader,
    text: Any,
    target: Any = None,
    max_new_tokens: int = 0,
    max_tokens: int | None = None,
    special_tokens: SpecialTokens = "tokens",
) -> Attention | AttentionBatch:
    """Where every head of a model looks on a text.

    The model runs as it is, with its own kernels. The weights are computed afterwards from the inputs of its
    layers, by the plain formula in float32 at least, when they are read:
    `softmax(q kᵀ · scale + bias + mask)`, `[heads, queries, keys]`.

    Row i of a language model is what token i looked at when it was read. Row i of an encoder-decoder's
    decoder is what was looked at to produce target token i.
    """
    given = as_texts(text)
    targets = None
    if target is not None:
        of_texts = as_texts(target, "target")
        if of_texts.is_one is not given.is_one:
            raise UsageError("one text has one target, several texts a sequence of targets")
        targets = of_texts.texts
    ids = reader.encode(given.texts, targets, max_new_tokens, max_tokens, special_tokens)
    found = attend_tokens(reader, ids, max_tokens)
    return found[0] if given.is_one else AttentionBatch(found)


def attend_tokens(reader: Reader, texts: Sequence[TextIds], max_tokens: int | None = None) -> list[Attention]:
    """The attention on texts that are token ids already, texts of equal length in one batch."""
    stacks = read_stacks(reader, texts, max_tokens)
    return [Attention(reader, text, own) for text, own in zip(texts, stacks, strict=True)]
