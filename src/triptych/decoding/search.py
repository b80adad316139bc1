"""Greedy and beam search on an `Engine`, in few tensor operations a step.

A hypothesis is judged by its log-probability over the paper's length penalty,

    log P(Y | X) / lp(Y)        lp(Y) = ((5 + |Y|) / 6)^α

where |Y| counts the tokens with the end of sentence. Source: Wu et al. 2016, arXiv 1609.08144, section 7;
Vaswani et al. 2017, section 6.1, for the limit on length.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triptych import thresholds
from triptych.decoding.engine import GROUP, DecodingEngine, Engine, FixedBeamCache, FixedSteps
from triptych.errors import DataError
from triptych.text import OutputRules

Stop = Literal["certain", "full"]

# Far more than anybody searches with; what is larger ends in numbers that do not fit.
LARGEST_BEAM, MOST_TOKENS = 10_000, 10**9
_LARGEST_ALPHA = 10.0


def require_count(name: str, value: int, most: int) -> None:
    """Raises ValueError for a number below 1 or above `most`."""
    if not 1 <= value <= most:
        raise ValueError(f"{name} is {value}: it must be at least 1, and at most {most:,}")


def require_alpha(alpha: float) -> None:
    """Raises ValueError for an exponent of the length penalty that is negative or too large."""
    if not 0 <= alpha <= _LARGEST_ALPHA:
        raise ValueError(f"alpha is {alpha}: it must be at least 0, and at most {_LARGEST_ALPHA:g}")


@dataclass(frozen=True)
class SearchOptions:
    """How to search."""

    beam_size: int = 4  # hypotheses kept at every step; 1 is greedy
    alpha: float = 0.6  # exponent of the length penalty; 0 for none
    max_extra_tokens: int = 50  # a sentence's output ends at the number of its tokens plus this
    num_best: int = 1  # hypotheses returned, at most beam_size
    # when a sentence is done: "certain", when none of its open hypotheses can overtake the last finished one
    # wanted, however it goes on; or "full", already when beam_size have finished, which most toolkits do and
    # which takes about half the steps. Greedy search ends at the first
    stop: Stop = "certain"
    # longest sentence that is read at once; None for the model's limit, or 1,024 where it has none
    max_source_tokens: int | None = None

    def __post_init__(self) -> None:
        require_count("beam_size", self.beam_size, LARGEST_BEAM)
        require_count("max_extra_tokens", self.max_extra_tokens, MOST_TOKENS)
        require_alpha(self.alpha)
        if not 1 <= self.num_best <= self.beam_size:
            raise ValueError(
                f"num_best is {self.num_best}: it must be between 1 and beam_size ({self.beam_size})"
            )
        if self.max_source_tokens is not None:
            require_count("max_source_tokens", self.max_source_tokens, MOST_TOKENS)


@dataclass(frozen=True)
class Hypothesis:
    """A finished output."""

    ids: tuple[int, ...]  # its tokens, without beginning and end of sentence
    log_prob: float  # natural logarithm of its probability, the end of sentence included
    score: float  # log_prob over the length penalty


def length_penalty(length: int, alpha: float) -> float:
    """`((5 + length) / 6)^α`."""
    return float(((5 + length) / 6) ** alpha)


def enough_finished(options: SearchOptions) -> float:
    """The number of finished hypotheses at which a sentence is done whatever the open ones promise."""
    if options.beam_size == 1:
        return 1.0  # greedy search ends where the likeliest token is the end
    return float(options.beam_size) if options.stop == "full" else math.inf


def output_limits(
    src: Int[Tensor, "batch src_len"], pad_id: int, max_extra_tokens: int, max_target_tokens: int | None
) -> list[int]:
    """The most tokens that the output of each sentence may have, without its end of sentence."""
    source_tokens = (src != pad_id).sum(dim=1) - 1  # the end of sentence does not count
    return [limit_of(n, max_extra_tokens, max_target_tokens) for n in source_tokens.tolist()]


def limit_of(num_source_tokens: int, max_extra_tokens: int, max_target_tokens: int | None) -> int:
    """The most tokens that an output may have, without its end of sentence."""
    # The first token takes a position too.
    longest = math.inf if max_target_tokens is None else max_target_tokens - 1
    return int(min(num_source_tokens + max_extra_tokens, longest))


def best_first(found: Sequence[Hypothesis]) -> list[Hypothesis]:
    """By score."""
    return sorted(found, key=lambda hypothesis: -hypothesis.score)


def require_finite_logits(best: Float[Tensor, " rows"]) -> None:
    """Check that the model still computes numbers: a search over NaN has no end."""
    if bool((best.isnan() | (best == torch.inf)).any()):
        raise DataError(
            "the model computed numbers that are not finite (NaN or infinite) from weights that are: they "
            "overflow; try another --dtype or --precision"
        )


@torch.inference_mode()
def search(
    engine: DecodingEngine,
    src: Int[Tensor, "batch src_len"],
    options: SearchOptions,
    rules: OutputRules,
    *,
    fixed: bool | None = None,
) -> list[list[Hypothesis]]:
    """The best outputs for each source sentence, best first.

    Sentences do not influence each other: each has its own limit and its own end. When a sentence
    is done, `SearchOptions.stop` says.
    """
    if fixed is None:
        fixed = engine.device.type == "cuda" and isinstance(engine, Engine)
    beams = _Beams(engine, src, options, rules, fixed)
    while beams.sentences:
        beams.advance()
    return [best_first(found)[: options.num_best] for found in beams.finished]


@final
class _Beams:
    """The open hypotheses of the sentences still in the batch, `beam_size` rows for each."""

    def __init__(
        self,
        engine: DecodingEngine,
        src: Tensor,
        options: SearchOptions,
        rules: OutputRules,
        fixed: bool,
    ) -> None:
        self.engine, self.options, self.rules = engine, options, rules
        batch, k = src.shape[0], options.beam_size
        device = src.device
        self.cache = engine.start(src, k, fixed)
        self.end = rules.end if engine.columns(self.cache) is None else 0  # its column
        self.steps = FixedSteps(cast(Engine, engine), cast(FixedBeamCache, self.cache)) if fixed else None
        most = engine.max_target_tokens
        if most is not None:  # the first tokens take positions too; `output_limits` counts one of them
            most -= len(rules.start) - 1
        self.limits = output_limits(src, engine.pad_id, options.max_extra_tokens, most)
        self.sentences = list(range(batch))
        self.done = [False] * batch
        self.enough = enough_finished(options)
        # Log-probabilities are at most 0 and only fall, and the penalty grows with the length: of all lengths
        # that an open hypothesis may end at, the longest bounds its score from above. In float64, as scores
        # are: in float32 the bound could be rounded below a score.
        kindest = [length_penalty(limit + 1, options.alpha) for limit in self.limits]
        self.kindest = torch.tensor(kindest, dtype=torch.float64, device=device)
        # The score of the last finished hypothesis wanted; open ones must be able to overtake it.
        self.wanted = torch.full((batch,), -torch.inf, dtype=torch.float64, device=device)
        self.ids = torch.tensor(rules.start, device=device).expand(batch, k, -1).contiguous()
        # All rows of a sentence begin alike: only the first may be continued, or all would be copies.
        self.log_probs = torch.full((batch, k), -torch.inf, device=device)
        self.log_probs[:, 0] = 0.0
        self.finished: list[list[Hypothesis]] = [[] for _ in range(batch)]
        for place in range(len(rules.start) - 1):
            self._step(self.ids[:, :, place].flatten())

    def advance(self) -> None:
        """Lengthen every open hypothesis by a token."""
        k = self.options.beam_size
        log_probs = self._next_log_probs()
        # Twice the beam: even if half of it ends here, a full beam stays open.
        values, parents, tokens = self._best(log_probs, 2 * k if k > 1 else 1)
        if (columns := self.engine.columns(self.cache)) is not None:
            tokens = columns.gather(1, tokens)
        require_finite_logits(values[:, 0])
        ends = tokens == self.rules.end
        if bool(ends[:, :k].any()):
            self._collect(values[:, :k], parents[:, :k], ends[:, :k])
        values = values.masked_fill(ends, -torch.inf)
        if k > 1:
            values, places = values.topk(k, dim=1)
            parents, tokens = parents.gather(1, places), tokens.gather(1, places)
            self.ids = self.ids.gather(1, parents[:, :, None].expand_as(self.ids))
            self.cache.reorder(parents)
        self.log_probs = values.to(self.log_probs.dtype)
        self.ids = torch.cat([self.ids, tokens[:, :, None]], dim=2)
        self._retire(values[:, 0])

    def _next_log_probs(self) -> Float[Tensor, "open beam vocab"]:
        rules, end = self.rules, self.end
        log_probs = self._step(self.ids[:, :, -1].flatten()).log_softmax(dim=-1)
        log_probs = log_probs.view(len(self.sentences), self.options.beam_size, -1)
        length = self.ids.shape[2]
        at_limit = [i for i, sentence in enumerate(self.sentences) if self._length > self.limits[sentence]]
        of_end = log_probs[at_limit, :, end] if at_limit else None
        if length < rules.min_length:
            log_probs[:, :, end] = -torch.inf
        if 0 < rules.no_repeat <= length:
            self._forbid_repeats(log_probs)
        if of_end is not None:
            log_probs[at_limit] = -torch.inf
            log_probs[at_limit, :, end] = of_end
        return log_probs

    @property
    def _length(self) -> int:
        """Tokens of an output that ends at this step, its end counted."""
        return self.ids.shape[2] - len(self.rules.start) + 1

    def _step(self, tokens: Tensor) -> Tensor:
        return self.engine.step(tokens, self.cache) if self.steps is None else self.steps(tokens)

    def _forbid_repeats(self, log_probs: Float[Tensor, "open beam vocab"]) -> None:
        """Rule out tokens with which `no_repeat` tokens in a row would come a second time."""
        before = self.rules.no_repeat - 1
        for sentence, hypotheses in enumerate(self.ids.tolist()):
            for row, ids in enumerate(hypotheses):
                last = ids[len(ids) - before :]
                places = range(len(ids) - before)
                again = [ids[place + before] for place in places if ids[place : place + before] == last]
                log_probs[sentence, row, again] = -torch.inf

    def _best(self, log_probs: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The best continuations of each sentence: their values, rows and tokens, best first."""
        batch, k, vocab = log_probs.shape
        groups = vocab // GROUP
        grouped = log_probs.view(batch, k * groups, GROUP)
        bests = grouped.amax(dim=-1).view(batch, k, groups) + self.log_probs[:, :, None]
        chosen = bests.view(batch, -1).topk(min(count, k * groups), dim=1).indices
        rows = chosen // groups
        within = grouped.gather(1, chosen[:, :, None].expand(-1, -1, GROUP))
        within = within + self.log_probs.gather(1, rows)[:, :, None]
        values, places = within.flatten(1).topk(min(count, within.shape[1] * GROUP), dim=1)
        group = chosen.gather(1, places // GROUP)
        return values, group // groups, group % groups * GROUP + places % GROUP

    def _collect(self, values: Tensor, parents: Tensor, ends: Tensor) -> None:
        """Note the hypotheses among the best beam_size candidates that end here."""
        ends = ends & values.isfinite()
        penalty = length_penalty(self._length, self.options.alpha)
        for place, rank in ends.nonzero().tolist():
            if self.done[place]:
                continue
            log_prob = float(values[place, rank])
            ids = tuple(self.ids[place, parents[place, rank], len(self.rules.start) :].tolist())
            found = self.finished[self.sentences[place]]
            found.append(Hypothesis(ids, log_prob, log_prob / penalty))
            if len(found) >= self.enough:
                self.wanted[place] = torch.inf
            elif len(found) >= self.options.num_best:
                self.wanted[place] = best_first(found)[self.options.num_best - 1].score

    def _retire(self, best_open: Tensor) -> None:
        """Take out the sentences whose open hypotheses cannot overtake the finished ones."""
        over = (self.wanted >= best_open.double() / self.kindest) | (best_open == -torch.inf)
        self.done = [was or now for was, now in zip(self.done, over.tolist(), strict=True)]
        num_done = sum(self.done)
        if num_done == len(self.done):
            self.sentences = []
        elif self.steps is None and num_done >= max(1, thresholds.SHARE_DONE * len(self.done)):
            places = [place for place, done in enumerate(self.done) if not done]
            kept = torch.tensor(places, device=best_open.device)
            self.sentences = [self.sentences[place] for place in places]
            self.done = [False] * len(places)
            self.ids, self.log_probs = self.ids[kept], self.log_probs[kept]
            self.wanted, self.kindest = self.wanted[kept], self.kindest[kept]
            self.cache.select(kept)
