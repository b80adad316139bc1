"""Language models for lm-evaluation-harness (`pip install 'triptych[lm-eval]'`).

The class derives from a class of the harness, so this module can be imported only if the harness is
installed.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, final

from triptych.errors import UsageError
from triptych.extras import require_extra
from triptych.literals import Precision
from triptych.running.decoding import (
    GenerationOptions,
    SamplingOptions,
    score_continuations,
)
from triptych.running.opening import open_language_model

require_extra("lm-eval", "lm_eval", what="a model for lm-evaluation-harness")
from lm_eval.api.model import LM  # noqa: E402

_LONGEST = 2048  # default maximum length in tokens, for models without a limit
_NEW_TOKENS = 256  # the harness's default number of new tokens


@final
class HarnessModel(LM):  # type: ignore[misc]
    """A decoder-only model for `lm_eval.simple_evaluate(model, tasks)`.

    As in the harness's models, a context and its continuation are tokenized together, and white space at the
    end of the context belongs to the continuation.
    """

    def __init__(
        self,
        path: str,
        device: str = "auto",
        precision: Precision = "fp32",
        batch_size: int | str = 16,
        max_length: int | None = None,
    ) -> None:
        """Open a model.

        Args:
            path: run folder, folder in Hugging Face's format, or name on the Hub.
            device: device of the model; "auto" selects a GPU if available.
            precision: precision of the weights for text generation; scores use the unchanged model.
            batch_size: number of texts in a batch; "auto" is 16.
            max_length: maximum length of a text in tokens; `LanguageModel.context` if None, or 2,048 if the
                model is unlimited.

        Raises:
            UsageError: the model is an encoder, or the device does not exist.
            DataError: files are missing or damaged, or the family cannot be run.
        """
        super().__init__()
        opened = open_language_model(path, device)
        model = opened.language_model
        tokenizer = opened.tokenizer
        self._batch = 16 if batch_size == "auto" else int(batch_size)
        self._generator = opened.generator(precision=precision, batch_rows=self._batch)
        self._longest = int(max_length or model.context or _LONGEST)
        begin = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        if begin is None:
            raise UsageError(
                f"{path}: its tokenizer has no token that begins or ends a text"
            )
        self._begin = begin

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return the log-probability of every continuation, and whether greedy decoding would give it."""
        return self._scored([self._pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-probability of every text, with full windows: the last overlaps its predecessor."""
        windows = [
            list(self._windows(self._encode(request.args[0]))) for request in requests
        ]
        found = iter(self._scored([*chain.from_iterable(windows)]))
        return [sum(next(found)[0] for _ in of_text) for of_text in windows]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Generate a continuation of every context, up to a stop string."""
        # Requests with equal options share batches.
        together: dict[GenerationOptions, list[int]] = {}
        for number, request in enumerate(requests):
            together.setdefault(_generation_options(request.args[1]), []).append(number)
        texts = [""] * len(requests)
        for options, numbers in together.items():
            room = max(1, self._longest - options.max_new_tokens)
            prompts = [
                self._encode(requests[i].args[0])[-room:] or [self._begin]
                for i in numbers
            ]
            found = self._generator.continue_tokens(prompts, options)
            for number, (one,) in zip(numbers, found, strict=True):
                texts[number] = one.text
        return texts

    def _encode(self, text: str) -> list[int]:
        (ids,) = self._generator.tokenizer.encode(
            [text], add_special=True, parse_special=True
        )
        return ids

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        whole = self._encode(context + continuation)
        before = self._encode(context) if context else []
        if not before:
            return (
                ([self._begin], whole)
                if whole[:1] != [self._begin]
                else (whole[:1], whole[1:])
            )
        return whole[: len(before)], whole[len(before) :]

    def _windows(self, ids: list[int]) -> Iterator[tuple[list[int], list[int]]]:
        whole = [self._begin, *(ids[1:] if ids[:1] == [self._begin] else ids)]
        for start in range(1, len(whole), self._longest):
            end = min(start + self._longest, len(whole))
            yield whole[max(0, end - self._longest - 1) : start], whole[start:end]

    def _scored(
        self, pairs: Sequence[tuple[list[int], list[int]]]
    ) -> list[tuple[float, bool]]:
        return score_continuations(
            self._generator.model, pairs, self._longest, self._batch
        )


def _generation_options(given: dict[str, Any]) -> GenerationOptions:
    """Convert the harness's options, named as in `transformers`."""
    # Filters apply only if tokens are drawn.
    until = given.get("until") or ()
    temperature = (
        float(given.get("temperature") or 0.0) if given.get("do_sample", True) else 0.0
    )
    drawn = given if temperature > 0 else {}
    try:
        return GenerationOptions(
            int(
                given.get("max_gen_toks") or given.get("max_new_tokens") or _NEW_TOKENS
            ),
            SamplingOptions(
                temperature=temperature,
                top_k=drawn.get("top_k") or None,
                top_p=drawn.get("top_p") or None,
                min_p=drawn.get("min_p") or None,
            ),
            stop_texts=tuple([until] if isinstance(until, str) else until),
        )
    except ValueError as error:
        raise UsageError(f"a task's generation_kwargs: {error}") from None
