"""One set of limits for all endpoints, and work that stops and gives memory back when nobody waits for it."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from served import Served
from triptych.model import Model
from triptych.serving import served_models as models
from triptych.serving.limits import Limits

LIMITS = Limits(max_characters=50, max_attended=20, max_weights=3000, max_waiting=6)
PLACE = {"layer": 1, "head": 0}
LOOKS: dict[str, dict[str, Any]] = {
    "/v1/attend": {},
    "/v1/steps": PLACE,
    "/v1/explore/view": {},
    "/v1/explore/gallery": {},
    "/v1/explore/row": {"layer": "1", "head": 0, "query": 0},
    "/v1/explore/write": {"count": 1},
}


@pytest.fixture(scope="module")
def served(language_model: Model, translator: Model) -> Iterator[Served]:
    with Served({"gpt": language_model, "en-de": translator}, LIMITS) as running:
        yield running


@pytest.mark.parametrize("path", LOOKS)
def test_whatever_reads_a_text_reads_no_more_characters_than_are_allowed(served: Served, path: str) -> None:
    fields = {"model": "gpt", "text": "a" * 51, **LOOKS[path]}
    assert served.ask(path, fields).status == 413


@pytest.mark.parametrize("path", [path for path in LOOKS if path != "/v1/explore/write"])
def test_attention_is_looked_at_in_texts_of_so_many_tokens(served: Served, path: str) -> None:
    found = served.ask(path, {"model": "gpt", "text": "a" * 21, **LOOKS[path]})
    assert (found.status, "at most 20" in found.body["error"]["message"]) == (400, True)
    assert served.ask(path, {"model": "gpt", "text": "a" * 10, **LOOKS[path]}).status == 200


def test_an_answer_has_so_many_weights(served: Served) -> None:
    fields = {"model": "gpt", "text": "a" * 18}
    found = served.ask("/v1/attend", fields)
    assert (found.status, found.body["error"]["message"][:30]) == (413, "these heads have 3,888 weights")
    assert served.ask("/v1/attend", {**fields, "heads": "1.*"}).status == 200


def test_a_request_has_so_many_lines(served: Served) -> None:
    fields = {"q": "a\n" * 7, "source": "en", "target": "de"}
    assert served.ask("/translate", fields).status == 413
    assert served.ask("/translate", {**fields, "q": "a\n" * 6}).status == 200


def test_who_looks_at_a_model_holds_up_none_of_its_texts(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, begun = threading.Event(), threading.Event()
    attend = Model.attend

    def slow(*arguments: Any, **options: Any) -> Any:
        begun.set()
        goes_on.wait(60)
        return attend(*arguments, **options)

    monkeypatch.setattr(Model, "attend", slow)
    with ThreadPoolExecutor() as pool:
        looked = pool.submit(served.ask, "/v1/attend", {"model": "gpt", "text": "a cat"})
        assert begun.wait(60)
        fields = {"model": "gpt", "prompt": "The cat", "max_tokens": 3, "temperature": 0}
        assert served.ask("/v1/completions", fields).status == 200
        goes_on.set()
        assert looked.result().status == 200


def test_an_inspection_stops_when_its_client_goes_away(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, gone = list[int](), threading.Event()
    desk = served.state.models["gpt"].desk
    inspect = Model.inspect

    def slowly(model: Model, *, progress: Any, **options: Any) -> Any:
        def tell(*done: Any) -> None:
            looked.append(1)
            gone.wait(60)
            while not all(item.is_left for lane in desk.lanes for item in lane.running):
                time.sleep(0.01)
            progress(*done)

        return inspect(model, progress=tell, **options)

    monkeypatch.setattr(Model, "inspect", slowly)
    body = b'{"model": "gpt"}'
    with closing(socket.create_connection(("127.0.0.1", served.port))) as connection:
        head = f"POST /v1/inspect HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        while not looked:
            time.sleep(0.01)
    gone.set()
    while desk.num_running:
        time.sleep(0.01)
    assert len(looked) == 1  # of three layers


def test_what_the_page_kept_is_given_back_when_it_asks_no_more(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "SECONDS_KEPT", 0.2)
    explorer = served.state.models["gpt"].explorer
    assert served.ask("/v1/explore/view", {"model": "gpt", "text": "a cat"}).status == 200
    until = time.monotonic() + 30
    while explorer._attention.cache_info().currsize:
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("stop", "status"),
    [
        ([f"x{number}" for number in range(10_000)], 400),  # each is looked for at every token
        (["a" * 30, "b" * 30], 413),
        ({"a": 1}, 400),
        ([None], 400),
        (5, 400),
        ([f"x{number}" for number in range(9)], 200),
    ],
)
def test_texts_to_stop_at_are_a_few_texts(served: Served, stop: Any, status: int) -> None:
    fields = {"model": "gpt", "prompt": "The cat", "max_tokens": 4, "stop": stop}
    assert served.ask("/v1/completions", fields).status == status


@pytest.mark.parametrize("path", ["/v1/attend", "/v1/steps", "/v1/inspect"])
@pytest.mark.parametrize("name", ["text", "target"])
@pytest.mark.parametrize("given", [5, True, [1], {"a": 1}])
def test_what_is_no_text_is_refused_or_left_aside(served: Served, path: str, name: str, given: Any) -> None:
    fields = {"model": "gpt", "text": "a cat", **LOOKS.get(path, {}), name: given}
    assert served.ask(path, fields).status in (200, 400)
