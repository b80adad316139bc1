"""The ASGI application: its routes, and what happens around each request."""

import asyncio
import json
import re
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from triptych.errors import TriptychError
from triptych.serving import completions, records, translation
from triptych.serving.limits import Limits, RequestError
from triptych.serving.models import ServedModel
from triptych.serving.server import Endpoint, Server

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LOOPBACK = ["localhost", "127.0.0.1", "[::1]"]
# What needs no key.
_OPEN = frozenset({"/health", "/frontend/settings", "/spec"})
# The status of a request whose client has gone away, as nginx logs it.
_GONE = 499


def application(
    models: Sequence[ServedModel],
    limits: Limits | None = None,
    keys: Iterable[str] = (),
    *,
    public: bool = False,
) -> Starlette:
    """An ASGI application that serves models; if `public`, under any host name."""
    server = Server(models, limits, keys)
    routes = [
        Route(path, _answering(server, path, endpoint), methods=[method])
        for method, path, endpoint in (
            ("GET", "/health", _health),
            ("GET", "/metrics", _metrics),
            ("GET", "/spec", _specification),
            *translation.ROUTES,
            *completions.ROUTES,
            *records.ROUTES,
        )
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        for model in models:
            await asyncio.to_thread(model.worker.close)

    hosts = [] if public else [Middleware(TrustedHostMiddleware, allowed_hosts=_LOOPBACK, www_redirect=False)]
    app = Starlette(routes=routes, middleware=hosts, lifespan=lifespan)
    app.state.server = server
    return app


def _answering(
    server: Server, path: str, endpoint: Endpoint
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """An endpoint with a key, a limit in time, errors as JSON, a line in the log, and its figures."""

    async def answer(request: Request) -> Response:
        started = time.perf_counter()
        given = request.headers.get("x-request-id", "")
        number = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        server.num_requests += 1
        try:
            response = await _answered(server, path, endpoint, request)
        finally:
            server.num_requests -= 1
        seconds = time.perf_counter() - started
        server.answered.labels(path, response.status_code).inc()
        server.latency.labels(path).observe(seconds)
        response.headers["X-Request-ID"] = number
        record = {"time": round(time.time(), 3), "request": number, "method": request.method, "path": path}
        print(
            json.dumps({**record, "status": response.status_code, "seconds": round(seconds, 4)}),
            file=sys.stderr,
            flush=True,
        )
        return response

    return answer


async def _answered(server: Server, path: str, endpoint: Endpoint, request: Request) -> Response:
    retry: int | None = None
    try:
        if server.is_stopping and path != "/metrics":
            raise RequestError(503, "the server is stopping", retry_after=5)
        if path not in _OPEN and request.method == "GET":
            server.check_key(request)
        async with asyncio.timeout(server.limits.seconds):
            return await endpoint(server, request)
    except RequestError as error:
        status, message, retry = error.status, error.message, error.retry_after
    except TimeoutError:
        status, message = 503, f"no answer within {server.limits.seconds:g} seconds"
    except ClientDisconnect:
        status, message = _GONE, "the client has gone away"
    except TriptychError as error:  # of the request: its text is too long, its options do not go together
        status, message = 400, str(error)
    except Exception as error:  # noqa: BLE001 (the answer names no path and no line of the source)
        print(json.dumps({"error": repr(error)[:500]}), file=sys.stderr, flush=True)
        status, message = 500, "the server failed; its log says why"
    for model in server.models.values():  # where a model lies is no business of a client
        message = message.replace(model.model.name, model.name)
    body: Any = message
    if path.startswith("/v1/"):
        kind = "invalid_request_error" if status < 500 else "server_error"
        body = {"message": message, "type": kind, "param": None, "code": None}
    headers = {} if retry is None else {"Retry-After": str(retry)}
    return JSONResponse({"error": body}, status, headers)


async def _health(server: Server, request: Request) -> Response:
    """Whether the server takes requests, and what it serves."""
    models = [
        {
            "name": model.name,
            "can": list(model.model.can),
            "languages": model.languages,
            "batch_invariant": model.is_batch_invariant,
        }
        for model in server.models.values()
    ]
    return JSONResponse({"status": "ok", "models": models})


async def _metrics(server: Server, request: Request) -> Response:
    """Figures for Prometheus."""
    return Response(generate_latest(server.registry), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _specification(server: Server, request: Request) -> Response:
    """What the server answers, as OpenAPI."""
    paths: dict[str, dict[str, Any]] = {}
    for route in request.app.routes:
        about = {"summary": route.endpoint.__doc__ or "", "responses": {"200": {"description": "JSON"}}}
        for method in route.methods - {"HEAD"}:
            paths.setdefault(route.path, {})[method.lower()] = about
    info = {"title": "triptych", "version": "1"}
    return JSONResponse({"openapi": "3.1.0", "info": info, "paths": paths})
