"""What the page of attention shows, as plain records; whoever has attention weights fills them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

from triptych.attending.maps import HeadMap

Kind = Literal["encoder", "decoder", "cross"]


@final
@dataclass(frozen=True, eq=False)
class ViewedHead:
    """One head.

    Attributes:
        map: its weights.
        label: a few words beside its number, such as "previous token".
        facts: name and value of what is known of it: figures of behaviour, of its weights.
        number: of the head in its layer; its place among those given if None.
    """

    map: HeadMap
    label: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    number: int | None = None


@final
@dataclass(frozen=True, eq=False)
class ViewedLayer:
    """The heads of one layer, in order.

    Attributes:
        heads: at least one.
        number: of the layer; its place among those given if None.
    """

    heads: tuple[ViewedHead, ...]
    number: int | None = None


@final
@dataclass(frozen=True, eq=False)
class ViewedKind:
    """All layers of one kind of attention over one text.

    Attributes:
        kind: "encoder" (source tokens look at source tokens), "decoder" or "cross" (target at source).
        query_tokens: the tokens that look, as they are to be read.
        key_tokens: the tokens that are looked at.
        layers: at least one.
        first_generated_query: index of the first query token that the model wrote; None if it wrote none.
        first_generated_key: the same of the key tokens.
    """

    kind: Kind
    query_tokens: tuple[str, ...]
    key_tokens: tuple[str, ...]
    layers: tuple[ViewedLayer, ...]
    first_generated_query: int | None = None
    first_generated_key: int | None = None

    def __post_init__(self) -> None:
        if not self.layers or not all(layer.heads for layer in self.layers):
            raise ValueError(f"{self.kind}: give at least one layer, with at least one head each")
        expected = (len(self.query_tokens), len(self.key_tokens))
        for number, layer in enumerate(self.layers):
            for head in layer.heads:
                if (head.map.num_queries, head.map.num_keys) != expected:
                    raise ValueError(
                        f"{self.kind}, layer {number}: a map of {head.map.num_queries} × {head.map.num_keys} "
                        f"for {expected[0]} query and {expected[1]} key tokens"
                    )


@final
@dataclass(frozen=True, eq=False)
class ViewedText:
    """One text, or one pair of source and target.

    Attributes:
        title: what to call it: the text itself, its line number.
        kinds: the kinds of attention of the model, at least one.
        notes: sentences to say about it.
    """

    title: str
    kinds: tuple[ViewedKind, ...]
    notes: tuple[str, ...] = ()


@final
@dataclass(frozen=True, eq=False)
class AttentionPage:
    """Everything that the page shows.

    Attributes:
        title: the heading.
        texts: at least one; the reader chooses.
        facts: name and value: the model, the command.
        notes: sentences below the heading.
    """

    title: str
    texts: tuple[ViewedText, ...]
    facts: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


def join_pages(pages: Sequence[AttentionPage]) -> AttentionPage:
    """One page with the texts of several, at least one; all else is the first one's."""
    return replace(pages[0], texts=tuple(text for page in pages for text in page.texts))


def layers_of(maps: Sequence[Sequence[HeadMap]]) -> tuple[ViewedLayer, ...]:
    """Layers of unlabelled heads from the maps of every layer's heads."""
    return tuple(ViewedLayer(tuple(map(ViewedHead, heads))) for heads in maps)
