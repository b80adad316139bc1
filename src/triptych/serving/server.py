"""What all requests share: the models, limits, keys and figures of a server."""

import asyncio
import hmac
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from triptych.errors import TriptychError, UsageError
from triptych.serving.limits import Limits, RequestError
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

    def __init__(
        self, models: Sequence[ServedModel], limits: Limits | None = None, keys: Iterable[str] = ()
    ) -> None:
        """Put a server together; with keys, each request needs one of them."""
        self.models = {model.name: model for model in models}
        if len(self.models) < len(models):
            raise UsageError("two models have one name: write NAME=MODEL to tell them apart")
        self.limits, self._keys = limits or Limits(), tuple(keys)
        self.is_stopping, self.num_requests, self.started = False, 0, int(time.time())
        self.registry = CollectorRegistry()
        names = ("path", "status")
        self.answered = Counter(
            "triptych:requests", "Requests that were answered.", names, registry=self.registry
        )
        self.latency = Histogram(
            "vllm:e2e_request_latency_seconds",
            "From a request to its answer.",
            ("path",),
            registry=self.registry,
        )
        self.first = Histogram(
            "vllm:time_to_first_token_seconds", "To the first text of a stream.", registry=self.registry
        )
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Tokens read.", registry=self.registry)
        self.new_tokens = Counter("vllm:generation_tokens", "Tokens generated.", registry=self.registry)
        running = Gauge(
            "vllm:num_requests_running", "Texts computed now.", ("model_name",), registry=self.registry
        )
        waiting = Gauge(
            "vllm:num_requests_waiting", "Texts that wait.", ("model_name",), registry=self.registry
        )
        workers = Gauge("triptych:workers", "Processes that compute.", registry=self.registry)
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

    async def fields(self, request: Request) -> dict[str, Any]:
        """The fields of a request's body, whose key is checked."""
        found = await _read_fields(request, self.limits)
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
                message = str(error)
                for model in self.models.values():
                    message = message.replace(model.model.name, model.name)
                return 400, message
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
            raise RequestError(
                413, f"{length:,} characters: at most {self.limits.max_characters:,} in a request"
            )

    async def compute(
        self,
        request: Request,
        job: ModelJob,
        given: Sequence[Any],
        tell: Callable[..., object] | None = None,
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


async def _read_body(request: Request, limits: Limits) -> bytes:
    """The body of a request, up to the limit."""
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > limits.max_bytes:
            raise RequestError(413, f"the body has more than {limits.max_bytes:,} bytes")
        parts.append(part)
    return b"".join(parts)


async def _read_fields(request: Request, limits: Limits) -> dict[str, Any]:
    """The fields of a body: JSON, whatever type it is sent as, or a form, whose fields may come twice."""
    body = await _read_body(request, limits)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not body.lstrip().startswith(b"{") and kind in (
        "application/x-www-form-urlencoded",
        "multipart/form-data",
    ):

        async def replay() -> Mapping[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        form = await Request(request.scope, replay).form(max_files=0, max_fields=1000)  # type: ignore[arg-type]
        fields = {name: form.getlist(name) for name in form}
        return {name: values[0] if len(values) == 1 else values for name, values in fields.items()}
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        raise RequestError(400, "the body is no JSON") from None
    if not isinstance(found, dict):
        raise RequestError(400, "the body is no JSON object")
    return found


def log(record: Mapping[str, Any]) -> None:
    """Write a line of the log, JSON on standard error."""
    print(json.dumps(record), file=sys.stderr, flush=True)
