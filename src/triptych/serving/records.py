"""Our own records as JSON: attention weights, measures of heads, and one row of a head step by step."""

import json
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from triptych.attending.saving import json_pieces
from triptych.face import Model
from triptych.serving.limits import RequestError
from triptych.serving.models import Asking
from triptych.serving.server import Server


async def attend(server: Server, request: Request) -> Response:
    """Attention weights of a text: `model`, `text`, of an encoder-decoder `target`; `heads`, as `3.2`."""

    def ask(fields: dict[str, Any]) -> Callable[[Model], str]:
        text, target = _text(fields, "text"), fields.get("target")
        heads = _text({"heads": "*"} | fields, "heads")

        def found(model: Model) -> str:
            (one,) = model.attend([text], None if target is None else [str(target)])
            return "".join(json_pieces(one.saved(heads)))

        return found

    return await _answered(server, request, "run", ask)


async def inspect(server: Server, request: Request) -> Response:
    """Measures of the heads, from the weights: `model`, `layers`, `heads`."""

    def ask(fields: dict[str, Any]) -> Callable[[Model], str]:
        layers, heads = _numbers(fields, "layers"), _numbers(fields, "heads")
        return lambda model: _json(model.inspect(layers=layers, heads=heads).record())

    return await _answered(server, request, "read", ask)


async def steps(server: Server, request: Request) -> Response:
    """How a head computes one row of attention: `model`, `text`, `layer`, `head`, `query`."""

    def ask(fields: dict[str, Any]) -> Callable[[Model], str]:
        text, layer, head = _text(fields, "text"), fields.get("layer"), fields.get("head")
        query = fields.get("query", -1)
        if not isinstance(layer, int | str) or not isinstance(head, int) or not isinstance(query, int):
            raise RequestError(400, "layer, head and query: give a layer's number or name, and two numbers")
        return lambda model: _json(model.attend(text).steps(layer, head, query).record())

    return await _answered(server, request, "run", ask)


async def _answered(
    server: Server, request: Request, can: str, ask: Callable[[dict[str, Any]], Callable[[Model], str]]
) -> Response:
    fields = await server.fields(request)
    model = server.model(fields.get("model"), can)
    (found,) = await server.compute(request, Asking(model), [ask(fields)])
    # Where the model lies is no business of a client.
    own = json.dumps(model.model.name)[1:-1]
    return Response(found.replace(own, model.name), media_type="application/json")


def _json(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False)


def _text(fields: dict[str, Any], name: str) -> str:
    text = fields.get(name)
    if not isinstance(text, str) or not text:
        raise RequestError(400, f"{name}: give a text")
    return text


def _numbers(fields: dict[str, Any], name: str) -> list[int] | None:
    given = fields.get(name)
    if given is not None and not (isinstance(given, list) and all(type(one) is int for one in given)):
        raise RequestError(400, f"{name}: give a list of numbers")
    return given


ROUTES = (("POST", "/v1/attend", attend), ("POST", "/v1/inspect", inspect), ("POST", "/v1/steps", steps))
