"""Decoding with an engine of triptych."""

from abc import abstractmethod
from collections.abc import Generator, Sequence
from itertools import chain
from typing import Any

from torch import nn

from triptych.literals import Precision
from triptych.running.decoding.decoder import Decoder, Ends, OptionsT
from triptych.running.decoding.hypotheses import Finish
from triptych.running.decoding.token_loop import Loop


class EngineDecoder(Decoder[OptionsT]):
    """Decoding with an engine, made on first use, and made anew when the models' weights have changed."""

    library = "triptych"

    def __init__(
        self, models: Sequence[nn.Module], precision: Precision, options: OptionsT
    ) -> None:
        self.precision: Precision = precision
        self.options = options
        self._models = tuple(models)
        self._engine: Any = None
        self._made_of: object = None

    @abstractmethod
    def _make_engine(self) -> Any:
        """Prepare the models for decoding."""

    @property
    def engine(self) -> Any:
        """The engine of the current weights."""
        self._forget_what_is_stale()
        if self._engine is None:
            self._engine = self._make_engine()
            self._made_of = (
                self._version()
            )  # making an engine may move weights to other memory
        return self._engine

    def loop(self, most_rows: int, most_tokens: int) -> Loop:
        return Loop(self.engine, most_rows=most_rows, most_tokens=most_tokens)

    def stream(
        self, ids: Sequence[int], options: OptionsT, ends: Ends
    ) -> Generator[object, None, Finish | None]:
        engine = self.engine
        asked = self.begin(ids, options, ends)
        yield from Loop(engine).steps(asked.texts)
        return asked.result()[0].finish

    @property
    def _last_engine(self) -> Any:
        """The engine of the last loop: comparing the weights costs as much as a small step."""
        return self.engine if self._engine is None else self._engine

    def _forget_what_is_stale(self) -> None:
        """Discard what was made of other weights."""
        if self._made_of != (version := self._version()):
            self.close()
            self._engine = None
            self._made_of = version

    def _version(self) -> object:
        """Return a fingerprint of the weights: addresses and version counters of all parameters."""
        parameters = chain.from_iterable(model.parameters() for model in self._models)
        return tuple(
            (parameter.data_ptr(), parameter._version) for parameter in parameters
        )
