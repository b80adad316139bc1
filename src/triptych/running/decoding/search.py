"""Greedy and beam search, in few tensor operations for each step.

The score of a hypothesis is its log-probability over the length penalty,

    log P(Y | X) / lp(Y)        lp(Y) = ((5 + |Y|) / 6)^α

where |Y| is the number of tokens including the end of sentence. Source: Wu et al. 2016, arXiv 1609.08144,
section 7; Vaswani et al. 2017, section 6.1, for the limit on length.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from triptych import thresholds
from triptych.errors import UsageError
from triptych.running.decoding.engine import GROUP, DecodingEngine
from triptych.running.decoding.glossary import Terms
from triptych.running.decoding.hypotheses import (
    Finish,
    Hypothesis,
    best_first,
    length_penalty,
    limit_of,
)
from triptych.running.decoding.sampling import penalise_repeats
from triptych.running.decoding.token_loop import (
    DecodingBatch,
    Read,
    Text,
    require_finite_best,
)
from triptych.running.decoding_options import SearchOptions
from triptych.running.text.tokenizers import OutputRules


def enough_finished(options: SearchOptions) -> float:
    """Return the number of finished hypotheses at which a search ends whatever the open hypotheses."""
    if options.beam_size == 1:
        return 1.0  # greedy search ends when the most probable token is the end
    return float(options.beam_size) if options.stop == "full" else math.inf


@dataclass(frozen=True)
class BeamKind:
    """Common search options of the beams of a batch."""

    size: int  # hypotheses kept at every step; 1 is greedy
    alpha: float  # exponent of the length penalty
    ends: tuple[int, ...]  # end tokens
    enough: float  # number of finished hypotheses at which a search ends
    # rank of the finished hypothesis that open hypotheses must be able to overtake; None to use only `enough`
    wanted: int | None = None
    rules: OutputRules | None = None  # rules of a translator's output
    closed: int | None = None  # length of the texts, if a batch may not mix lengths
    penalty: float = 1.0  # `SamplingOptions.repetition_penalty`


_NOTHING = Hypothesis((), -math.inf)


@final
class BeamText(Text):
    """A text in a beam search, with its open and finished hypotheses."""

    kind: BeamKind

    def __init__(
        self,
        given: Sequence[int],
        kind: BeamKind,
        limit: int,
        terms: Terms | None = None,
        at_limit: Finish = "token",
    ) -> None:
        """Start; `limit` is the maximum length of an output, which with `rules` ends in an end token."""
        self.given = given
        self.kind = kind
        self.limit = limit
        self.terms = terms
        self._at_limit = at_limit
        self.num_rows, self.size = kind.size, len(given) + (0 if kind.rules else limit)
        # All rows of a text start equal, so only the first row is continued; otherwise all would stay equal.
        self.open = [Hypothesis((), 0.0), *[_NOTHING] * (kind.size - 1)]
        self.ended: list[Hypothesis] = []
        self.cut_rows: Collection[
            int
        ] = ()  # rows that the limit ends, and not the model
        # Divisor for an upper bound of an open hypothesis's score: the log-probability is at most 0 and only
        # falls, and the length penalty is largest at the maximum length.
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
        """Length of the open hypotheses in tokens."""
        return len(self.open[0].ids)

    @property
    def best(self) -> list[Hypothesis]:
        """Finished hypotheses by falling score."""
        return best_first(self.ended)

    def batch(self, engine: Any) -> "Beams":
        return Beams(engine, self.kind)

    def take(
        self, candidates: Sequence[tuple[float, int, int, float]]
    ) -> list[tuple[int, int]]:
        """Continue with the best candidates: totals, rows, tokens and log-probabilities by falling total.

        Returns the parent row and the token of each row.
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
                self._close(
                    before.ids,
                    total,
                    log_probs,
                    "length" if parent in self.cut_rows else "token",
                )
        # At the limit, open hypotheses count as finished unless the rules require an end token.
        if (
            open_
            and length == self.limit
            and kind.rules is None
            and len(self.ended) < kind.enough
        ):
            for one in open_:
                self._close(one.ids, one.log_prob, one.log_probs, self._at_limit)
            open_ = []
        self.is_over = (
            not open_
            or len(self.ended) >= kind.enough
            or self._is_certain(open_[0].log_prob)
        )
        self.open = [*open_, *[_NOTHING] * (kind.size - len(open_))]
        return [*going, *[(0, 0)] * (kind.size - len(going))]

    def _close(
        self,
        ids: tuple[int, ...],
        total: float,
        log_probs: tuple[float, ...],
        finish: Finish,
    ) -> None:
        score = total / length_penalty(len(log_probs), self.kind.alpha)
        # A penalty changes the score of the search, and not the model's probability.
        log_prob = total if self.kind.penalty == 1 else math.fsum(log_probs)
        self.ended.append(Hypothesis(ids, log_prob, score, log_probs, finish))

    def _is_certain(self, best_open: float) -> bool:
        """Return True if open hypotheses cannot overtake the finished hypothesis of rank `wanted`."""
        wanted = self.kind.wanted
        if wanted is None or len(self.ended) < wanted:
            return False
        return self.best[wanted - 1].score >= best_open / self.kindest


def rules_of(options: SearchOptions, rules: OutputRules) -> OutputRules:
    """Return the rules of an output, with `no_repeat_ngram_size` of the options if set."""
    size = options.no_repeat_ngram_size
    return rules if size is None else replace(rules, no_repeat=size)


def limit_of_sentence(
    engine: DecodingEngine,
    ids: Sequence[int],
    options: SearchOptions,
    rules: OutputRules,
) -> int:
    """Return the maximum length of the output of a sentence, token ids with the end of sentence."""
    most = engine.max_tokens
    if (
        most is not None
    ):  # start tokens take positions, too; `limit_of` counts only the first
        most -= len(rules.start) - 1
    return limit_of(len(ids) - 1, options.max_extra_tokens, most)


def read_sources(
    engine: DecodingEngine,
    given: Sequence[Sequence[int]],
    width: int,
    start: Sequence[int],
) -> tuple[Any, Tensor]:
    """Read sentences and output prefixes; return cache and logits with `width` rows per sentence."""
    rows = [torch.tensor(ids, device=engine.device) for ids in given]
    src = torch.nn.utils.rnn.pad_sequence(
        rows, batch_first=True, padding_value=engine.pad_id
    )
    cache = engine.start(src, width)
    for token in start:
        logits = engine.step(
            torch.full((len(given) * width,), token, device=src.device), cache
        )
    return cache, logits


def sentence_text(
    engine: DecodingEngine,
    ids: Sequence[int],
    options: SearchOptions,
    rules: OutputRules,
    terms: Terms | None = None,
) -> BeamText:
    """Build the beam search of a sentence, token ids with the end of sentence, for a `Loop`."""
    size = options.beam_size
    enough = enough_finished(options)
    # Hypotheses with early terms would finish first, so the number of finished hypotheses must not end the
    # search.
    if terms is not None:
        size = size + terms.num_tokens
        enough = math.inf
    penalty = options.sampling.repetition_penalty
    rules = rules_of(options, rules)
    kind = BeamKind(
        size,
        options.alpha,
        (rules.end,),
        enough,
        options.num_best,
        rules,
        penalty=penalty,
    )
    limit = limit_of_sentence(engine, ids, options, rules)
    if terms is not None and terms.num_tokens > limit:
        raise UsageError(
            f"glossary: the terms of a sentence need {terms.num_tokens} tokens, and its translation may have "
            f"{limit}: leave out some, or raise max_extra_tokens"
        )
    return BeamText(ids, kind, limit, terms)


@final
class Beams(DecodingBatch[BeamText]):
    """Batch of beam searches, with `size` rows for each text."""

    kind: BeamKind
    rows_apart = thresholds.ROWS_APART

    def __init__(self, engine: Any, kind: BeamKind) -> None:
        super().__init__(
            engine, kind, kind.size, joins=engine.joins and kind.closed is None
        )

    def open(self, texts: Sequence[BeamText]) -> tuple[Any, Tensor]:
        given = [text.given for text in texts]
        k = self.kind.size
        if self.kind.rules is None:
            cache, logits = self.engine.read(given)
            return cache.of_copies(k), logits.repeat_interleave(k, dim=0)
        return read_sources(self.engine, given, k, self.kind.rules.start)

    def choose(self) -> list[BeamText]:
        k = self.kind.size
        texts = self.texts
        of_model = self.logits.log_softmax(dim=-1)[:, : self.engine.num_choices].view(
            len(texts), k, -1
        )
        log_probs = (
            of_model if self.kind.penalty == 1 else self._penalised(self.kind.penalty)
        )
        if self.kind.rules is not None:
            self._obey(log_probs, self.kind.rules)
        # Finished texts stay in the batch for a while: their rows continue themselves with token 0.
        stays = [(row, 0) for row in range(k)]
        best = self._best(log_probs)
        for place in self.open_places:
            text = texts[place]
            if text is not None and text.terms is not None:
                beam = [(one.ids, one.log_prob) for one in text.open]
                best[place] = text.terms.best(log_probs[place], beam, self.kind.ends[0])
            if log_probs is not of_model:
                best[place] = [
                    (*one[:3], float(of_model[place, one[1], one[2]]))
                    for one in best[place]
                ]
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

    def _penalised(self, penalty: float) -> Float[Tensor, "texts beam vocab"]:
        """Return log-probabilities after the repetition penalty on the logits."""
        rules = self.kind.rules
        start = () if rules is None else rules.start
        logits = self.logits[:, : self.engine.num_choices]
        seen = torch.zeros_like(logits, dtype=torch.bool)
        for place in self.open_places:
            text = self.texts[place]
            assert text is not None
            for row, one in enumerate(text.open):
                seen[place * self.kind.size + row, [*start, *one.ids]] = True
        penalised = penalise_repeats(logits, seen, penalty)
        return penalised.log_softmax(dim=-1).view(len(self.texts), self.kind.size, -1)

    def _obey(
        self, log_probs: Float[Tensor, "texts beam vocab"], rules: OutputRules
    ) -> None:
        """Set log-probabilities of forbidden next tokens to −inf."""
        end = rules.end if self.cache.columns is None else 0
        for place in self.open_places:
            text = self.texts[place]
            own = log_probs[place]
            assert text is not None
            length = len(rules.start) + text.length
            of_end = None
            if text.length >= text.limit:
                of_end = own[:, end].clone()
                text.cut_rows = (of_end < own.amax(dim=1)).nonzero()[:, 0].tolist()
            if length < rules.min_length:
                own[:, end] = -torch.inf
            if 0 < rules.no_repeat <= length:
                for row, one in enumerate(text.open):
                    repeating = {
                        *_repeating([*rules.start, *one.ids], rules.no_repeat - 1)
                    }
                    own[
                        row, [*repeating - (text.terms.tokens if text.terms else set())]
                    ] = -torch.inf
            # At the limit, only the end token remains, even if it was forbidden above.
            if of_end is not None:
                own.fill_(-torch.inf)
                own[:, end] = of_end

    def _best(
        self, log_probs: Float[Tensor, "texts beam vocab"]
    ) -> list[list[tuple[float, int, int, float]]]:
        """Return the best continuations of each text by falling total; see `BeamText.take`."""
        batch, k, vocab = log_probs.shape
        if vocab % GROUP:
            log_probs = F.pad(log_probs, (0, -vocab % GROUP), value=-math.inf)
        groups = log_probs.shape[2] // GROUP
        # Enough candidates for a full open beam, even if every row also ends with every end token.
        count = k * (1 + len(self.kind.ends)) if k > 1 else 1
        sums = [
            [one.log_prob for one in text.open] if text else [0.0] * k
            for text in self.texts
        ]
        precise = torch.float64 if self.kind.rules is None else torch.float32
        totals = torch.tensor(sums, dtype=precise, device=log_probs.device)
        # The `count` best candidates lie within the `count` groups with the largest maxima.
        grouped = log_probs.view(batch, k * groups, GROUP)
        bests = grouped.amax(dim=-1).view(batch, k, groups) + totals[:, :, None]
        chosen = bests.view(batch, -1).topk(min(count, k * groups), dim=1).indices
        rows = chosen // groups
        own = grouped.gather(1, chosen[:, :, None].expand(-1, -1, GROUP))
        within = own + totals.gather(1, rows)[:, :, None]
        values, places = within.flatten(1).topk(
            min(count, within.shape[1] * GROUP), dim=1
        )
        require_finite_best(values[:, 0], self.engine, self.texts)
        group = chosen.gather(1, places // GROUP)
        tokens = group % groups * GROUP + places % GROUP
        if self.cache.columns is not None:
            tokens = self.cache.columns.gather(1, tokens)
        columns = values, group // groups, tokens, own.flatten(1).gather(1, places)
        return [
            list(zip(*of_text, strict=True))
            for of_text in zip(*(c.tolist() for c in columns), strict=True)
        ]


def _repeating(ids: Sequence[int], before: int) -> list[int]:
    """Return tokens that would repeat an n-gram of `before + 1` tokens."""
    last = ids[len(ids) - before :]
    places = range(len(ids) - before)
    return [
        ids[place + before] for place in places if ids[place : place + before] == last
    ]
