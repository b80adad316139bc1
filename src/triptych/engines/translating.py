"""CTranslate2 in the place of our own search.

A model is converted once (`converting.ctranslate2`), and CTranslate2 searches. Its rule for the end of a
search is "full" of `SearchOptions`. Scores are ours: it returns plain log-probabilities of a full beam, which
are put in the order of our length penalty.

Source: github.com/OpenNMT/CTranslate2, version 4.8.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

from triptych.converting.ctranslate2 import write_translator
from triptych.converting.plain import max_positions
from triptych.decoding import Hypothesis, Precision, SearchOptions, length_penalty
from triptych.decoding.batches import batch_searcher, batches_of_like_length
from triptych.decoding.hypotheses import best_first, limit_of
from triptych.decoding.workers import Hypotheses, Searcher, Sentences
from triptych.engines.converted import converted, hash_of
from triptych.engines.ctranslate2 import compute_type, find_place, require_ctranslate2
from triptych.errors import DataError, UsageError
from triptych.opening import OpenedModel

_BATCH_TOKENS = 2048


@final
class CTranslate2Searcher:
    """Searches for any number of sentences with CTranslate2; a `Searcher`.

    Where a hypothesis reaches the limit on length, all of its sentence is searched for by our own engine in
    fp32, on the CPU: CTranslate2 cuts such outputs off without their end.

    Attributes:
        options: how it searches.
    """

    def __init__(
        self, run: OpenedModel, options: SearchOptions, precision: Precision, workers: int, device: str
    ) -> None:
        """Convert a model, or find it converted, and load it."""
        require_ctranslate2()
        import ctranslate2

        if options.beam_size > 1 and options.stop != "full":
            raise UsageError(
                "CTranslate2 ends a search when the beam is full of finished hypotheses: "
                f'stop must be "full", and it is "{options.stop}"'
            )
        self.options = options
        self._run = run
        self._own: Searcher | None = None
        self._source, self._target = run.tokenizers.source, run.tokenizers.target
        self._names = self._source.vocabulary
        self._ids = {token: i for i, token in enumerate(self._target.vocabulary)}
        place, index = find_place(device)
        kind = compute_type(precision, place)
        decoding = run.decoding.model_copy(update={"max_extra_tokens": options.max_extra_tokens})
        roomy = run.with_decoding(decoding)
        length = max_positions(run.encoder_decoder, options.max_extra_tokens)
        config = run.encoder_decoder.config.model_dump_json()
        texts = (str(length), config, self._source.to_json(), self._target.to_json())
        name = f"ctranslate2-{ctranslate2.__version__}-{hash_of(run.encoder_decoder, texts)}"

        def write(folder: Any) -> None:
            write_translator(roomy, folder, "float32")

        with converted(name, write) as folder:
            try:
                self._translator = ctranslate2.Translator(
                    str(folder),
                    device=place,
                    device_index=index,
                    compute_type=kind,
                    inter_threads=workers if place == "cpu" else 1,
                    intra_threads=1,
                )
            except (RuntimeError, ValueError) as error:
                raise DataError(f"{folder} cannot be read by CTranslate2 ({error}): remove it") from None

    def __call__(self, sentences: Sentences) -> Hypotheses:
        """Hypotheses for sentences, token ids without the end of sentence, in their order."""
        batches = list(batches_of_like_length(sentences, _BATCH_TOKENS))
        found: list[list[Hypothesis]] = [[] for _ in sentences]
        pending = [self._begin([sentences[i] for i in batch]) for batch in batches]
        for batch, results in zip(batches, pending, strict=True):
            for i, result in zip(batch, results, strict=True):
                found[i] = self._hypotheses(result.result(), self._limit(sentences[i]))
        if cut := [i for i, hypotheses in enumerate(found) if not hypotheses]:
            for i, hypotheses in zip(cut, self._ours([sentences[i] for i in cut]), strict=True):
                found[i] = hypotheses
        return found

    def _begin(self, sentences: Sentences) -> list[Any]:
        """Ask for a batch; the results are there when they are waited for."""
        options = self.options
        never = dict.fromkeys((self._target.pad_id, self._target.bos_id))
        return self._translator.translate_batch(  # type: ignore[no-any-return]
            [[self._names[token] for token in ids] for ids in sentences],
            asynchronous=True,
            beam_size=options.beam_size,
            num_hypotheses=options.beam_size,
            length_penalty=0,
            suppress_sequences=[[self._target.vocabulary[token]] for token in never],
            max_input_length=0,
            min_decoding_length=0,
            max_decoding_length=max(map(self._limit, sentences)) + 1,  # the end of sentence counts there
            return_end_token=True,
            return_scores=True,
        )

    def _limit(self, ids: Sequence[int]) -> int:
        model, options = self._run.encoder_decoder, self.options
        return limit_of(len(ids), options.max_extra_tokens, model.max_target_tokens)

    def _hypotheses(self, result: Any, limit: int) -> list[Hypothesis]:
        """Best first; none if one of them reached the limit."""
        found, eos_id = [], self._target.eos_id
        for tokens, log_prob in zip(result.hypotheses, result.scores, strict=True):
            ids = tuple(self._ids[token] for token in tokens)
            if len(ids) > limit + 1 or not ids or ids[-1] != eos_id:
                return []
            penalty = length_penalty(len(ids), self.options.alpha)
            found.append(Hypothesis(ids[:-1], log_prob, log_prob / penalty))
        return best_first(found)[: self.options.num_best]

    def _ours(self, sentences: Sentences) -> Hypotheses:
        if self._own is None:
            options = replace(self.options, stop="full")
            model, rules = self._run.encoder_decoder, self._target.rules
            self._own = batch_searcher(model, self._source.eos_id, options, "fp32", rules)
        results: Hypotheses = [[] for _ in sentences]
        for batch in batches_of_like_length(sentences, _BATCH_TOKENS):
            for i, hypotheses in zip(batch, self._own([sentences[i] for i in batch]), strict=True):
                results[i] = hypotheses
        return results
