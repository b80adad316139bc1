"""Greedy and beam search: against the plainest loop, against every output there is."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decoding.plain_search import plain_search, search
from decoding.test_engine import BOS, EOS, PAD, RULES, SOURCES, pad
from triptych.core.models import EncoderDecoder, ModelConfig
from triptych.running.decoding import Engine, Hypothesis, SearchOptions, length_penalty
from triptych.running.decoding.engine import GROUP
from triptych.running.decoding.search import sentence_text
from triptych.running.decoding.token_loop import Loop
from triptych.running.decoding_options import SamplingOptions

MAX_EXTRA = 6
ALPHAS = (0.0, 0.6, 1.0, 1.5, 2.0, 3.0)


def make_model(vocab_size: int = 24, seed: int = 1, ends_like: float = 1.0) -> EncoderDecoder:
    """An untrained model that is sure of itself: its output is scaled up, as is its end of sentence.

    In float64, so that no two scores are so close that the order of a sum decides between them.
    """
    torch.manual_seed(seed)
    sizes = {"d_model": 16, "d_ff": 32, "num_heads": 2, "tie_embeddings": "none"}
    stacks = {"encoder": {"num_layers": 1}, "decoder": {"num_layers": 2}}
    config = ModelConfig.model_validate({**sizes, **stacks})
    model = EncoderDecoder.of(config, vocab_size, vocab_size, PAD).eval()
    with torch.no_grad():
        model.head.output.weight.mul_(2)
        model.head.output.weight[EOS].mul_(ends_like)
        for block in [*model.encoder.blocks, *model.decoder.blocks]:
            block.self_attention.projections.v_proj.weight.mul_(3)
        for block in model.decoder.blocks:
            block.cross_attention.projections.v_proj.weight.mul_(6)
    return model.double()


def favour(model: EncoderDecoder, tokens: list[int], bonus: float) -> None:
    """Make these tokens likelier at every step."""
    change = torch.zeros(model.tgt_vocab_size).double()
    change[tokens] = bonus
    model.head.output.bias = nn.Parameter(change)


def script(
    model: EncoderDecoder, steps: list[list[dict[int, float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put these probabilities of the next token, one for each row of a step, in the model's place."""
    coming = iter(steps)

    def logits(width: int, num_rows: int) -> Tensor:
        rows = next(coming)
        assert len(rows) == num_rows
        return torch.tensor([[row.get(token, 0.0) for token in range(width)] for row in rows]).log()

    monkeypatch.setattr(model.head, "forward", lambda x: logits(6, len(x)))
    monkeypatch.setattr(Engine, "step", lambda _, tokens, cache: logits(GROUP, len(tokens)))


# With the engine, and step by step through the model's own modules.
WAYS = ("engine", "modules")


def find(model: EncoderDecoder, src: Tensor, way: str = "engine", **options: Any) -> list[list[Hypothesis]]:
    given = SearchOptions(**{"max_extra_tokens": MAX_EXTRA, **options})
    if way == "engine":
        return search(Engine(model, never=(PAD, BOS)), src, given, RULES)
    return plain_search(model, src, given, BOS, EOS)


def next_log_probs(model: EncoderDecoder, source: list[int], prefixes: list[list[int]]) -> Tensor:
    """Of one sentence after outputs of one length, from the start, without a cache."""
    tgt_in = torch.tensor([[BOS, *ids] for ids in prefixes])
    with torch.no_grad():
        logits = model(torch.tensor([[*source, EOS]] * len(prefixes)), tgt_in)[:, -1]
    logits[:, [PAD, BOS]] = -torch.inf
    return logits.log_softmax(dim=-1)


def log_prob_of(model: EncoderDecoder, source: list[int], ids: tuple[int, ...]) -> float:
    """By teacher forcing, the end of sentence included."""
    with torch.no_grad():
        logits = model(torch.tensor([[*source, EOS]]), torch.tensor([[BOS, *ids]]))[0]
    logits[:, [PAD, BOS]] = -torch.inf
    log_p = logits.log_softmax(dim=-1)
    return sum(float(log_p[i, token]) for i, token in enumerate([*ids, EOS]))


def greedy(model: EncoderDecoder, source: list[int]) -> tuple[int, ...]:
    ids: list[int] = []
    while len(ids) < len(source) + MAX_EXTRA:
        best = int(next_log_probs(model, source, [ids]).argmax())
        if best == EOS:
            break
        ids.append(best)
    return tuple(ids)


def beam_search(
    model: EncoderDecoder, source: list[int], beam_size: int
) -> list[tuple[tuple[int, ...], float]]:
    """Beam search by the book, on to the limit, whatever has ended by then: outputs and log-probabilities."""
    limit = len(source) + MAX_EXTRA
    beam: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[tuple[tuple[int, ...], float]] = []
    for length in range(1, limit + 2):
        candidates = []
        of_next = next_log_probs(model, source, [ids for ids, _ in beam]).tolist()
        for (ids, log_prob), log_p in zip(beam, of_next, strict=True):
            tokens = [EOS] if length > limit else range(EOS, len(log_p))
            candidates += [(ids, token, log_prob + log_p[token]) for token in tokens]
        candidates.sort(key=lambda candidate: -candidate[2])
        for ids, token, log_prob in candidates[:beam_size]:
            if token == EOS:
                finished.append((tuple(ids), log_prob))
        beam = [([*ids, token], log_prob) for ids, token, log_prob in candidates if token != EOS][:beam_size]
    return finished


def by_score(
    finished: list[tuple[tuple[int, ...], float]], alpha: float
) -> list[tuple[tuple[int, ...], float]]:
    """Outputs with their scores, best first."""
    scored = [(ids, log_prob / length_penalty(len(ids) + 1, alpha)) for ids, log_prob in finished]
    return sorted(scored, key=lambda found: -found[1])


@pytest.mark.parametrize("end_bonus", [0.0, 2.0])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))])
@pytest.mark.parametrize("way", WAYS)
def test_a_beam_of_one_is_the_step_by_step_argmax(way: str, seed: int, end_bonus: float) -> None:
    model = make_model(seed=seed)
    favour(model, [EOS], end_bonus)
    expected = [greedy(model, source) for source in SOURCES]
    assert end_bonus or len(set(map(len, expected))) > 1
    found = find(model, pad(SOURCES), way, beam_size=1)
    assert [best[0].ids for best in found] == expected


@pytest.mark.parametrize("way", WAYS)
def test_a_beam_of_one_ends_where_the_argmax_does_though_going_on_would_score_higher(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(vocab_size=6)
    # The end is the likeliest by a little; after the other token everything is certain.
    certain = {5: 1.0}
    script(model, [[{EOS: 0.51, 5: 0.49}], *[[certain]] * 5, *[[{EOS: 1.0}]] * 9], monkeypatch)
    ((best,),) = find(model, pad([[4]]), way, beam_size=1, alpha=1.0)
    assert best.ids == ()


@pytest.mark.parametrize("way", WAYS)
def test_an_output_that_ends_gives_its_place_in_the_beam_to_the_next(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(vocab_size=6)
    # The third best first token, in by the end of the best output, is the one that ends well.
    first = {EOS: 0.5, 3: 0.3, 4: 0.2}
    after_3, after_4 = {3: 0.4, 4: 0.3, 5: 0.3}, {EOS: 1.0}
    script(model, [[first, first], [after_3, after_4]], monkeypatch)
    (found,) = find(model, pad([[4]]), way, beam_size=2, num_best=2, alpha=0.0)
    assert [h.ids for h in found] == [(), (4,)]
    assert [h.log_prob for h in found] == pytest.approx([math.log(0.5), math.log(0.2)], abs=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_a_beam_larger_than_the_search_space_finds_every_output_once_and_in_order(
    seed: int, alpha: float
) -> None:
    model, source = make_model(vocab_size=6, seed=seed), [4]
    # At most 1 + 2 tokens of the three that are words: 1 + 3 + 9 + 27 outputs.
    outputs = [ids for length in range(4) for ids in itertools.product([3, 4, 5], repeat=length)]
    log_probs = {ids: log_prob_of(model, source, ids) for ids in outputs}
    scores = {ids: total / length_penalty(len(ids) + 1, alpha) for ids, total in log_probs.items()}
    options = {"beam_size": 60, "alpha": alpha, "max_extra_tokens": 2}
    (every,) = find(model, pad([source]), num_best=60, **options)
    assert len(every) == len(outputs)
    assert {h.ids: h.log_prob for h in every} == pytest.approx(log_probs, abs=1e-4)
    assert {h.ids: h.score for h in every} == pytest.approx(scores, abs=1e-5)
    assert [h.score for h in every] == sorted((h.score for h in every), reverse=True)
    ((best,),) = find(model, pad([source]), num_best=1, **options)
    assert best.ids == max(outputs, key=lambda ids: scores[ids])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("beam_size", [2, 4])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
@pytest.mark.parametrize("way", WAYS)
def test_the_beams_are_those_of_beam_search_by_the_book(way: str, seed: int, beam_size: int) -> None:
    model = make_model(seed=seed, vocab_size=15)
    favour(model, [EOS], 1.5)  # so that several of a beam end at once
    # What is pruned does not depend on alpha, so one search by the book serves all.
    finished = [beam_search(model, source, beam_size) for source in SOURCES]
    # The search stops early, but only when nothing can change.
    for alpha, num_best in itertools.product(ALPHAS, (1, beam_size)):
        found = find(model, pad(SOURCES), way, num_best=num_best, beam_size=beam_size, alpha=alpha)
        for best, outputs in zip(found, finished, strict=True):
            expected = by_score(outputs, alpha)[:num_best]
            assert [h.ids for h in best] == [ids for ids, _ in expected]
            assert [h.score for h in best] == pytest.approx([score for _, score in expected], abs=1e-5)


@pytest.mark.parametrize("beam_size", [1, 3])
@pytest.mark.parametrize(("penalty", "size"), [(1.4, None), (1.0, 2), (1.2, 1), (0.7, 3)])
def test_penalty_and_rule_on_repetitions_are_those_of_transformers(
    beam_size: int, penalty: float, size: int | None
) -> None:
    pytest.importorskip("transformers")
    model = make_model(ends_like=0.5)
    beam = {"beam_size": beam_size, "num_best": beam_size}
    given = {"no_repeat_ngram_size": size, "sampling": SamplingOptions(repetition_penalty=penalty)}
    fast, slow = (find(model, pad(SOURCES), way, **beam, **given) for way in WAYS)
    free = find(model, pad(SOURCES), **beam)
    assert [[one.ids for one in found] for found in fast] == [[one.ids for one in found] for found in slow]
    assert [[one.ids for one in found] for found in fast] != [[one.ids for one in found] for found in free]
    for source, found, same in zip(SOURCES, fast, slow, strict=True):
        for one, other in zip(found, same, strict=True):
            assert one.score == pytest.approx(other.score, rel=1e-5)
            assert one.log_prob == pytest.approx(log_prob_of(model, source, one.ids), rel=1e-5)


def test_an_output_tells_if_the_limit_ended_it() -> None:
    endless = make_model()
    favour(endless, [EOS], -50.0)
    for beam_size in (1, 3):
        for (found,) in find(endless, pad(SOURCES), beam_size=beam_size):
            assert (found.finish, len(found.ids) > MAX_EXTRA) == ("length", True)
    model = make_model()
    favour(model, [EOS], 1e4)
    assert [found[0].finish for found in find(model, pad(SOURCES))] == ["token"] * len(SOURCES)


def test_an_output_that_ends_by_itself_at_the_limit_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for end, finish in ((0.6, "token"), (0.3, "length")):
        model = make_model()
        script(model, [[{3: 0.9, EOS: 0.1}], [{3: 1 - end, EOS: end}]], monkeypatch)
        # The source is empty, and its output may have one token.
        (found,) = find(model, torch.tensor([[EOS]]), beam_size=1, max_extra_tokens=1)
        assert (found[0].ids, found[0].finish) == ((3,), finish)


def even_chance(limit: int, alpha: float) -> float:
    """Probability at which the empty output scores as much as all else, ended after `limit` tokens."""
    low, high = 0.0, 1.0
    for _ in range(100):
        q = (low + high) / 2
        low, high = (q, high) if math.log(q) < math.log1p(-q) / length_penalty(limit + 1, alpha) else (low, q)
    return low


def never_surprised(q: float, limit: int, rows: int, width: int) -> tuple[Callable[..., Tensor], list[int]]:
    """A model that ends at once with probability q, and else goes on to the limit in certainty.

    Returns:
        What gives the logits of the next step, and the numbers of the steps asked for.
    """
    steps: list[int] = []

    def logits(*of_step: object) -> Tensor:
        steps.append(len(steps))
        p = torch.zeros(rows, width, dtype=torch.float64)
        if len(steps) == 1:
            p[:, EOS], p[:, 5] = q, 1 - q
        else:
            p[:, EOS if len(steps) > limit else 5] = 1.0
        return p.log()

    return logits, steps


@pytest.mark.parametrize("searched", ["by modules", "by engine"])
@pytest.mark.parametrize("alpha", ALPHAS[1:])
def test_a_search_goes_on_while_the_longest_output_may_win_and_no_further(
    alpha: float, searched: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 1 + MAX_EXTRA
    # Between two bounds that differ by a token: the open hypothesis wins by less than one token's penalty, or
    # loses by less.
    bounds = [even_chance(length, alpha) for length in (limit - 1, limit, limit + 1)]
    wins, loses = ((bounds[i] + bounds[i + 1]) / 2 for i in (0, 1))
    for q, length, num_steps in ((wins, limit, limit + 1), (loses, 0, 1)):
        model, options = make_model(vocab_size=6), SearchOptions(2, alpha, MAX_EXTRA)
        if searched == "by modules":
            logits, steps = never_surprised(q, limit, 2, 6)
            monkeypatch.setattr(model.head, "forward", logits)
            ((best,),) = plain_search(model, pad([[4]]), options, BOS, EOS)
        else:
            engine = Engine(model, never=(PAD, BOS))
            logits, steps = never_surprised(q, limit, 2, GROUP)
            monkeypatch.setattr(engine, "step", logits)
            ((best,),) = search(engine, pad([[4]]), options, RULES)
        assert (len(best.ids), len(steps)) == (length, num_steps)


@pytest.mark.parametrize("beam_size", [1, 2])
def test_texts_that_nobody_waits_for_end_between_steps_and_the_next_are_as_if_alone(beam_size: int) -> None:
    model = make_model()
    engine, options = Engine(model, never=(PAD, BOS)), SearchOptions(beam_size=beam_size, alpha=0.6)
    given_up, next_one = (sentence_text(engine, [ids, EOS], options, RULES) for ids in (4, 5))
    loop = Loop(engine)
    loop.waiting.append(given_up)
    assert loop.step()
    given_up.is_over = True
    assert not loop.step()
    loop.run([next_one])
    ((alone,),) = search(engine, pad([[5]]), options, RULES)
    assert next_one.best[0] == alone


@pytest.mark.parametrize("beam_size", [1, 3])
def test_a_model_that_never_ends_is_ended_at_the_limit(beam_size: int) -> None:
    model = make_model()
    favour(model, [EOS], -50.0)
    found = find(model, pad(SOURCES), beam_size=beam_size, num_best=beam_size)
    for source, best in zip(SOURCES, found, strict=True):
        assert [len(h.ids) for h in best] == [len(source) + MAX_EXTRA] * beam_size
        assert all(h.log_prob < -40 for h in best)  # the end was paid for


@pytest.mark.parametrize("beam_size", [1, 4])
def test_padding_and_the_beginning_are_never_put_out(beam_size: int) -> None:
    model = make_model()
    favour(model, [PAD, BOS], 50.0)
    for best in find(model, pad(SOURCES), beam_size=beam_size, num_best=beam_size):
        for hypothesis in best:
            assert not {PAD, BOS, EOS} & set(hypothesis.ids)


@pytest.mark.parametrize(
    ("length", "alpha", "penalty"), [(1, 0.6, 1.0), (7, 1.0, 2.0), (19, 0.5, 2.0), (30, 0.0, 1.0)]
)
def test_the_length_penalty_is_wus_formula(length: int, alpha: float, penalty: float) -> None:
    assert length_penalty(length, alpha) == pytest.approx(penalty, rel=1e-12)


def test_a_search_leaves_no_graph_behind_and_no_gradient_on() -> None:
    model = make_model()
    find(model, pad(SOURCES))
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_size": 0}, "beam_size is 0: it must be at least 1"),
        ({"beam_size": 2, "num_best": 3}, r"num_best is 3: it must be between 1 and beam_size \(2\)"),
        ({"num_best": 0}, "num_best is 0"),
        ({"beam_size": 10**6}, "beam_size is 1000000: .* at most 10,000"),
        ({"alpha": -0.1}, "alpha is -0.1: it must be at least 0"),
        ({"alpha": 1000.0}, "alpha is 1000.0: .* at most 10"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"max_extra_tokens": 0}, "max_extra_tokens is 0: it must be at least 1"),
        ({"max_extra_tokens": 10**20}, "max_extra_tokens is 10+: .* at most 1,000,000,000"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SearchOptions(**options)


def test_the_options_left_out_are_the_papers() -> None:
    options = SearchOptions()
    assert (options.beam_size, options.alpha, options.max_extra_tokens) == (4, 0.6, 50)
