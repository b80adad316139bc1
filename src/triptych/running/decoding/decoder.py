"""Decoders: token ids in, hypotheses out.

A front end (`Translator`, `TextGenerator`) encodes texts for a `Decoder`, and makes texts of its hypotheses.
`EngineDecoder` (`engine_decoder.py`) decodes with an engine of triptych; decoders of other libraries are in
`converting/`. This module and `translator.py` import no torch: CTranslate2 translates without it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from triptych.running.decoding.hypotheses import Finish, Hypothesis
from triptych.running.decoding_options import GenerationOptions, SearchOptions

if TYPE_CHECKING:
    from triptych.running.decoding.token_loop import Asked, Loop

OptionsT = TypeVar("OptionsT", SearchOptions, GenerationOptions)
Hypotheses = list[list[Hypothesis]]
# Function of the number of a text and its new token: True to end the text there.
Ends = Callable[[int, int], bool]


def never_ends(row: int, token: int) -> bool:
    """End no text; see `Ends`."""
    del row, token
    return False


@dataclass
class Group:
    """A group of texts to decode together.

    Attributes:
        given: the front end's record of the texts.
        texts: token ids of each text.
        found: hypotheses of each text, empty until it is decoded.
        missing: number of texts not decoded yet.
    """

    given: Any
    texts: list[list[int]]
    found: Hypotheses = field(init=False)
    missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.found = [[] for _ in self.texts]
        self.missing = len(self.texts)


class Decoder(ABC, Generic[OptionsT]):
    """Base class of decoders.

    Attributes:
        library: decoding library.
        options: default options.
        max_source_tokens: maximum length of a sentence; None for no limit.
        workers: number of processes, or of the library's threads, that decode batches at the same time.
    """

    library: Literal["triptych", "ctranslate2"]
    options: OptionsT
    max_source_tokens: int | None = None
    workers: int = 1

    @abstractmethod
    def decode(
        self,
        texts: Sequence[Sequence[int]],
        options: OptionsT | None = None,
        ends: Ends = never_ends,
    ) -> Hypotheses:
        """Decode texts, given as token ids; return the hypotheses of each text by falling score.

        Unless a beam is searched, `ends` is called after each token.
        """

    def decode_groups(
        self, given: Iterable[Any], begin: Callable[[Any], Group]
    ) -> Iterator[Group]:
        """Begin and decode groups; yield them in order, without waiting for what is given later."""
        for one in given:
            group = begin(one)
            group.found = self.decode(group.texts)
            group.missing = 0
            yield group

    def stream(
        self, ids: Sequence[int], options: OptionsT, ends: Ends
    ) -> Generator[object, None, Finish | None]:
        """Decode one text, and yield after each step; return why it ended.

        `ends` is called after each token.
        """
        ((found, *_),) = self.decode([ids], options, ends)
        yield found
        return found.finish

    def loop(self, most_rows: int, most_tokens: int) -> "Loop | None":
        """Return a loop for requests of `begin`; None for a library without loops."""
        del most_rows, most_tokens
        return None

    def begin(
        self, ids: Sequence[int], options: OptionsT, ends: Ends = never_ends
    ) -> "Asked[list[Hypothesis]]":
        """Return a request to decode a text, for a loop of this decoder."""
        raise NotImplementedError(
            f"{self.library} has no loop that could run a request"
        )

    def without_scores(self) -> "Decoder[OptionsT]":
        """Return a faster decoder of the same hypotheses; their scores may be NaN."""
        return self

    def reading_ahead(self) -> "Decoder[OptionsT]":
        """Return a decoder whose `decode_groups` may begin a group before it yields the group in front."""
        return self

    def start_workers(self) -> None:
        """Start other processes now, instead of on demand, and wait until they are ready."""

    def close(self) -> None:
        """Stop other processes; they start again on demand."""
