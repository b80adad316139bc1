"""ASGI application: routes, and the checks, limits and figures around each request."""

import asyncio
import re
import time
import uuid
from collections.abc import Mapping
from typing import Any, final

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from triptych.serving import (
    attention_records as records,
)
from triptych.serving import (
    completions,
    embeddings,
)
from triptych.serving import (
    translation_api as translation,
)
from triptych.serving import (
    translation_page as page,
)
from triptych.serving.connections import CUT_OFF
from triptych.serving.doors import KEY_NEEDED, check_host, check_origin
from triptych.serving.limits import RequestError, openai_error
from triptych.serving.logs import log
from triptych.serving.server import Endpoint, Server

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Time for a client to read the end of an answer, or an answer without computation.
_SECONDS_TO_SEND = 10.0
# Paths without a key.
# A translated file has an unguessable address.
_OPEN = frozenset(
    {"/", "/health", "/frontend/settings", "/spec", "/download_file/{token}"}
)


def web_application(server: Server, *, public: bool = False) -> Starlette:
    """Make the ASGI application; `public` allows any host name."""
    # An endpoint's docstring is its summary in /spec.
    routes = [
        Route(path, Guarded(server, path, endpoint, public=public), methods=[method])
        for method, path, endpoint in (
            ("GET", "/health", _health),
            ("GET", "/metrics", _metrics),
            ("GET", "/spec", _specification),
            ("POST", "/admin/reload", _reload),
            *translation.ROUTES,
            *completions.ROUTES,
            *embeddings.ROUTES,
            *records.ROUTES,
            *page.ROUTES,
        )
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _no_route})


@final
class Guarded:
    """Endpoint with key checks, time limits, errors as JSON, a line in the log, and figures."""

    def __init__(
        self, server: Server, path: str, endpoint: Endpoint, *, public: bool
    ) -> None:
        self._server = server
        self._path = path
        self._endpoint = endpoint
        self._public = public
        self.summary = endpoint.__doc__ or ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        with self._server.answering(request) as visit:
            response = await self._answer(request)
            if response.status_code >= 400:
                visit.stage = "open"
            computed = self._server.limits.seconds if visit.stage == "read" else 0.0
            try:
                # `Server.compute` limits the computation; this timeout is for a client too slow to read.
                async with asyncio.timeout(computed + _SECONDS_TO_SEND):
                    await response(scope, receive, send)
            except TimeoutError:
                log(
                    {
                        "cut off": self._path,
                        "because": "the client does not read its answer",
                    }
                )
                if CUT_OFF in scope:
                    scope[CUT_OFF]()

    async def _answer(self, request: Request) -> Response:
        server = self._server
        path = self._path
        started = time.perf_counter()
        given = request.headers.get("x-request-id", "")
        number = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        try:
            self._let_in(request)
            async with asyncio.timeout(server.limits.seconds):
                response = await self._endpoint(server, request)
        except Exception as error:  # noqa: BLE001 (the answer names no path and no line of the source)
            retry = getattr(error, "retry_after", None)
            headers = {} if retry is None else {"Retry-After": str(retry)}
            response = _refusal(path, *server.explain(error), headers)
        seconds = time.perf_counter() - started
        server.answered.labels(path, response.status_code).inc()
        server.latency.labels(path).observe(seconds)
        response.headers["X-Request-ID"] = number
        record = {
            "time": round(time.time(), 3),
            "request": number,
            "method": request.method,
            "path": path,
        }
        log({**record, "status": response.status_code, "seconds": round(seconds, 4)})
        return response

    def _let_in(self, request: Request) -> None:
        """Check the head of a request: host, origin and key."""
        server = self._server
        path = self._path
        if not self._public:
            check_host(request)
        if not server.needs_key:
            check_origin(request)
        if server.is_stopping and path != "/metrics":
            raise RequestError(503, "the server is stopping", retry_after=5)
        is_read = request.method == "GET" and path not in _OPEN
        if is_read and not server.keys.check_head(request):
            raise RequestError(401, KEY_NEEDED)


async def _no_route(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown path, or with a wrong method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    headers = error.headers or {}
    why = f"nothing is at {path}: GET /spec has the paths"
    if error.status_code == 405:
        why = f"{path} takes no {request.method}: send {headers['Allow']}"
    return _refusal(path, error.status_code, why, headers)


def _refusal(
    path: str, status: int, message: str, headers: Mapping[str, str]
) -> Response:
    """Format an error for OpenAI's or LibreTranslate's interface."""
    body = openai_error(status, message) if path.startswith("/v1/") else message
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
    return JSONResponse(
        {"status": "ok", "workers": server.num_workers, "models": models}
    )


async def _metrics(server: Server, request: Request) -> Response:
    """Figures for Prometheus."""
    return Response(
        generate_latest(server.registry),
        media_type="text/plain; version=0.0.4; charset=utf-8",
    )


async def _reload(server: Server, request: Request) -> Response:
    """Open the models anew from where they were found, and answer with these once they are ready."""
    await server.fields(request)
    if not server.needs_key:
        raise RequestError(
            403,
            "without keys anybody could do that: start the server with keys, or send SIGHUP",
        )
    return JSONResponse({"models": await server.reload()})


async def _specification(server: Server, request: Request) -> Response:
    """What the server answers, as OpenAPI."""
    paths: dict[str, dict[str, Any]] = {}
    for route in request.app.routes:
        about = {
            "summary": route.endpoint.summary,
            "responses": {"200": {"description": "JSON"}},
        }
        for method in route.methods - {"HEAD"}:
            paths.setdefault(route.path, {})[method.lower()] = about
    info = {"title": "triptych", "version": "1"}
    return JSONResponse({"openapi": "3.1.0", "info": info, "paths": paths})
