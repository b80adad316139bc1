"""Continuations of texts by a language model, in token ids."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor

from triptych import thresholds
from triptych.decoding.batches import LONGEST_PROMPT, batches_of_like_length, check_length, padded_alike
from triptych.decoding.sampling import Sampler, SamplingOptions
from triptych.decoding.search import (
    LARGEST_BEAM,
    MOST_TOKENS,
    length_penalty,
    require_alpha,
    require_count,
    require_finite_logits,
)
from triptych.decoding.text_engine import OpenTexts, TextEngine

Finish = Literal["token", "text", "length", "positions"]


@dataclass(frozen=True)
class GenerationOptions:
    """How texts are continued."""

    max_new_tokens: int = 128  # a continuation ends at this many tokens
    sampling: SamplingOptions = field(default_factory=SamplingOptions)  # how each token is chosen
    seed: int = 0  # of what is drawn
    num_samples: int = 1  # continuations of each prompt; with a beam, the best ones
    beam_size: int = 1  # 1, or the hypotheses of a beam search, which draws nothing
    alpha: float = 0.0  # exponent of the beam's length penalty, `((5 + length) / 6)^alpha`; 0 for none
    stop_ids: tuple[int, ...] = ()  # a continuation ends before any of these tokens
    stop_texts: tuple[str, ...] = ()  # a continuation ends before any of these strings
    # longest prompt; None for as many tokens as the model has positions for, or 32,768 where it has no limit
    # and reads a prompt whole
    max_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_prompt_tokens is not None:
            require_count("max_prompt_tokens", self.max_prompt_tokens, MOST_TOKENS)
        require_count("max_new_tokens", self.max_new_tokens, MOST_TOKENS)
        require_count("num_samples", self.num_samples, LARGEST_BEAM)
        require_count("beam_size", self.beam_size, LARGEST_BEAM)
        require_alpha(self.alpha)
        if "" in self.stop_texts:
            raise ValueError("a stop string is empty: it would end every text before it begins")
        if self.beam_size > 1:
            if self.sampling != SamplingOptions():
                raise ValueError("beam search takes the most probable texts: give no sampling option with it")
            if self.num_samples > self.beam_size:
                raise ValueError(
                    f"num_samples is {self.num_samples}, but a beam of {self.beam_size} holds fewer texts"
                )
        elif self.sampling.is_greedy and self.num_samples > 1:
            raise ValueError("the samples of temperature 0 are all alike: give a temperature above 0")


class NewToken(NamedTuple):
    """A token that a continuation grew by."""

    row: int  # the number of the prompt times `num_samples`, plus that of the sample
    token: int
    # natural logarithm of the probability that the model gave it, before temperature, penalty and filters
    log_prob: float
    # why the continuation ends here: a stop "token", which is this one and no part of it, a stop "text", the
    # "length" asked for, or the model's "positions"; None where it goes on
    finish: Finish | None


@dataclass(frozen=True)
class Generated:
    """A continuation.

    Attributes:
        ids: its tokens, without prompt and stop token.
        log_probs: of every token, as in `NewToken`, and of the stop token if there is one.
        finish: why it ended.
        score: of beam search, the sum of `log_probs` over the length penalty; otherwise their sum.
    """

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish: Finish
    score: float


class OtherEngine(ABC):
    """Another library that continues texts in the place of a `TextEngine`."""

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        options: GenerationOptions,
        ends: Callable[[int, int], bool],
        batch_rows: int = 32,
    ) -> list[list[Generated]]:
        """Continue prompts; see `generate_tokens`."""

    @abstractmethod
    def stream(
        self, prompt: Sequence[int], options: GenerationOptions, ends: Callable[[int, int], bool]
    ) -> Iterator[NewToken]:
        """Continue a prompt without a beam, token by token; see `generate_stream`."""


def _never(row: int, token: int) -> bool:
    del row, token
    return False


def check_prompts(
    prompts: Sequence[Sequence[int]], max_tokens: int | None, most: int | None, *, whole: bool = True
) -> None:
    """Check that every prompt can be continued."""
    for number, ids in enumerate(prompts, start=1):
        which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
        otherwise = LONGEST_PROMPT if whole else len(ids)
        check_length(which, len(ids), max_tokens, most, otherwise, "max_prompt_tokens")


def generate_stream(
    engine: TextEngine,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    ends: Callable[[int, int], bool] = _never,
) -> Iterator[NewToken]:
    """Continue prompts together, token by token.

    A model of a recipe reads `engine.context` tokens at once, as in training. A text that has grown to so
    many goes on from the last half of them, read again. When that is depends on the text alone.
    """
    check_prompts(prompts, engine.max_tokens, options.max_prompt_tokens, whole=not engine.reads_again)
    growing = _Growing(engine, prompts, options, ends)
    windows = [_last(ids, engine.context) for ids in prompts]
    lengths = [len(ids) for ids in windows for _ in range(options.num_samples)]
    opened, logits = engine.read(windows, room=max(map(growing.limit, range(len(lengths)), lengths)))
    if options.num_samples > 1:
        each = torch.arange(len(prompts), device=engine.device).repeat_interleave(options.num_samples)
        opened.select(each)
        logits = logits[each]
    rows = yield from growing.grow([*range(len(lengths))], lengths, opened, logits)
    while rows:
        assert engine.context is not None, "without a limit no text is read again"
        # Half of the places that training has known are for what is read again, half for new tokens.
        windows = [_last(growing.texts[row], max(engine.context // 2, 1)) for row in rows]
        lengths = [len(ids) for ids in windows]
        opened, logits = engine.read(windows, room=max(map(growing.limit, rows, lengths)))
        rows = yield from growing.grow(rows, lengths, opened, logits)


@final
class _Growing:
    """Texts that a model continues: what each has, and what is drawn for it."""

    def __init__(
        self,
        engine: TextEngine,
        prompts: Sequence[Sequence[int]],
        options: GenerationOptions,
        ends: Callable[[int, int], bool],
    ) -> None:
        self.engine, self.options, self.ends = engine, options, ends
        self.texts = [[*ids] for ids in prompts for _ in range(options.num_samples)]
        self._longest = [len(ids) + options.max_new_tokens for ids in self.texts]
        self._sampler = Sampler(options.sampling, options.seed, [*range(options.num_samples)] * len(prompts))
        self._sampler.read(self.texts, engine.num_choices, engine.device)

    def limit(self, row: int, length: int) -> int:
        """Tokens that a text grows by before it is as long as was asked for, or as can be read at once."""
        return limit_of_prompt(length, self._longest[row] - len(self.texts[row]), self.engine.context)

    def grow(
        self, rows: list[int], lengths: Sequence[int], opened: OpenTexts, logits: Tensor
    ) -> Generator[NewToken, None, list[int]]:
        """Continue texts that were read."""
        limits = dict(zip(rows, map(self.limit, rows, lengths), strict=True))
        is_open, going_on, length = [True] * len(rows), list[int](), 0
        while True:
            length += 1
            # By row: a `logsumexp` of all rows has other bits in each of them.
            of_all = logits.log_softmax(dim=-1)
            require_finite_logits(of_all.amax(dim=-1))
            tokens = self._sampler.choose(logits[:, : self.engine.num_choices], rows)
            log_probs = of_all.gather(1, tokens[:, None])[:, 0]
            drawn, before = zip(tokens.tolist(), log_probs.tolist(), strict=True), len(going_on)
            for place, (token, log_prob) in enumerate(drawn):
                if not is_open[place]:
                    continue
                row = rows[place]
                self.texts[row].append(token)
                finish = self._finish(row, token, is_at_limit=length == limits[row])
                is_open[place] = finish is None and length < limits[row]
                if finish is None and not is_open[place]:
                    going_on.append(row)
                yield NewToken(row, token, log_prob, finish)
            num_open = sum(is_open)
            if not num_open:
                return going_on
            num_done = len(is_open) - num_open
            # Nothing may be drawn for a text that waits to be read again.
            if len(going_on) > before or num_done >= max(1, thresholds.SHARE_DONE * len(is_open)):
                kept = [place for place, still in enumerate(is_open) if still]
                rows, is_open = [rows[place] for place in kept], [True] * len(kept)
                places = torch.tensor(kept, device=self.engine.device)
                opened.select(places)
                tokens = tokens[places]
            logits = self.engine.step(tokens, opened)

    def _finish(self, row: int, token: int, *, is_at_limit: bool) -> Finish | None:
        if token in self.options.stop_ids:
            return "token"
        if self.ends(row, token):
            return "text"
        if len(self.texts[row]) == self._longest[row]:
            return "length"
        return "positions" if is_at_limit and not self.engine.reads_again else None


def _last(ids: Sequence[int], most: int | None) -> Sequence[int]:
    """The last tokens of a text, `most` of them; all if None."""
    return ids if most is None else ids[-most:]


def limit_of_prompt(prompt: int, max_new_tokens: int, max_tokens: int | None) -> int:
    """Tokens that a prompt may grow by: the last one needs no position."""
    return max_new_tokens if max_tokens is None else min(max_new_tokens, max_tokens - prompt + 1)


def generate_tokens(
    engine: TextEngine,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    *,
    ends: Callable[[int, int], bool] = _never,
    batch_rows: int = 32,
) -> list[list[Generated]]:
    """Continue prompts, those of like length together."""
    check_prompts(prompts, engine.max_tokens, options.max_prompt_tokens, whole=not engine.reads_again)
    if options.beam_size > 1:
        return [beam_search(engine, ids, options) for ids in prompts]
    found: list[list[Generated]] = [[] for _ in prompts]
    batches = batches_of_like_length(prompts, None, max(1, batch_rows // options.num_samples))
    lengths, limit = [len(ids) + options.max_new_tokens for ids in prompts], engine.rotary_limit
    for batch in (part for whole in batches for part in padded_alike(whole, lengths, limit)):
        # Rows are numbered within the batch; a caller knows them by the prompts' own numbers.
        numbers = [i * options.num_samples + s for i in batch for s in range(options.num_samples)]

        def ends_here(row: int, token: int, numbers: list[int] = numbers) -> bool:
            return ends(numbers[row], token)

        grown: list[list[NewToken]] = [[] for _ in numbers]
        for new in generate_stream(engine, [prompts[i] for i in batch], options, ends_here):
            grown[new.row].append(new)
        for number, tokens in zip(numbers, grown, strict=True):
            found[number // options.num_samples].append(collected(tokens))
    return found


def collected(tokens: Sequence[NewToken]) -> Generated:
    """A continuation of its tokens."""
    finish = tokens[-1].finish
    assert finish is not None
    own = tokens[:-1] if finish == "token" else tokens
    log_probs = tuple(new.log_prob for new in tokens)
    return Generated(tuple(new.token for new in own), log_probs, finish, sum(log_probs))


class _Open(NamedTuple):
    """A hypothesis that goes on: its tokens, their log-probabilities and the sum of these."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    total: float


def beam_search(engine: TextEngine, prompt: Sequence[int], options: GenerationOptions) -> list[Generated]:
    """The most probable continuations of a prompt that a beam finds, best first.

    Each step keeps the `beam_size` most probable of all one-token extensions. Those that end, by a stop
    token, leave the beam; the search is over when `beam_size` have ended or at the limit, where the open ones
    count as they are. No text goes on past what the model reads at once.
    """
    prompt = _last(prompt, engine.context)
    k, limit = options.beam_size, limit_of_prompt(len(prompt), options.max_new_tokens, engine.context)
    at_limit: Finish = "length" if limit == options.max_new_tokens else "positions"
    opened, logits = engine.read([prompt], room=limit)
    beams, ended = [_Open((), (), 0.0)], list[Generated]()

    def closed(ids: tuple[int, ...], log_probs: tuple[float, ...], finish: Finish) -> Generated:
        score = sum(log_probs) / length_penalty(len(log_probs), options.alpha)
        return Generated(ids, log_probs, finish, score)

    for length in range(1, limit + 1):
        log_probs = logits.log_softmax(dim=-1)[:, : engine.num_choices].double()
        require_finite_logits(log_probs.amax(dim=-1))
        totals = log_probs + log_probs.new_tensor([beam.total for beam in beams])[:, None]
        # Half of twice the beam may end here, and a full beam still goes on.
        best = totals.flatten().topk(min(k * (1 + len(options.stop_ids)), totals.numel()))
        going: list[tuple[int, _Open]] = []
        for rank, (total, place) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            parent, token = divmod(place, totals.shape[1])
            if total == -torch.inf or len(going) == k:
                break
            beam = beams[parent]
            probs = (*beam.log_probs, float(log_probs[parent, token]))
            if token not in options.stop_ids:
                going.append((parent, _Open((*beam.ids, token), probs, total)))
            elif rank < k:
                ended.append(closed(beam.ids, probs, "token"))
        beams = [beam for _, beam in going]
        if not beams or len(ended) >= k or length == limit:
            break
        opened.select(torch.tensor([parent for parent, _ in going], device=engine.device))
        logits = engine.step(torch.tensor([beam.ids[-1] for beam in beams], device=engine.device), opened)
    if len(ended) < k:
        ended += [closed(beam.ids, beam.log_probs, at_limit) for beam in beams]
    return sorted(ended, key=lambda found: -found.score)[: options.num_samples]
