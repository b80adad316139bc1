"""Text generation with a language model, in token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, final

import torch
from torch import Tensor

from triptych.running.decoding.cache import TextCache
from triptych.running.decoding.decoder import Ends, never_ends
from triptych.running.decoding.engine import Engine
from triptych.running.decoding.hypotheses import Finish, Hypothesis, Top
from triptych.running.decoding.sampling import RowState, choose
from triptych.running.decoding.search import BeamKind, BeamText
from triptych.running.decoding.token_loop import (
    Asked,
    DecodingBatch,
    Loop,
    Read,
    Text,
    require_finite_best,
)
from triptych.running.decoding_options import (
    GenerationOptions,
    SamplingOptions,
)
from triptych.running.input_limits import LONGEST_PROMPT, check_length


class NewToken(NamedTuple):
    """A new token of a continuation."""

    row: int  # number of the prompt times `num_samples`, plus number of the sample
    token: int
    # natural logarithm of the model's probability, before temperature, penalty and filters
    log_prob: float
    finish: (
        Finish | None
    )  # reason why the continuation ends here (it excludes a stop token), or None
    top: Top = ()  # most probable tokens at this position


def check_prompts(
    prompts: Sequence[Sequence[int]],
    max_tokens: int | None,
    most: int | None,
    *,
    whole: bool = True,
) -> None:
    """Check that every prompt can be continued."""
    for number, ids in enumerate(prompts, start=1):
        which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
        otherwise = LONGEST_PROMPT if whole else len(ids)
        check_length(which, len(ids), max_tokens, most, otherwise, "max_prompt_tokens")


def limit_of_prompt(prompt: int, max_new_tokens: int, max_tokens: int | None) -> int:
    """Return the maximum number of new tokens; the last token does not take a position."""
    return (
        max_new_tokens
        if max_tokens is None
        else min(max_new_tokens, max_tokens - prompt + 1)
    )


@dataclass(frozen=True)
class SampleKind:
    """Common options of the texts of a batch."""

    sampling: SamplingOptions
    closed: int | None  # length of the texts, if a batch may not mix lengths


@final
class Sample(Text):
    """A continuation of a prompt.

    A model trained with a recipe reads at most `Engine.context` tokens at once, as in training. At this
    length, the last `context / 2` tokens of the text are read again and continued. The restarts depend on
    the text alone.

    Attributes:
        new: new tokens so far.
    """

    kind: SampleKind

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        options: GenerationOptions,
        row: int,
        ends: Ends,
    ) -> None:
        """Start; `row` is the number of the prompt times `num_samples`, plus the number of the sample."""
        self.row, self.new = row, list[NewToken]()
        self.draws = RowState(options.seed, row % options.num_samples, prompt)
        self._engine = engine
        self._options = options
        self._ends = ends
        self._ids, self.size = [*prompt], len(prompt) + options.most_new(len(prompt))
        self._read(engine.context)

    def _read(self, most: int | None) -> None:
        """Restart from the last `most` tokens of the text; None for all tokens."""
        self.given = self._ids if most is None else self._ids[-most:]
        left = self.size - len(self._ids)
        self._left = limit_of_prompt(len(self.given), left, self._engine.context)
        self.kind = SampleKind(
            self._options.sampling, _closed(self._engine, self.given, left)
        )

    @property
    def read(self) -> Read:
        context = self._engine.context
        return [[self._ids if context is None else self._ids[-context:]]]

    def batch(self, engine: Engine) -> "Samples":
        return Samples(engine, self.kind)

    @property
    def num_top(self) -> int:
        """Number of most probable tokens reported for each position."""
        return self._options.num_top

    def take(self, token: int, log_prob: float, top: Top = ()) -> bool:
        """Append a token; return True if the text must be read again before the next step."""
        self._ids.append(token)
        self._left -= 1
        finish = self._finish(token)
        self.new.append(NewToken(self.row, token, log_prob, finish, top))
        self.is_over = finish is not None
        if self.is_over or self._left:
            return False
        assert self._engine.context is not None, "without a limit no text is read again"
        # Half of the trained positions are for tokens read again, half for new tokens.
        self._read(max(self._engine.context // 2, 1))
        return True

    def _finish(self, token: int) -> Finish | None:
        if token in self._options.stop_ids:
            return "token"
        if self._ends(self.row, token):
            return "text"
        if len(self._ids) == self.size:
            return "length"
        return None if self._left or self._engine.reads_again else "positions"


def _closed(engine: Engine, prompt: Sequence[int], left: int) -> int | None:
    """Return the prompt's length if the text may grow past the rotary limit, else None."""
    limit = engine.rotary_limit
    return len(prompt) if limit is not None and len(prompt) + left > limit else None


@final
class Samples(DecodingBatch[Sample]):
    """Batch of samples, with a row for each sample."""

    def __init__(self, engine: Engine, kind: SampleKind) -> None:
        super().__init__(engine, kind, 1, joins=kind.closed is None)
        self._sampling = kind.sampling

    def open(self, texts: Sequence[Sample]) -> tuple[TextCache, Tensor]:
        # A prompt with several samples is read once.
        prompts = dict.fromkeys(tuple(text.given) for text in texts)
        cache, logits = self.engine.read([*prompts])
        if len(prompts) < len(texts):
            number = {prompt: place for place, prompt in enumerate(prompts)}
            places = torch.tensor(
                [number[tuple(text.given)] for text in texts], device=logits.device
            )
            cache.select(places)
            logits = logits[places]
        return cache, logits

    def choose(self) -> list[Sample]:
        places = self.open_places
        open_ = [text for place in places if (text := self.texts[place]) is not None]
        logits = self.logits if len(places) == len(self.texts) else self.logits[places]
        # `log_softmax` works row by row; the bits of a `logsumexp` depend on the other rows.
        of_all = logits.log_softmax(dim=-1)
        require_finite_best(of_all.amax(dim=-1), self.engine, open_)
        chosen = choose(
            logits[:, : self.engine.num_choices],
            self._sampling,
            [text.draws for text in open_],
        )
        log_probs = of_all.gather(1, chosen[:, None])[:, 0]
        self.tokens = chosen.new_zeros(len(self.texts))
        self.tokens[places] = chosen
        again = list[Sample]()
        tops = _tops(
            of_all[:, : self.engine.num_choices], [text.num_top for text in open_]
        )
        taken = zip(
            places, open_, chosen.tolist(), log_probs.tolist(), tops, strict=True
        )
        for place, text, token, log_prob, top in taken:
            if text.take(token, log_prob, top):
                self.texts[place] = None
                again.append(text)
        return again


def _tops(log_probs: Tensor, counts: Sequence[int]) -> list[Top]:
    """Return the most probable tokens of each row, as many as each row asks for."""
    most = min(max(counts), log_probs.shape[1])
    if not most:
        return [()] * len(counts)
    best = log_probs.topk(most, dim=-1)
    rows = zip(best.indices.tolist(), best.values.tolist(), counts, strict=True)
    return [
        tuple(zip(ids[:count], values[:count], strict=True))
        for ids, values, count in rows
    ]


def begin(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    ends: Ends = never_ends,
) -> list[Asked[list[Hypothesis]]]:
    """Check prompts and return their requests for a `Loop`."""
    check_prompts(
        prompts,
        engine.max_tokens,
        options.max_prompt_tokens,
        whole=not engine.reads_again,
    )
    return [
        _begin_prompt(engine, ids, number, options, ends)
        for number, ids in enumerate(prompts)
    ]


def _begin_prompt(
    engine: Engine,
    prompt: Sequence[int],
    number: int,
    options: GenerationOptions,
    ends: Ends,
) -> Asked[list[Hypothesis]]:
    """Build the request of prompt `number`.

    A beam search is over when `beam_size` hypotheses have ended or at the length limit, where open hypotheses
    count as ended. A beam never grows past `Engine.context`.
    """
    # Without a beam, every sample is a separate text; with a beam, the samples are its best hypotheses.
    k = options.beam_size
    count = options.num_samples
    if k == 1:
        rows = range(number * count, (number + 1) * count)
        samples = [Sample(engine, prompt, options, row, ends) for row in rows]
        return Asked(samples, lambda: [collected(sample.new) for sample in samples])
    most_new = options.most_new(len(prompt))
    prompt = prompt if engine.context is None else prompt[-engine.context :]
    limit = limit_of_prompt(len(prompt), most_new, engine.context)
    closed = _closed(engine, prompt, limit)
    kind = BeamKind(k, options.alpha, options.stop_ids, float(k), closed=closed)
    at_limit: Finish = "length" if limit == most_new else "positions"
    beam = BeamText(prompt, kind, limit, at_limit=at_limit)
    return Asked([beam], lambda: beam.best[:count])


def generate_tokens(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    *,
    ends: Ends = never_ends,
    batch_rows: int = 32,
) -> list[list[Hypothesis]]:
    """Continue prompts in order of falling length, at most `batch_rows` texts at a time."""
    asked = begin(engine, prompts, options, ends)
    texts = chain.from_iterable(one.texts for one in asked)
    Loop(engine, most_rows=batch_rows).run(sorted(texts, key=lambda text: -text.size))
    return [one.result() for one in asked]


def collected(tokens: Sequence[NewToken]) -> Hypothesis:
    """Build a continuation from its tokens."""
    finish = tokens[-1].finish
    assert finish is not None
    own = tokens[:-1] if finish == "token" else tokens
    log_probs = tuple(new.log_prob for new in tokens)
    tops = tuple(new.top for new in tokens)
    return Hypothesis(
        tuple(new.token for new in own),
        sum(log_probs),
        sum(log_probs),
        log_probs,
        finish,
        tops,
    )
