"""Workers: the same translations as without them, in the same order, whatever happens to them."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from triptych.core.models import EncoderDecoder, ModelConfig
from triptych.running.decoding import Hypothesis, SearchOptions, Translator
from triptych.running.decoding.decoder import Hypotheses
from triptych.running.decoding.sentence_decoder import SentenceDecoder
from triptych.running.decoding.workers import Searcher, Sentences, WorkerPool
from triptych.training.corpora.tokenizer_training import TokenizerSpec, train_tokenizers

LINES = [f"{'Der Hund schläft. ' * (1 + i % 4)}Zeile {i}" for i in range(260)]
LINES[7] = ""


@pytest.fixture(scope="module")
def translator() -> Iterator[Translator]:
    torch.manual_seed(1)
    tokenizers = train_tokenizers(TokenizerSpec(vocab_size=300, joint=True), LINES, LINES)
    sizes = {"d_model": 16, "d_ff": 32, "num_heads": 2, "max_source_tokens": 64}
    stacks = {"encoder": {"num_layers": 1}, "decoder": {"num_layers": 1}}
    config = ModelConfig.model_validate({**sizes, **stacks})
    size = tokenizers.source.vocab_size
    model = EncoderDecoder.of(config, size, size).eval()
    options = SearchOptions(beam_size=2, max_extra_tokens=2)
    with Translator(model, tokenizers, options, batch_tokens=400, workers=2) as made:
        yield made


def alone(translator: Translator) -> Translator:
    return Translator(translator.model, translator.tokenizers, translator.options, translator.batch_tokens)


def decoder_of(translator: Translator) -> SentenceDecoder:
    assert isinstance(translator.decoder, SentenceDecoder)
    return translator.decoder


def groups() -> Iterator[list[str]]:
    for start in range(0, len(LINES), 50):
        yield LINES[start : start + 50]


def test_two_workers_translate_as_one_does_and_in_order(translator: Translator) -> None:
    translator.start_workers()
    together = list(translator.translate_stream(groups()))
    expected = list(alone(translator).translate_stream(groups()))
    assert [one.source for one in together] == LINES
    assert [one.text for one in together] == [one.text for one in expected]


def test_the_workers_are_given_batches(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    translator.start_workers()
    pool, here = decoder_of(translator)._ready_pool(), list[Sentences]()
    own = pool._make_searcher(*pool._arguments)

    def noted(sentences: Sentences) -> Hypotheses:
        here.append(sentences)
        return own(sentences)

    monkeypatch.setattr(pool, "_own", noted)
    list(translator.translate_stream([LINES]))
    sentences = [translator.tokenizers.source.encode([line])[0] for line in LINES]
    everywhere = len(list(decoder_of(translator).batches(sentences)))
    # Two at once before this process takes one, and more as they come back.
    assert 1 <= len(here) <= everywhere - 2


def test_workers_are_started_when_there_is_enough_to_do(
    translator: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr(WorkerPool, "start", lambda _, count: started.append(count))
    three = Translator(translator.model, translator.tokenizers, translator.options, workers=3)
    assert len(list(three.translate_stream([LINES[:3]]))) == 3
    assert started == []
    assert len(list(three.translate_stream([LINES]))) == len(LINES)
    assert set(started) == {2}
    three.close()


@pytest.mark.slow
def test_changed_weights_reach_the_workers(translator: Translator) -> None:
    translator.start_workers()
    before = [one.text for one in translator.translate(LINES)]
    with torch.no_grad():
        translator.model.decoder.blocks[0].feed_forward.outer.weight.neg_()
    translator.start_workers()
    after = [one.text for one in translator.translate(LINES)]
    assert after != before
    assert after == [one.text for one in alone(translator).translate(LINES)]


def test_a_worker_that_is_killed_is_made_up_for(translator: Translator) -> None:
    translator.start_workers()
    pool = decoder_of(translator)._pool
    assert pool is not None
    assert [worker.ready for worker in pool._workers] == [True]  # besides this process
    stream = translator.translate_stream(groups())
    first = next(stream)
    for worker in pool._workers:
        assert worker.helper.process.pid is not None
        os.kill(worker.helper.process.pid, signal.SIGKILL)
    texts = [first.text, *(one.text for one in stream)]
    assert texts == [one.text for one in alone(translator).translate(LINES)]
    translator.close()


@pytest.mark.slow
def test_a_stream_left_early_leaves_no_process(translator: Translator) -> None:
    translator.start_workers()
    pool = decoder_of(translator)._pool
    assert pool is not None
    processes = [worker.helper.process for worker in pool._workers]
    stream = translator.translate_stream(groups())
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 10
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(process.is_alive() for process in processes)


def test_a_line_is_translated_before_the_next_one_is_there(translator: Translator) -> None:
    told = threading.Event()

    def slowly() -> Iterator[list[str]]:
        yield [LINES[0]]
        assert told.wait(timeout=30)
        yield [LINES[1]]

    stream = translator.translate_stream(slowly())
    assert next(stream).source == LINES[0]
    told.set()
    assert next(stream).source == LINES[1]


def test_an_error_in_the_input_comes_after_the_lines_before_it(translator: Translator) -> None:
    def broken() -> Iterator[list[str]]:
        yield LINES[:3]
        raise OSError("gone")

    stream = translator.translate_stream(broken())
    assert [next(stream).source for _ in range(3)] == LINES[:3]
    with pytest.raises(OSError, match="gone"):
        next(stream)


def make_echo(length: int) -> Searcher:
    def echo(sentences: Sentences) -> Hypotheses:
        if any(len(ids) == length for ids in sentences):
            raise RuntimeError("too long")
        return [[Hypothesis(tuple(ids), 0.0, 0.0)] for ids in sentences]

    return echo


def test_an_error_in_a_worker_is_raised_here() -> None:
    pool = WorkerPool(make_echo, (3,))
    pool.start(1)
    pool.wait_until_ready()
    try:
        for key in range(4):
            pool.submit(key, [[1, 2, 3]])
        with pytest.raises(RuntimeError, match="too long"):
            take_all(pool)
    finally:
        pool.close()


def take_all(pool: WorkerPool) -> None:
    while pool.busy:
        pool.next()


@pytest.mark.parametrize("helpers", [0, 1])
def test_everything_asked_for_comes_back_once(helpers: int) -> None:
    pool = WorkerPool(make_echo, (99,))
    pool.start(helpers)
    pool.wait_until_ready()
    try:
        for key in range(50):
            pool.submit(key, [[key]])
        found: dict[int, Callable[..., object] | object] = {}
        while pool.busy:
            key, results = pool.next()
            assert key not in found
            found[key] = results[0][0].ids
        assert found == {key: (key,) for key in range(50)}
    finally:
        pool.close()
