"""Greedy and beam search, in few tensor operations a step.

A hypothesis is judged by its log-probability over the paper's length penalty,

    log P(Y | X) / lp(Y)        lp(Y) = ((5 + |Y|) / 6)^α

where |Y| counts the tokens with the end of sentence. Source: Wu et al. 2016, arXiv 1609.08144, section 7;
Vaswani et al. 2017, section 6.1, for the limit on length.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from triptych import thresholds
from triptych.errors import UsageError
from triptych.literals import Stop
from triptych.running.decoding.engine import GROUP, DecodingEngine
from triptych.running.decoding.glossary import Terms
from triptych.running.decoding.token_loop import DecodingBatch, Read, Text, require_finite_best
from triptych.running.text import OutputRules

# A "token" that ends it, a stop "text", the "length" asked for, or the model's "positions".
Finish = Literal["token", "text", "length", "positions"]

# Far more than anybody searches with; what is larger ends in numbers that do not fit.
LARGEST_BEAM = 10_000
MOST_TOKENS = 10**9
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


# Tokens with the natural logarithms of their probabilities, the most probable first.
Top = tuple[tuple[int, float], ...]


class Hypothesis(NamedTuple):
    """An output, open or finished."""

    ids: tuple[int, ...]  # its tokens, without what it goes on from and the token that ends it
    log_prob: float  # natural logarithm of its probability, the end included
    score: float = 0.0  # of a finished one: log_prob over the length penalty, if it was searched for
    log_probs: tuple[float, ...] = ()  # of its tokens and of the token that ends it
    finish: Finish | None = None  # why it ended
    tops: tuple[Top, ...] = ()  # the most probable tokens in the place of each of `log_probs`, if asked for


def length_penalty(length: int, alpha: float) -> float:
    """`((5 + length) / 6)^α`."""
    return float(((5 + length) / 6) ** alpha)


def enough_finished(options: SearchOptions) -> float:
    """The number of finished hypotheses at which a sentence is done whatever the open ones promise."""
    if options.beam_size == 1:
        return 1.0  # greedy search ends where the likeliest token is the end
    return float(options.beam_size) if options.stop == "full" else math.inf


def limit_of(num_source_tokens: int, max_extra_tokens: int, max_target_tokens: int | None) -> int:
    """The most tokens that an output may have, without its end of sentence."""
    # The first token takes a position too.
    longest = math.inf if max_target_tokens is None else max_target_tokens - 1
    return int(min(num_source_tokens + max_extra_tokens, longest))


def best_first(found: Sequence[Hypothesis]) -> list[Hypothesis]:
    return sorted(found, key=lambda hypothesis: -hypothesis.score)


@dataclass(frozen=True)
class BeamKind:
    """How beams are searched; texts of one kind are searched together."""

    size: int  # hypotheses kept at every step; 1 is greedy
    alpha: float  # exponent of the length penalty
    ends: tuple[int, ...]  # tokens that end a hypothesis
    enough: float  # finished hypotheses at which a text is done
    # rank of the finished hypothesis that an open one must be able to overtake; None where `enough` decides
    wanted: int | None = None
    rules: OutputRules | None = None  # of a translator's output
    closed: int | None = None  # the length of texts that share a batch only with others as long


_NOTHING = Hypothesis((), -math.inf)


@final
class BeamText(Text):
    """A text whose outputs are searched."""

    kind: BeamKind

    def __init__(
        self,
        given: Sequence[int],
        kind: BeamKind,
        limit: int,
        terms: Terms | None = None,
        at_limit: Finish = "token",
    ) -> None:
        """`limit` is of the tokens of an output. By `rules` it ends with an end token even there."""
        self.given = given
        self.kind = kind
        self.limit = limit
        self.terms = terms
        self._at_limit = at_limit
        self.num_rows, self.size = kind.size, len(given) + (0 if kind.rules else limit)
        # All rows of a text begin alike: only the first may be continued, or all would be copies.
        self.open = [Hypothesis((), 0.0), *[_NOTHING] * (kind.size - 1)]
        self.ended: list[Hypothesis] = []
        # Log-probabilities are at most 0 and only fall, and the penalty grows with the length: of all lengths
        # that an open hypothesis may end at, the longest bounds its score from above.
        self.kindest = length_penalty(limit + 1, kind.alpha)

    @property
    def read(self) -> Read:
        rules = self.kind.rules
        given = [*self.given]
        outputs = [[*one.ids] for one in self.open if one.log_prob > -math.inf]
        if rules is None:
            return [[given + ids for ids in outputs]]
        return [[given] * len(outputs), [[*rules.start, *ids] for ids in outputs]]

    @property
    def length(self) -> int:
        """Tokens of the open hypotheses."""
        return len(self.open[0].ids)

    @property
    def best(self) -> list[Hypothesis]:
        """The hypotheses that have ended, best first."""
        return best_first(self.ended)

    def batch(self, engine: Any) -> "Beams":
        return Beams(engine, self.kind)

    def take(self, candidates: Sequence[tuple[float, int, int, float]]) -> list[tuple[int, int]]:
        """Go on with the best candidates: totals, rows, tokens and log-probabilities, best first.

        Returns the row that each row goes on from, and its token.
        """
        kind = self.kind
        length = self.length + 1
        going = list[tuple[int, int]]()
        open_: list[Hypothesis] = []
        for rank, (total, parent, token, log_prob) in enumerate(candidates):
            if total == -math.inf or len(open_) == kind.size:
                break
            before = self.open[parent]
            log_probs = (*before.log_probs, log_prob)
            if token not in kind.ends:
                open_.append(Hypothesis((*before.ids, token), total, 0.0, log_probs))
                going.append((parent, token))
            elif rank < kind.size:
                self._close(before.ids, total, log_probs, "token")
        if open_ and length == self.limit and kind.rules is None and len(self.ended) < kind.enough:
            for one in open_:
                self._close(one.ids, one.log_prob, one.log_probs, self._at_limit)
            open_ = []
        self.is_over = not open_ or len(self.ended) >= kind.enough or self._is_certain(open_[0].log_prob)
        self.open = [*open_, *[_NOTHING] * (kind.size - len(open_))]
        return [*going, *[(0, 0)] * (kind.size - len(going))]

    def _close(
        self, ids: tuple[int, ...], total: float, log_probs: tuple[float, ...], finish: Finish
    ) -> None:
        score = total / length_penalty(len(log_probs), self.kind.alpha)
        self.ended.append(Hypothesis(ids, total, score, log_probs, finish))

    def _is_certain(self, best_open: float) -> bool:
        """Whether no open hypothesis can overtake the last finished one wanted."""
        wanted = self.kind.wanted
        if wanted is None or len(self.ended) < wanted:
            return False
        return self.best[wanted - 1].score >= best_open / self.kindest


def sentence_text(
    engine: DecodingEngine,
    ids: Sequence[int],
    options: SearchOptions,
    rules: OutputRules,
    terms: Terms | None = None,
) -> BeamText:
    """A sentence, token ids with its end, on its way through a `Loop`; its outputs have the terms."""
    size = options.beam_size
    enough = enough_finished(options)
    if terms is not None:  # the first that end would be those that had their terms first
        size = size + terms.num_tokens
        enough = math.inf
    kind = BeamKind(size, options.alpha, (rules.end,), enough, options.num_best, rules)
    most = engine.max_tokens
    if most is not None:  # the first tokens take positions too; `limit_of` counts one of them
        most -= len(rules.start) - 1
    limit = limit_of(len(ids) - 1, options.max_extra_tokens, most)
    if terms is not None and terms.num_tokens > limit:
        raise UsageError(
            f"glossary: the terms of a sentence need {terms.num_tokens} tokens, and its translation may have "
            f"{limit}: leave out some, or raise max_extra_tokens"
        )
    return BeamText(ids, kind, limit, terms)


@final
class Beams(DecodingBatch[BeamText]):
    """Texts that are searched together, `size` rows for each."""

    kind: BeamKind
    rows_apart = thresholds.ROWS_APART

    def __init__(self, engine: Any, kind: BeamKind) -> None:
        super().__init__(engine, kind, kind.size, joins=engine.joins and kind.closed is None)

    def open(self, texts: Sequence[BeamText]) -> tuple[Any, Tensor]:
        given = [text.given for text in texts]
        k = self.kind.size
        if self.kind.rules is None:
            cache, logits = self.engine.read(given)
            return cache.of_copies(k), logits.repeat_interleave(k, dim=0)
        rows = [torch.tensor(ids, device=self.engine.device) for ids in given]
        src = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.engine.pad_id)
        cache = self.engine.start(src, k)
        for token in self.kind.rules.start:
            logits = self.engine.step(torch.full((len(texts) * k,), token, device=src.device), cache)
        return cache, logits

    def choose(self) -> list[BeamText]:
        k = self.kind.size
        texts = self.texts
        log_probs = self.logits.log_softmax(dim=-1)[:, : self.engine.num_choices].view(len(texts), k, -1)
        if self.kind.rules is not None:
            self._obey(log_probs, self.kind.rules)
        stays = [(row, 0) for row in range(k)]
        best = self._best(log_probs)
        for place in self.open_places:
            text = texts[place]
            if text is not None and text.terms is not None:
                beam = [(one.ids, one.log_prob) for one in text.open]
                best[place] = text.terms.best(log_probs[place], beam, self.kind.ends[0])
        chosen = [
            stays if text is None or text.is_over else text.take(found)
            for text, found in zip(texts, best, strict=True)
        ]
        if self.open_places:
            found = torch.tensor(chosen, device=log_probs.device)
            if k > 1:
                self.cache.reorder(found[:, :, 0])
            self.tokens = found[:, :, 1].flatten()
        return []

    def _obey(self, log_probs: Float[Tensor, "texts beam vocab"], rules: OutputRules) -> None:
        """Rule out tokens that may not come next."""
        end = rules.end if self.cache.columns is None else 0
        for place in self.open_places:
            text = self.texts[place]
            own = log_probs[place]
            assert text is not None
            length = len(rules.start) + text.length
            of_end = own[:, end].clone() if text.length >= text.limit else None
            if length < rules.min_length:
                own[:, end] = -torch.inf
            if 0 < rules.no_repeat <= length:
                for row, one in enumerate(text.open):
                    repeating = {*_repeating([*rules.start, *one.ids], rules.no_repeat - 1)}
                    own[row, [*repeating - (text.terms.tokens if text.terms else set())]] = -torch.inf
            if of_end is not None:
                own.fill_(-torch.inf)
                own[:, end] = of_end

    def _best(
        self, log_probs: Float[Tensor, "texts beam vocab"]
    ) -> list[list[tuple[float, int, int, float]]]:
        """The best continuations of each text, best first; see `BeamText.take`."""
        batch, k, vocab = log_probs.shape
        if vocab % GROUP:
            log_probs = F.pad(log_probs, (0, -vocab % GROUP), value=-math.inf)
        groups = log_probs.shape[2] // GROUP
        # Even if as many end here as the beam holds, a full beam stays open.
        count = k * (1 + len(self.kind.ends)) if k > 1 else 1
        sums = [[one.log_prob for one in text.open] if text else [0.0] * k for text in self.texts]
        precise = torch.float64 if self.kind.rules is None else torch.float32
        totals = torch.tensor(sums, dtype=precise, device=log_probs.device)
        grouped = log_probs.view(batch, k * groups, GROUP)
        bests = grouped.amax(dim=-1).view(batch, k, groups) + totals[:, :, None]
        chosen = bests.view(batch, -1).topk(min(count, k * groups), dim=1).indices
        rows = chosen // groups
        own = grouped.gather(1, chosen[:, :, None].expand(-1, -1, GROUP))
        within = own + totals.gather(1, rows)[:, :, None]
        values, places = within.flatten(1).topk(min(count, within.shape[1] * GROUP), dim=1)
        require_finite_best(values[:, 0], self.engine, self.texts)
        group = chosen.gather(1, places // GROUP)
        tokens = group % groups * GROUP + places % GROUP
        if self.cache.columns is not None:
            tokens = self.cache.columns.gather(1, tokens)
        columns = values, group // groups, tokens, own.flatten(1).gather(1, places)
        return [
            list(zip(*of_text, strict=True)) for of_text in zip(*(c.tolist() for c in columns), strict=True)
        ]


def _repeating(ids: Sequence[int], before: int) -> list[int]:
    """Tokens with which the last `before` tokens and one more would come a second time."""
    last = ids[len(ids) - before :]
    places = range(len(ids) - before)
    return [ids[place + before] for place in places if ids[place : place + before] == last]
