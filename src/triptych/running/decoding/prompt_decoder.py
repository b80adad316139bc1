"""Continuation of prompts with a language model."""

from collections.abc import Sequence
from typing import final

from triptych.core.models import LanguageModel
from triptych.errors import UsageError
from triptych.literals import Precision
from triptych.running.decoding.decoder import (
    Ends,
    Hypotheses,
    never_ends,
)
from triptych.running.decoding.engine import Engine
from triptych.running.decoding.engine_decoder import EngineDecoder
from triptych.running.decoding.generation import begin, generate_tokens
from triptych.running.decoding.hypotheses import Hypothesis
from triptych.running.decoding.token_loop import Asked
from triptych.running.decoding_options import GenerationOptions


@final
class PromptDecoder(EngineDecoder[GenerationOptions]):
    """Sampling, greedy or beam search: maps prompts to continuations; see `generate_tokens`."""

    def __init__(
        self,
        model: LanguageModel,
        num_choices: int,
        precision: Precision = "fp32",
        *,
        batch_rows: int = 32,
    ) -> None:
        """Continue with a model; only its first `num_choices` tokens may be chosen."""
        super().__init__([model], precision, GenerationOptions())
        self._model = model
        self._num_choices = num_choices
        self._batch_rows = batch_rows
        _ = (
            self.engine
        )  # a model that cannot be run is refused here, not at its first prompt

    def decode(
        self,
        texts: Sequence[Sequence[int]],
        options: GenerationOptions | None = None,
        ends: Ends = never_ends,
    ) -> Hypotheses:
        options = options or self.options
        return generate_tokens(
            self.engine, texts, options, ends=ends, batch_rows=self._batch_rows
        )

    def begin(
        self, ids: Sequence[int], options: GenerationOptions, ends: Ends = never_ends
    ) -> Asked[list[Hypothesis]]:
        (asked,) = begin(self._last_engine, [ids], options, ends)
        return asked

    def _make_engine(self) -> Engine:
        try:
            return Engine(self._model, self.precision, self._num_choices)
        except ValueError as error:
            raise UsageError(f"this model cannot be run: {error}") from None
