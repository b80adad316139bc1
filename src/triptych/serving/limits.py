"""The limits of requests, and the error of a request that is refused."""

from dataclasses import dataclass

from triptych.errors import UsageError


@dataclass(frozen=True)
class Limits:
    """Limits of a server, each above 0.

    Attributes:
        max_characters: characters of text in a request.
        max_items: texts in a request.
        max_new_tokens: tokens that a completion may grow by.
        max_bytes: bytes of a request's body.
        max_requests: requests that are answered at a time; further ones get 503.
        max_waiting: items that wait for a model; further requests get 429.
        batch_items: items that a model computes together.
        batch_tokens: tokens that completions computed together may have, prompts and new ones; each counts as
            many as the longest.
        seconds: longest time from a request to its answer, reading the body included.
    """

    max_characters: int = 50_000
    max_items: int = 128
    max_new_tokens: int = 2048
    max_bytes: int = 1_048_576
    max_requests: int = 512
    max_waiting: int = 1024
    batch_items: int = 32
    batch_tokens: int = 65_536
    seconds: float = 300.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UsageError(f"--{name.replace('_', '-')} is {value}: it must be above 0")


class RequestError(Exception):
    """A request that is refused: a status of HTTP, a line, and after how many seconds to try again."""

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after
