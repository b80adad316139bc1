"""The ASGI application: its routes, and what happens around each request."""

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from triptych.serving import completions, embeddings, page, records, translation
from triptych.serving.limits import RequestError
from triptych.serving.server import Endpoint, Server, log

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
# What needs no key.
_OPEN = frozenset({"/", "/health", "/frontend/settings", "/spec"})


def web_application(server: Server, *, public: bool = False) -> Starlette:
    """An ASGI application that serves models; if `public`, under any host name."""
    routes = [
        Route(path, _guarded(server, path, endpoint, public), methods=[method])
        for method, path, endpoint in (
            ("GET", "/health", _health),
            ("GET", "/metrics", _metrics),
            ("GET", "/spec", _specification),
            *translation.ROUTES,
            *completions.ROUTES,
            *embeddings.ROUTES,
            *records.ROUTES,
            *page.ROUTES,
        )
    ]

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        for model in server.models.values():
            await asyncio.to_thread(model.worker.close)

    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _no_route})


def _guarded(
    server: Server, path: str, endpoint: Endpoint, public: bool
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """An endpoint with a key, a limit in time, errors as JSON, a line in the log, and its figures."""

    async def answer(request: Request) -> Response:
        started = time.perf_counter()
        given = request.headers.get("x-request-id", "")
        number = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        server.num_requests += 1
        try:
            # A page that a browser takes for this machine's, by the name of another.
            host = request.headers.get("host", "")
            if not public and re.sub(r":\d+$", "", host) not in _LOOPBACK:
                raise RequestError(400, f"Host: {host} is not this machine: ask localhost or 127.0.0.1")
            if server.is_stopping and path != "/metrics":
                raise RequestError(503, "the server is stopping", retry_after=5)
            if request.method == "POST" and server.num_requests > server.limits.max_requests:
                raise RequestError(503, "too many requests at a time: try again in a moment", retry_after=1)
            if path not in _OPEN and request.method == "GET":
                server.check_key(request)
            async with asyncio.timeout(server.limits.seconds):
                response = await endpoint(server, request)
        except Exception as error:  # noqa: BLE001 (the answer names no path and no line of the source)
            retry = getattr(error, "retry_after", None)
            headers = {} if retry is None else {"Retry-After": str(retry)}
            response = _refusal(path, *server.explain(error), headers)
        finally:
            server.num_requests -= 1
        seconds = time.perf_counter() - started
        server.answered.labels(path, response.status_code).inc()
        server.latency.labels(path).observe(seconds)
        response.headers["X-Request-ID"] = number
        record = {"time": round(time.time(), 3), "request": number, "method": request.method, "path": path}
        log({**record, "status": response.status_code, "seconds": round(seconds, 4)})
        return response

    answer.__doc__ = endpoint.__doc__
    return answer


async def _no_route(request: Request, error: Exception) -> Response:
    """The answer where no endpoint is, or not for this method."""
    assert isinstance(error, HTTPException)
    path, headers = request.url.path, error.headers or {}
    why = f"nothing is at {path}: GET /spec has the paths"
    if error.status_code == 405:
        why = f"{path} takes no {request.method}: send {headers['Allow']}"
    return _refusal(path, error.status_code, why, headers)


def _refusal(path: str, status: int, message: str, headers: Mapping[str, str]) -> Response:
    """An error in the form of OpenAI or of LibreTranslate."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    of_openai = {"message": message, "type": kind, "param": None, "code": None}
    body = of_openai if path.startswith("/v1/") else message
    return JSONResponse({"error": body}, status, headers)


async def _health(server: Server, request: Request) -> Response:
    """Whether the server takes requests, and what it serves."""
    models = [
        {
            "name": model.name,
            "can": list(model.can),
            "languages": model.languages,
            "batch_invariant": model.is_batch_invariant,
            "batch_invariance": model.batch_invariance,
        }
        for model in server.models.values()
    ]
    return JSONResponse({"status": "ok", "workers": server.num_workers, "models": models})


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
