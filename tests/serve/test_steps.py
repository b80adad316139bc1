"""What fails in a step fails its own request; the others go on with the answers that they have alone."""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from served import Served
from triptych.model import Model
from triptych.running.decoding import generation

OPTIONS = {"max_tokens": 30, "temperature": 1.0, "seed": 5}
PROMPTS = ["The cat sat", "Once upon a time", "A dog", "The end"]
BAD = "bad"


@pytest.fixture
def served(language_model: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server whose steps fail at the ninth token of one prompt."""
    take = generation.Sample.take

    def failing(text: generation.Sample, token: int, log_prob: float, tops: Any) -> bool:
        if len(text.new) == 8 and text.given[:3] == bad:
            raise IndexError("a step failed")
        return take(text, token, log_prob, tops)

    bad = language_model.generator().encode(BAD)
    monkeypatch.setattr(generation.Sample, "take", failing)
    with Served({"gpt": language_model}) as running:
        yield running


def streamed(served: Served, prompt: str, started: threading.Barrier | None = None) -> tuple[str, Any]:
    """The text of a stream, and the error that it ended with."""
    events = served.events("/v1/completions", {"prompt": prompt, "stream": True, **OPTIONS}, started)
    error = next((one["error"] for one in events if "error" in one), None)
    return "".join(one["choices"][0]["text"] for one in events if "choices" in one), error


def test_a_step_that_fails_ends_the_stream_of_its_own_request_alone(
    served: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    alone = {prompt: streamed(served, prompt) for prompt in PROMPTS}
    assert all(error is None for _, error in alone.values())
    asked = [*PROMPTS, BAD, *PROMPTS]
    started = threading.Barrier(len(asked))
    with ThreadPoolExecutor(len(asked)) as pool:
        found = [*pool.map(lambda prompt: streamed(served, prompt, started), asked)]
    for prompt, one in zip(asked, found, strict=True):
        if prompt != BAD:
            assert one == alone[prompt]
        else:
            assert one[1]["message"] == "the server failed; its log says why"
    assert streamed(served, PROMPTS[0]) == alone[PROMPTS[0]]
    assert "a step failed" in capfd.readouterr().err


def slow(cases: Iterable[dict[str, Any]]) -> list[Any]:
    """Mark cases that only `make test-all` runs."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(
    "options",
    [
        *({"top_p": 5e-324}, {"repetition_penalty": 1e300}, {"temperature": 1e-300}, {"top_k": 1 << 70}),
        *({"min_p": 5e-324}, {"seed": 1 << 70}, {"n": 16, "stop": ["a"] * 9}),
        *slow({"top_p": value} for value in (1e-300, 1e-9)),
        *slow({"repetition_penalty": value} for value in (1e-300, 0.01, 100)),
        *slow({"temperature": value} for value in (1e-6, 1e300)),
        *slow({"min_p": value} for value in (1e-300, 1)),
        *slow({"seed": value} for value in (-1, 1e300)),
        *slow([{"top_k": 1}, {"n": 1, "stop": ["a"] * 9}]),
    ],
)
def test_options_at_the_edges_of_their_numbers_are_answered_or_refused_and_end_no_other(
    served: Served, options: dict[str, Any]
) -> None:
    alone = streamed(served, PROMPTS[0])
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(streamed, served, PROMPTS[0])
        fields = {"prompt": "The cat", "max_tokens": 4, "temperature": 1.0, **options}
        assert served.ask("/v1/completions", fields).status in (200, 400)
        assert beside.result() == alone
