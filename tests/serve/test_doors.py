"""Who may ask: keys before bodies, no page of another origin, and no connection that waits for ever."""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch

from served import Served
from triptych.errors import DataError
from triptych.model import Model
from triptych.seeing.attending.alignment import AlignedWords, Word
from triptych.serving import application
from triptych.serving.limits import Limits
from triptych.serving.serve import serve
from triptych.serving.translation_api import _links

LIMITS = Limits(max_requests=4, max_strangers=4, max_connections=8, stranger_seconds=1.0, body_seconds=1.0)
FIELDS = {"q": ["twelve"], "source": "en", "target": "de"}


@pytest.fixture(scope="module")
def locked(translator: Model) -> Iterator[Served]:
    """A server with keys and few places."""
    with Served({"en-de": translator}, LIMITS, keys=["k", "other"]) as running:
        yield running


@pytest.fixture(scope="module")
def open_server(translator: Model) -> Iterator[Served]:
    """A server without keys."""
    with Served({"en-de": translator}, LIMITS) as running:
        yield running


def begun(served: Served, *headers: str, body: bytes = b"{") -> socket.socket:
    """A request whose body never ends."""
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=30)
    head = ["POST /translate HTTP/1.1", "Host: localhost", "Content-Length: 100000", *headers]
    connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + body)
    return connection


def status_of(connection: socket.socket) -> int:
    """The status of the answer; 0 where the connection was closed on top of it."""
    try:
        return int(connection.recv(4096).split(b" ", 2)[1])
    except ConnectionResetError:
        return 0


def test_bodies_without_a_key_keep_nobody_out_who_has_one(locked: Served) -> None:
    with ExitStack() as stack:
        slow = [stack.enter_context(closing(begun(locked))) for _ in range(60)]
        started = time.monotonic()
        for _ in range(3):
            assert locked.ask("/translate", FIELDS, Authorization="Bearer k").status == 200
        assert time.monotonic() - started < LIMITS.seconds / 10
        refused = [status_of(connection) for connection in slow]
    assert {408} < {*refused} <= {0, 408, 503}  # few are listened to, and these not for long
    assert refused.count(408) <= LIMITS.max_strangers
    assert locked.ask("/translate", {**FIELDS, "api_key": "k"}).status == 200


def test_a_key_in_the_headers_is_looked_at_before_the_body(locked: Served) -> None:
    with closing(begun(locked, "Authorization: Bearer wrong")) as connection:
        assert status_of(connection) == 403
    with closing(begun(locked, "Authorization: Bearer k")) as connection:
        assert status_of(connection) == 408


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer", 401),
        ("Bearer ", 401),
        ("Basic azo=", 401),
        ("k", 401),
        ("Bearer x", 403),
        ("bearer k", 200),
    ],
)
def test_a_header_without_a_key_is_no_key(locked: Served, header: str, status: int) -> None:
    assert locked.ask("/translate", FIELDS, Authorization=header).status == status
    assert locked.ask("/v1/models", Authorization=header).status == status


@pytest.mark.parametrize(("key", "status"), [({}, 401), ({"api_key": "x"}, 403), ({"api_key": "other"}, 200)])
def test_a_key_may_be_a_field_of_the_body(locked: Served, key: dict[str, str], status: int) -> None:
    assert locked.ask("/translate", {**FIELDS, **key}).status == status
    assert locked.ask("/v1/models").status == 401
    assert locked.ask("/health").status == 200


@pytest.mark.slow
def test_connections_that_send_no_request_are_closed(locked: Served) -> None:
    with ExitStack() as stack:
        for sent in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            for _ in range(12):
                connection = socket.create_connection(("127.0.0.1", locked.port), timeout=30)
                stack.enter_context(closing(connection))
                connection.sendall(sent)
                if sent.endswith(b"\r\n\r\n"):
                    assert status_of(connection) == 200
                    while b"models" in connection.recv(1 << 16):
                        pass
                elif sent:
                    continue
                else:
                    assert locked.ask("/health").status == 200
            time.sleep(LIMITS.stranger_seconds / 5)
    assert locked.ask("/health").status == 200


def test_a_connection_that_sends_half_a_head_ends(locked: Served) -> None:
    with closing(socket.create_connection(("127.0.0.1", locked.port), timeout=30)) as connection:
        started = time.monotonic()
        ended = False
        while not ended and time.monotonic() - started < 20:
            try:
                connection.sendall(b"G")
                connection.settimeout(0.1)
                ended = connection.recv(100) == b""
            except TimeoutError:
                pass
            except OSError:
                ended = True
    assert ended


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("käse", "no header can carry key 1"),
        ("a\nb\x07c", "no header can carry key 2"),
        ("\n", "holds no key"),
    ],
)
def test_keys_that_nobody_could_send_are_refused_at_the_start(
    translator: Model, tmp_path: Path, content: str, says: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(DataError, match=says):
        serve({"en-de": translator}, keys_file=file)


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="there is no such device")  # noqa: PTH110
def test_a_device_is_no_file_of_keys(translator: Model) -> None:
    with pytest.raises(DataError, match="not a regular file"):
        serve({"en-de": translator}, keys_file=Path("/dev/zero"))


def test_a_page_of_another_origin_makes_nothing_compute(open_server: Served, locked: Served) -> None:
    own = f"127.0.0.1:{open_server.port}"
    for headers, status in (
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "text/plain; charset=utf-8"}, 415),
        ({"Origin": f"http://{own}"}, 200),
        ({"Sec-Fetch-Site": "same-origin", "Content-Type": "application/json; charset=utf-8"}, 200),
        ({}, 200),
    ):
        assert open_server.ask("/translate", FIELDS, **headers).status == status, headers
    # A key says who asks.
    found = locked.ask("/translate", FIELDS, Origin="https://app.example", Authorization="Bearer k")
    assert found.status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.2", 200),
        ("127.9.9.9:80", 200),
        ("[::1]:9", 200),
        ("LOCALHOST", 200),
        ("LocalHost:80", 200),
        ("localhost.evil.example", 400),
        ("", 400),
    ],
)
def test_every_address_of_this_machine_alone_is_its_own(open_server: Served, host: str, status: int) -> None:
    assert open_server.ask("/health", Host=host).status == status


def test_a_page_of_another_host_is_told_why_it_cannot_ask(open_server: Served) -> None:
    found = open_server.ask("/health", Host="evil.example")
    assert (found.status, found.body["error"][:35]) == (400, "Host: evil.example is not this mach")
    answer = open_server.ask("/v1/models", Host="evil.example")
    assert answer.body["error"]["type"] == "invalid_request_error"


def test_a_page_of_this_server_may_ask_however_its_name_is_spelled(open_server: Served) -> None:
    port = open_server.port
    for origin, host in (("localhost", "LOCALHOST"), ("LocalHost", "localhost")):
        headers = {"Origin": f"http://{origin}:{port}", "Host": f"{host}:{port}"}
        assert open_server.ask("/translate", FIELDS, **headers).status == 200


@pytest.mark.parametrize(
    "kind", ["x-www-form-urlencoded; charset=punycode", "x-www-form-urlencoded; charset=x"]
)
def test_a_form_of_a_strange_encoding_is_read_or_refused(open_server: Served, kind: str) -> None:
    headers = {"Content-Type": f"application/{kind}"}
    assert open_server.ask("/translate", {"q": "é☃", **FIELDS}, form=True, **headers).status in (200, 400)
    multipart = {"Content-Type": "multipart/form-data; boundary=b; charset=punycode"}
    assert open_server.ask("/translate", FIELDS, form=True, **multipart).status == 400


@pytest.mark.parametrize("text", ["☃", "☃☃ twelve ☃", "\u200b", "…", "😂 twelve", " "])
@pytest.mark.parametrize("form", ["text", "html"])
def test_words_of_unknown_characters_are_aligned(open_server: Served, text: str, form: str) -> None:
    asked = {**FIELDS, "q": text, "alignments": True, "format": form}
    found = open_server.ask("/translate", asked)
    assert found.status == 200, found
    assert json.dumps(found.body)


def test_a_line_all_of_whose_tokens_are_unknown_has_no_words_to_align() -> None:
    words = AlignedWords((), (Word("Ein", 0, 1), Word(".", 1, 2)), torch.zeros(2, 0))
    assert _links(words) == []


def unread(served: Served, num_requests: int) -> socket.socket:
    """A client without a key that asks for many pages and reads none."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect(("127.0.0.1", served.port))
    connection.setblocking(False)
    connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * num_requests)
    return connection


def test_clients_that_read_no_answer_keep_nobody_out_and_are_cut_off(
    locked: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "_SECONDS_TO_SEND", 1.0)
    with ExitStack() as stack:
        for _ in range(LIMITS.max_requests + 2):
            stack.enter_context(closing(unread(locked, 300)))
        until = time.monotonic() + 60
        while locked.state.num_requests < LIMITS.max_requests + 2:  # until what the system keeps is full
            assert time.monotonic() < until
            time.sleep(0.05)
        assert locked.ask("/translate", FIELDS, Authorization="Bearer k").status == 200
        while locked.server.server_state.connections:
            assert time.monotonic() < until, "connections are kept for ever"
            time.sleep(0.05)


def test_a_request_that_came_with_its_connection_is_answered_in_a_flood_of_connections(
    locked: Served,
) -> None:
    loop = locked.server.servers[0].get_loop()
    with ExitStack() as stack:
        loop.call_soon_threadsafe(time.sleep, 0.5)  # so that all connections wait at once
        time.sleep(0.1)
        honest = stack.enter_context(closing(socket.create_connection(("127.0.0.1", locked.port), 30)))
        honest.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for _ in range(5 * LIMITS.max_connections):
            idle = socket.create_connection(("127.0.0.1", locked.port), 30)
            stack.enter_context(closing(idle))
        assert status_of(honest) == 200
