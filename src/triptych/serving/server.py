"""Server state common to all requests: models, limits, keys and figures."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from triptych.errors import TriptychError
from triptych.running.memory import give_memory_back
from triptych.serving.doors import Keys
from triptych.serving.fleet import Fleet
from triptych.serving.limits import GONE, Limits, RequestError
from triptych.serving.logs import log, num_lost
from triptych.serving.request_fields import Fields
from triptych.serving.served_models import ModelJob, ServedModel
from triptych.serving.text_files import KeptFiles
from triptych.serving.worker import Item
from triptych.threads import LEFT

# Interval of checks whether requests still use old models.
_SECONDS_BETWEEN_LOOKS = 0.05

_Found = TypeVar("_Found")
Endpoint = Callable[["Server", Request], Awaitable[Response]]


# Stage of a request. "open": not counted, because its body is not being read and its result not computed.
# "begun": its body is being read, with a key in the headers. "stranger": its body is being read, without a
# key in the headers. "read": its body is complete.
Stage = Literal["open", "begun", "stranger", "read"]
_VISIT = "triptych.visit"


@final
@dataclass(eq=False)
class Visit:
    """Request in progress.

    Attributes:
        deadline: latest end of the answer, on the clock of the event loop.
        stage: stage of the request.
    """

    deadline: float
    stage: Stage = "open"


def _crowded(way: str = "") -> RequestError:
    return RequestError(
        503, f"too many requests at a time: {way}try again in a moment", retry_after=1
    )


@final
class Server:
    """Served models with limits, keys and figures.

    Attributes:
        fleet: models and their workers.
        limits: limits of requests.
        keys: accepted keys; without keys, requests do not need a key.
        files: translated files until they are fetched.
        is_stopping: True while the server finishes running requests and refuses new requests.
        started: time of creation, in seconds since 1970.
    """

    def __init__(self, fleet: Fleet, limits: Limits, keys: Sequence[str]) -> None:
        """Make a server and register its figures."""
        self.fleet = fleet
        self._fleets = [fleet]  # all open fleets
        self.limits = limits
        self.keys = Keys(keys)
        self.files = KeptFiles()
        self.is_stopping = False
        self.started = int(time.time())
        self._in_flight = set[Visit]()
        self._reloading: asyncio.Task[list[str]] | None = None
        self._retiring = set[asyncio.Task[None]]()
        self._is_reload_wanted = (
            False  # True while a reload waits for another reload to end
        )
        self.registry = of = CollectorRegistry()
        path = ("path",)
        name = ("model_name",)
        about = "Requests that were answered."
        self.answered = Counter(
            "triptych:requests", about, (*path, "status"), registry=of
        )
        about = "From a request to its answer."
        self.latency = Histogram(
            "vllm:e2e_request_latency_seconds", about, path, registry=of
        )
        about = "To the first text of a stream."
        self.first = Histogram("vllm:time_to_first_token_seconds", about, registry=of)
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Tokens read.", registry=of)
        self.new_tokens = Counter(
            "vllm:generation_tokens", "Tokens generated.", registry=of
        )
        running = Gauge(
            "vllm:num_requests_running", "Texts computed now.", name, registry=of
        )
        waiting = Gauge(
            "vllm:num_requests_waiting", "Texts that wait.", name, registry=of
        )
        lost = Gauge(
            "triptych:log_lines_lost",
            "Lines of the log that could not be written.",
            registry=of,
        )
        lost.set_function(num_lost)
        workers = Gauge("triptych:workers", "Processes that compute.", registry=of)
        workers.set_function(lambda: self.num_workers)
        for served in fleet.models:
            running.labels(served).set_function(
                partial(self._figure, served, "num_running")
            )
            waiting.labels(served).set_function(
                partial(self._figure, served, "num_waiting")
            )

    def _figure(self, name: str, figure: str) -> int:
        model = self.models[name]
        return int(getattr(model.queue, figure) + getattr(model.desk, figure))

    @property
    def models(self) -> Mapping[str, ServedModel]:
        """Served models by name."""
        return self.fleet.models

    @property
    def num_workers(self) -> int:
        """Number of processes that compute items."""
        return self.fleet.num_workers

    @property
    def needs_key(self) -> bool:
        return self.keys.are_needed

    @contextmanager
    def answering(self, request: Request) -> Iterator[Visit]:
        """Register a request inside the block; the models in use stay open until its end."""
        visit = Visit(asyncio.get_running_loop().time() + self.limits.seconds)
        request.scope[_VISIT] = visit
        self._in_flight.add(visit)
        try:
            yield visit
        finally:
            self._in_flight.discard(visit)

    @property
    def num_requests(self) -> int:
        """Number of requests in progress, including streams."""
        return len(self._in_flight)

    def _num_in(self, stage: Stage) -> int:
        return sum(visit.stage == stage for visit in self._in_flight)

    async def reload(self) -> list[str]:
        """Open the models again from their sources, and switch to them once they are ready.

        Running requests finish on the old models. At most two sets of models are open: a reload is refused
        while requests still use the models of an earlier reload.
        """
        # `shield`: the disconnection of the client does not cancel the reload.
        if self.is_stopping:
            raise RequestError(503, "the server is stopping", retry_after=5)
        if self._reloading is not None:
            raise RequestError(
                409, "the models are being opened anew already", retry_after=1
            )
        if self._retiring:
            why = "requests still end on the models before the last reload: try again when they have ended"
            raise RequestError(
                409, f"{why} (in at most {self.limits.seconds:g} s)", retry_after=1
            )
        self._reloading = asyncio.ensure_future(self._reload())
        self._reloading.add_done_callback(self._reloaded)
        reloading = self._reloading
        try:
            return await asyncio.shield(reloading)
        except TriptychError:  # its message may contain paths
            raise RequestError(
                409, "the models cannot be opened anew; the log says why"
            ) from None
        except asyncio.CancelledError:
            if not reloading.cancelled():
                raise
            raise RequestError(503, "the server is stopping", retry_after=5) from None

    def give_up_reload(self) -> None:
        """Cancel a running reload because the server stops."""
        if self._reloading is not None:
            self._reloading.cancel()

    async def reload_when_possible(self) -> None:
        """Reload after the end of an earlier reload and of its old models.

        Further calls during the wait are ignored. Errors are in the log.
        """
        if self._is_reload_wanted:
            return
        self._is_reload_wanted = True
        while self._reloading is not None or self._retiring:
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
        self._is_reload_wanted = False
        with suppress(RequestError):
            await self.reload()

    def _reloaded(self, task: "asyncio.Task[list[str]]") -> None:
        self._reloading = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log({"error": f"the models cannot be opened anew: {error}"[:500]})

    async def _reload(self) -> list[str]:
        started = time.perf_counter()
        before = self.fleet
        fresh = await _in_a_thread_that_may_be_left(self._reopened)
        self.fleet = fresh
        log(
            {
                "reloaded": [*fresh.models],
                "seconds": round(time.perf_counter() - started, 3),
            }
        )
        retiring = asyncio.ensure_future(self._retire(before, {*self._in_flight}))
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)
        return [*fresh.models]

    def _reopened(self) -> Fleet:
        fresh = self.fleet.reopened()
        self._fleets.append(
            fresh
        )  # registered by this thread: `_reload` may have been cancelled
        if self.is_stopping:
            fresh.close()
        return fresh

    async def _retire(self, fleet: Fleet, requests: set[Visit]) -> None:
        """Close a fleet after the end of all requests that began before the reload."""
        while requests & self._in_flight:
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
        await _in_a_thread_that_may_be_left(fleet.close)
        self._fleets.remove(fleet)
        await asyncio.to_thread(give_memory_back)

    def close(self) -> None:
        """Close all fleets, old and reloaded, once all submitted items are computed."""
        for fleet in self._fleets:
            fleet.close()

    def count_tokens(self, read: int, new: int) -> None:
        """Add numbers of tokens to the figures."""
        self.prompt_tokens.inc(read)
        self.new_tokens.inc(new)

    async def fields(self, request: Request, max_files: int = 0) -> Fields:
        """Read the fields of a request's body; a key in the headers is checked before the body is read.

        Bodies being read and complete requests have separate limits.
        """
        visit: Visit = request.scope[_VISIT]
        most = self.limits.max_requests
        # A client without a key in its headers gets a lower limit and less time.
        if self.keys.check_head(request):
            visit.stage = "begun"
            if self._num_in("begun") > most:
                raise _crowded()
            found = await self._read(request, self.limits.body_seconds, max_files)
        else:
            visit.stage = "stranger"
            if self._num_in("stranger") > self.limits.max_strangers:
                raise _crowded("send the key as Authorization: Bearer, or ")
            found = await self._read(request, self.limits.stranger_seconds, max_files)
            self.keys.check_body(found.get("api_key"))
        visit.stage = "read"
        if self._num_in("read") > most:
            raise _crowded()
        return found

    async def _read(self, request: Request, seconds: float, max_files: int) -> Fields:
        try:
            async with asyncio.timeout(seconds):
                return await Fields.read(request, self.limits.max_bytes, max_files)
        except TimeoutError:
            raise RequestError(
                408, f"the body did not come within {seconds:g} seconds"
            ) from None

    def explain(self, error: Exception) -> tuple[int, str]:
        """Return the HTTP status and the message for an error, without paths of this machine."""
        match error:
            case RequestError():
                return error.status, error.message
            case HTTPException():  # an invalid form
                return error.status_code, error.detail
            case TimeoutError():
                return 503, f"no answer within {self.limits.seconds:g} seconds"
            case ClientDisconnect():
                return GONE, "the client has gone away"
            case TriptychError():  # an error of the request, such as a long text or contradictory options
                return 400, str(error)
        log({"error": repr(error)[:500]})
        return 500, "the server failed; its log says why"

    def model(self, name: object, can: str) -> ServedModel:
        """Return the model named in a request; without a name, the only model with the ability `can`."""
        able = [model for model in self.models.values() if can in model.can]
        if name is None and len(able) == 1:
            return able[0]
        if not isinstance(name, str) or name not in self.models:
            raise RequestError(404, f"model: give one of {', '.join(self.models)}")
        if self.models[name] not in able:
            raise RequestError(
                400, f"{name} cannot {can}; it can {', '.join(self.models[name].can)}"
            )
        return self.models[name]

    def check_texts(self, texts: Sequence[str]) -> None:
        """Check the number and the total length of texts."""
        if len(texts) > self.limits.max_items:
            raise RequestError(
                413,
                f"{len(texts):,} texts: at most {self.limits.max_items:,} in a request",
            )
        length = sum(map(len, texts))
        if length > self.limits.max_characters:
            most = self.limits.max_characters
            raise RequestError(
                413, f"{length:,} characters: at most {most:,} in a request"
            )

    async def compute(
        self,
        request: Request,
        job: ModelJob,
        given: Sequence[Any],
        tell: Callable[..., object] | None = None,
    ) -> list[Any]:
        """Compute a job for each input; returns the results in order.

        Items are dropped if the client goes away or its time is over. `tell` is called in the event loop with
        the index of an item and each new part of its result.
        """
        # Wait for the first of two events: all results, or the client's disconnection.
        loop = asyncio.get_running_loop()
        items = [
            Item(
                job,
                one,
                None
                if tell is None
                else partial(loop.call_soon_threadsafe, tell, number),
            )
            for number, one in enumerate(given)
        ]
        job.queue.submit(items)
        found = asyncio.gather(*(asyncio.wrap_future(item.result) for item in items))
        gone: asyncio.Future[None] = asyncio.ensure_future(_disconnected(request))
        try:
            async with asyncio.timeout_at(request.scope[_VISIT].deadline):
                await asyncio.wait(
                    list[asyncio.Future[Any]]((found, gone)),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not found.done():
                    raise ClientDisconnect
                return await found
        finally:
            gone.cancel()
            for item in items:
                item.leave()
            if not found.done():
                found.add_done_callback(
                    lambda over: over.cancelled() or over.exception()
                )
                found.cancel()


async def _in_a_thread_that_may_be_left(work: Callable[[], _Found]) -> _Found:
    """Call `work` in a daemon thread, so that it does not delay the end of the process."""
    # `asyncio.to_thread` would use threads that the interpreter joins at exit.
    found = Future[_Found]()

    def run() -> None:
        try:
            value = work()
        except Exception as error:  # noqa: BLE001 (raised by the awaiting coroutine)
            if found.set_running_or_notify_cancel():
                found.set_exception(error)
        else:
            if found.set_running_or_notify_cancel():
                found.set_result(value)

    threading.Thread(target=run, name=LEFT, daemon=True).start()
    return await asyncio.wrap_future(found)


async def _disconnected(request: Request) -> None:
    """Wait until the client disconnects, after its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
