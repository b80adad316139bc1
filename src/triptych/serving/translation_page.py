"""Page at `/`, and its JSON endpoints."""

import json
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from triptych.seeing.reports import make_page
from triptych.serving.exploring import Explorer, Shown, rounded
from triptych.serving.limits import RequestError
from triptych.serving.request_fields import Fields
from triptych.serving.served_models import Asking
from triptych.serving.server import Endpoint, Server

_MOST_CHANGES = 64
_LONGEST_CHANGE = 1000
# The page is self-contained: a browser allows it to connect only to this server.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
_POLICY += (
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def page(server: Server, request: Request) -> Response:
    """The page to see a model's attention, and to change it."""
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-store"}
    return HTMLResponse(
        make_page("explore.html", title="Explore attention", answers=None),
        headers=headers,
    )


async def models(server: Server, request: Request) -> Response:
    """What the page can show: the models, their layers and their heads."""
    await server.fields(request)
    found = []
    for served in server.models.values():
        (about,) = await server.compute(
            request, Asking(served), [lambda of, _: of.explorer.about()]
        )
        found.append({"name": served.name, "languages": served.languages, **about})
    return Response(_as_json({"models": found}), media_type="application/json")


def _explorer_endpoint(ask: Callable[[Explorer, Fields], Any], about: str) -> Endpoint:
    async def answer(server: Server, request: Request) -> Response:
        fields = await server.fields(request)
        served = server.model(fields.get("model"), "run")
        server.check_texts([fields.text("text", ""), fields.text("target", "")])
        # The JSON text is made by the thread that computes the answer, not by the event loop.
        (found,) = await server.compute(
            request, Asking(served), [lambda of, _: _as_json(ask(of.explorer, fields))]
        )
        return Response(found, media_type="application/json")

    answer.__doc__ = about
    return answer


def _changes(fields: Fields) -> tuple[str, ...]:
    found = fields.get("changes", [])
    if (
        not isinstance(found, list)
        or len(found) > _MOST_CHANGES
        or not all(map(_is_call, found))
    ):
        raise RequestError(
            400, f"changes: give a list of at most {_MOST_CHANGES} calls"
        )
    return tuple(found)


def _is_call(given: Any) -> bool:
    return isinstance(given, str) and len(given) <= _LONGEST_CHANGE


def _shown(fields: Fields) -> Shown:
    return Shown(fields.text("text"), fields.text("target", ""), _changes(fields))


def _layer_and_head(fields: Fields) -> tuple[str, int]:
    return fields.text("layer"), fields.number("head", 0, 1 << 16)


def _as_json(found: Any) -> str:
    return json.dumps(rounded(found), allow_nan=False, separators=(",", ":"))


# Questions to an `Explorer`, with a line for /spec, by the last part of the path.
QUESTIONS: dict[str, tuple[Callable[[Explorer, Fields], Any], str]] = {
    "write": (
        lambda of, given: of.write(
            given.text("text"), _changes(given), given.number("count", 1, 64)
        ),
        "A translation or continuation with alternatives: `text`, `changes`, `count`.",
    ),
    "view": (
        lambda of, given: of.view(_shown(given)),
        "All attention weights of a text, packed for the page.",
    ),
    "gallery": (
        lambda of, given: of.view(_shown(given), measured=True),
        "The same, with what each head does.",
    ),
    "row": (
        lambda of, given: of.row(
            _shown(given), *_layer_and_head(given), given.number("query", -1, 1 << 24)
        ),
        "One row of a head step by step, and what `changes` do to the next token and the loss.",
    ),
    "held_out": (
        lambda of, given: of.compare(
            _changes(given), given.number("parts", 1, 1 << 16)
        ),
        "What `changes` do to the loss on the held-out text, once `parts` are all of its parts.",
    ),
    "head": (
        lambda of, given: of.head(_changes(given), *_layer_and_head(given)),
        "The maps and forms of a head: pictures, spectra, singular directions.",
    ),
}

ROUTES = (
    ("GET", "/", page),
    ("POST", "/v1/explore/models", models),
    *(
        ("POST", f"/v1/explore/{name}", _explorer_endpoint(*question))
        for name, question in QUESTIONS.items()
    ),
)
