"""Limits of requests, and the error of a refused request."""

from dataclasses import dataclass
from typing import Any

from triptych.errors import UsageError

# Status of a request after its client has gone away; the same as in nginx's log.
GONE = 499


@dataclass(frozen=True)
class Limits:
    """Limits of a server, each above 0.

    Attributes:
        max_characters: characters of text in a request.
        max_items: texts in a request.
        max_new_tokens: tokens that a completion may grow by.
        max_bytes: bytes of a request's body.
        max_requests: requests that are answered at a time, streams included; further ones get 503.
        max_strangers: requests without a key in their headers that are listened to at a time, where keys are
            needed; further ones get 503.
        max_connections: connections that are open at a time without a request; the oldest of them is closed.
        max_waiting: items that wait for a model; further requests get 429.
        batch_items: items that a model computes together.
        batch_tokens: tokens that completions computed together may have, prompts and new ones; each counts as
            many as the longest.
        max_tags: tags of HTML in a request.
        max_attended: tokens of a text whose attention is looked at, its translation included.
        max_weights: attention weights in an answer.
        seconds: longest time from a request to the end of its answer.
        body_seconds: longest time in which a body comes.
        stranger_seconds: the same of a request without a key in its headers, where keys are needed; also the
            longest time that a connection is open without a request.
    """

    max_characters: int = 50_000
    max_items: int = 128
    max_new_tokens: int = 2048
    max_bytes: int = 1_048_576
    max_requests: int = 512
    max_strangers: int = 16
    max_connections: int = 256
    max_waiting: int = 1024
    batch_items: int = 32
    batch_tokens: int = 65_536
    max_tags: int = 10_000
    max_attended: int = 1024
    max_weights: int = 4_194_304
    seconds: float = 300.0
    body_seconds: float = 30.0
    stranger_seconds: float = 10.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UsageError(
                    f"--{name.replace('_', '-')} is {value}: it must be above 0"
                )


class RequestError(Exception):
    """Refused request: HTTP status, message, and seconds to wait before another try."""

    def __init__(
        self, status: int, message: str, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling: another process may refuse a request (`worker_processes.py`)."""
        return RequestError, (self.status, self.message, self.retry_after)


def openai_error(status: int, message: str, code: int | None = None) -> dict[str, Any]:
    """Format an error for OpenAI's interface."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": message, "type": kind, "param": None, "code": code}
