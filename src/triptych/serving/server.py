"""What all requests share: the models, limits, keys and figures of a server."""

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from triptych.errors import TriptychError
from triptych.serving.fields import Fields
from triptych.serving.limits import Limits, RequestError
from triptych.serving.logs import log, num_lost
from triptych.serving.models import ModelJob, ServedModel
from triptych.serving.worker import Item

# The status of a request whose client has gone away, as nginx logs it.
_GONE = 499

Endpoint = Callable[["Server", Request], Awaitable[Response]]


@final
class Server:
    """The models that are served, their limits and their figures.

    Attributes:
        models: by name.
        limits: of every request.
        is_stopping: requests are finished, and none is taken in.
        num_requests: requests that are being answered.
        started: when it was made, in seconds since 1970.
    """

    def __init__(self, models: Sequence[ServedModel], limits: Limits, keys: Sequence[str]) -> None:
        """Put a server together; with keys, each request needs one of them."""
        self.models = {model.name: model for model in models}
        self.limits, self._keys = limits, keys
        self.is_stopping, self.num_requests, self.started = False, 0, int(time.time())
        self.registry = of = CollectorRegistry()
        path, name = ("path",), ("model_name",)
        about = "Requests that were answered."
        self.answered = Counter("triptych:requests", about, (*path, "status"), registry=of)
        about = "From a request to its answer."
        self.latency = Histogram("vllm:e2e_request_latency_seconds", about, path, registry=of)
        about = "To the first text of a stream."
        self.first = Histogram("vllm:time_to_first_token_seconds", about, registry=of)
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Tokens read.", registry=of)
        self.new_tokens = Counter("vllm:generation_tokens", "Tokens generated.", registry=of)
        running = Gauge("vllm:num_requests_running", "Texts computed now.", name, registry=of)
        waiting = Gauge("vllm:num_requests_waiting", "Texts that wait.", name, registry=of)
        lost = Gauge("triptych:log_lines_lost", "Lines of the log that could not be written.", registry=of)
        lost.set_function(num_lost)
        workers = Gauge("triptych:workers", "Processes that compute.", registry=of)
        workers.set_function(lambda: self.num_workers)
        for model in models:
            running.labels(model.name).set_function(partial(getattr, model.queue, "num_running"))
            waiting.labels(model.name).set_function(partial(getattr, model.queue, "num_waiting"))

    @property
    def num_workers(self) -> int:
        """Processes that compute."""
        return min(len(model.queue.lanes) for model in self.models.values())

    @property
    def needs_key(self) -> bool:
        return bool(self._keys)

    def count_tokens(self, read: int, new: int) -> None:
        """Add to the figures."""
        self.prompt_tokens.inc(read)
        self.new_tokens.inc(new)

    def check_key(self, request: Request, given: object = None) -> None:
        """Check the key of a request, of its body or its header."""
        header = request.headers.get("authorization", "")
        key = str(given or header.removeprefix("Bearer ") or request.headers.get("x-api-key", ""))
        if self._keys and not sum(hmac.compare_digest(key.encode(), own.encode()) for own in self._keys):
            raise RequestError(403 if key else 401, "a key is needed: send api_key or Authorization: Bearer")

    async def fields(self, request: Request) -> Fields:
        """The fields of a request's body, whose key is checked."""
        found = await Fields.read(request, self.limits.max_bytes)
        self.check_key(request, found.get("api_key"))
        return found

    def explain(self, error: Exception) -> tuple[int, str]:
        """The status and the line that an error is answered by, with no path of this machine."""
        match error:
            case RequestError():
                return error.status, error.message
            case HTTPException():  # a form that cannot be read
                return error.status_code, error.detail
            case TimeoutError():
                return 503, f"no answer within {self.limits.seconds:g} seconds"
            case ClientDisconnect():
                return _GONE, "the client has gone away"
            case TriptychError():  # of the request: its text is too long, its options do not go together
                return 400, str(error)
        log({"error": repr(error)[:500]})
        return 500, "the server failed; its log says why"

    def model(self, name: object, can: str) -> ServedModel:
        """The model that a request names, or the only one that can do what is asked."""
        able = [model for model in self.models.values() if can in model.can]
        if name is None and len(able) == 1:
            return able[0]
        if not isinstance(name, str) or name not in self.models:
            raise RequestError(404, f"model: give one of {', '.join(self.models)}")
        if self.models[name] not in able:
            raise RequestError(400, f"{name} cannot {can}; it can {', '.join(self.models[name].can)}")
        return self.models[name]

    def check_texts(self, texts: Sequence[str]) -> None:
        """Check how many texts there are, and how long."""
        if len(texts) > self.limits.max_items:
            raise RequestError(413, f"{len(texts):,} texts: at most {self.limits.max_items:,} in a request")
        length = sum(map(len, texts))
        if length > self.limits.max_characters:
            most = self.limits.max_characters
            raise RequestError(413, f"{length:,} characters: at most {most:,} in a request")

    async def compute(
        self, request: Request, job: ModelJob, given: Sequence[Any], tell: Callable[..., object] | None = None
    ) -> list[Any]:
        """What a job gives for each item; nothing is computed for a client that has gone away.

        `tell` gets the number of an item and each part of its result, where it comes in parts.
        """
        loop = asyncio.get_running_loop()
        items = [
            Item(job, one, None if tell is None else partial(loop.call_soon_threadsafe, tell, number))
            for number, one in enumerate(given)
        ]
        job.model.queue.submit(items)
        found = asyncio.gather(*(asyncio.wrap_future(item.result) for item in items))
        gone: asyncio.Future[None] = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait(list[asyncio.Future[Any]]((found, gone)), return_when=asyncio.FIRST_COMPLETED)
            if not found.done():
                raise ClientDisconnect
            return await found
        finally:
            gone.cancel()
            for item in items:
                item.leave()
            if not found.done():
                found.add_done_callback(lambda over: over.cancelled() or over.exception())
                found.cancel()


async def _disconnected(request: Request) -> None:
    """Wait until the client goes away; the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass

