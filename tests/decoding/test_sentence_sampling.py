"""Drawn translations: token by token as by the processors of transformers, with the model's probabilities."""

from dataclasses import replace

import pytest
import torch

from decoding.test_engine import BOS, EOS, PAD, RULES, SOURCES
from decoding.test_search import log_prob_of, make_model
from triptych.core.models import EncoderDecoder
from triptych.errors import UsageError
from triptych.running.decoding import Hypothesis, SearchOptions
from triptych.running.decoding.sampling import RowState, draw
from triptych.running.decoding.sentence_decoder import SentenceDecoder
from triptych.running.decoding_options import SamplingOptions
from triptych.running.text.shortlists import Shortlist

SAMPLING = SamplingOptions(temperature=1.3, top_k=9, top_p=0.95, min_p=0.02, repetition_penalty=1.3)
OPTIONS = SearchOptions(
    beam_size=1, num_best=3, max_extra_tokens=6, no_repeat_ngram_size=2, sampling=SAMPLING
)


def drawn(model: EncoderDecoder, options: SearchOptions) -> list[list[Hypothesis]]:
    return SentenceDecoder([model], EOS, RULES, options).decode(SOURCES)


def by_transformers(model: EncoderDecoder, source: list[int], sample: int) -> tuple[int, ...]:
    """Draw a translation through the model's own modules and the processors of transformers."""
    from transformers import generation

    processors = [
        generation.RepetitionPenaltyLogitsProcessor(SAMPLING.repetition_penalty),
        generation.NoRepeatNGramLogitsProcessor(OPTIONS.no_repeat_ngram_size),
        generation.TemperatureLogitsWarper(SAMPLING.temperature),
        generation.TopKLogitsWarper(SAMPLING.top_k),
        generation.TopPLogitsWarper(SAMPLING.top_p),
        generation.MinPLogitsWarper(SAMPLING.min_p),
    ]
    numbers = RowState(OPTIONS.seed, sample, ()).numbers
    ids = [BOS]
    while len(ids) <= len(source) + OPTIONS.max_extra_tokens:
        with torch.no_grad():
            logits = model(torch.tensor([[*source, EOS]]), torch.tensor([ids]))[:, -1]
        logits[:, [PAD, BOS]] = -torch.inf
        for processor in processors:
            logits = processor(torch.tensor([ids]), logits)
        token = int(draw(logits, torch.tensor([numbers.getrandbits(32) / 2**32], dtype=torch.float64)))
        if token == EOS:
            break
        ids.append(token)
    return tuple(ids[1:])


def test_draws_are_those_of_the_processors_of_transformers() -> None:
    pytest.importorskip("transformers")
    model = make_model()
    for source, found in zip(SOURCES, drawn(model, OPTIONS), strict=True):
        slow = [by_transformers(model, source, sample) for sample in range(3)]
        assert sorted(one.ids for one in found) == sorted(slow)
        assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
        for one in found:
            at_limit = len(one.ids) == len(source) + OPTIONS.max_extra_tokens
            assert one.log_prob == pytest.approx(log_prob_of(model, source, one.ids), rel=1e-4)
            assert one.finish == "token" or at_limit


def test_the_same_seed_draws_the_same_whatever_the_other_sentences_are() -> None:
    model = make_model()
    options = replace(OPTIONS, sampling=SamplingOptions(temperature=2.0))
    together = drawn(model, options)
    alone = [SentenceDecoder([model], EOS, RULES, options).decode([source])[0] for source in SOURCES]
    ids = [[[one.ids for one in found] for found in way] for way in (together, alone)]
    assert ids[0] == ids[1]
    assert together != drawn(model, replace(options, seed=1))


def test_first_tokens_have_the_probabilities_of_the_model() -> None:
    model = make_model()
    sampling = SamplingOptions(temperature=1.0)
    options = SearchOptions(beam_size=1, num_best=2000, max_extra_tokens=1, sampling=sampling)
    with torch.no_grad():
        logits = model(torch.tensor([[*SOURCES[0], EOS]]), torch.tensor([[BOS]]))[0, -1]
    logits[[PAD, BOS]] = -torch.inf
    expected = logits.softmax(dim=-1)
    (found,) = SentenceDecoder([model], EOS, RULES, options).decode(SOURCES[:1])
    counts = torch.zeros(model.tgt_vocab_size)
    for one in found:
        counts[one.ids[0] if one.ids else EOS] += 1
    assert (counts / 2000 - expected).abs().max() < 0.05


def test_what_does_not_go_with_a_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="beam_size is 4, and a temperature draws"):
        SearchOptions(beam_size=4, sampling=SAMPLING)
    shortlist = Shortlist(range(24), {})
    decoder = SentenceDecoder([make_model()], EOS, RULES, OPTIONS, shortlist=shortlist)
    with pytest.raises(UsageError, match="runs without a shortlist"):
        decoder.decode(SOURCES)
