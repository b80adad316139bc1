"""Triptych's records as JSON: attention weights, measures of heads, and one row of a head step by step."""

import json
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from triptych.model import Model
from triptych.seeing.attending import json_pieces
from triptych.serving.limits import RequestError
from triptych.serving.request_fields import Fields
from triptych.serving.served_models import Asking
from triptych.serving.server import Server
from triptych.serving.worker import Item


async def answer_attend(server: Server, request: Request) -> Response:
    """Attention weights of a text: `model`, `text`, of an encoder-decoder `target`; `heads`, as `3.2`."""
    fields = await server.fields(request)
    text = fields.text("text")
    heads = fields.text("heads", "*")
    target = None if fields.get("target") is None else fields.text("target")
    limits = server.limits
    # Serialisation in pieces stops soon after the client disconnects.

    def ask(model: Model, item: Item) -> str:
        targets = None if target is None else [target]
        (one,) = model.attend([text], targets, max_tokens=limits.max_attended)
        saved = one.saved(heads)
        count = sum(part.num_weights for part in saved.parts)
        if count > limits.max_weights:
            why = f"these heads have {count:,} weights: at most {limits.max_weights:,} in an answer"
            raise RequestError(413, f"{why}; choose heads")
        pieces = list[str]()
        for piece in json_pieces(saved):
            item.require_waited_for()
            pieces.append(piece)
        return "".join(pieces)

    return await _answered(server, request, fields, "run", ask)


async def answer_inspect(server: Server, request: Request) -> Response:
    """Measures of the heads, from the weights: `model`, `layers`, `heads`."""
    fields = await server.fields(request)
    # `type(one) is int` refuses true and false: bool is a subclass of int.
    for name in ("layers", "heads"):
        given = fields.get(name)
        if given is not None and not (
            isinstance(given, list) and all(type(one) is int for one in given)
        ):
            raise RequestError(400, f"{name}: give a list of numbers")

    def ask(model: Model, item: Item) -> str:
        def stop_if_left(*_: object) -> None:
            item.require_waited_for()

        layers = fields.get("layers")
        heads = fields.get("heads")
        return _strict_json(
            model.inspect(layers=layers, heads=heads, progress=stop_if_left).record()
        )

    return await _answered(server, request, fields, "read", ask)


async def answer_steps(server: Server, request: Request) -> Response:
    """How a head computes one row of attention: `model`, `text`, `layer`, `head`, `query`."""
    fields = await server.fields(request)
    text = fields.text("text")
    layer = fields.get("layer")
    head = fields.get("head")
    query = fields.get("query", -1)
    if (
        not isinstance(layer, int | str)
        or not isinstance(head, int)
        or not isinstance(query, int)
    ):
        raise RequestError(
            400, "layer, head and query: give a layer's number or name, and two numbers"
        )
    most = server.limits.max_attended

    # The model checks the values of layer, head and query.
    def ask(model: Model, item: Item) -> str:
        return _strict_json(
            model.attend(text, max_tokens=most).steps(layer, head, query).record()
        )

    return await _answered(server, request, fields, "run", ask)


async def _answered(
    server: Server,
    request: Request,
    fields: Fields,
    can: str,
    ask: Callable[[Model, Item], str],
) -> Response:
    served = server.model(fields.get("model"), can)
    texts = [
        fields.get(name) for name in ("text", "target")
    ]  # `Fields.text` refuses other types
    server.check_texts([text for text in texts if isinstance(text, str)])
    (found,) = await server.compute(
        request, Asking(served), [lambda of, item: ask(of.model, item)]
    )
    return Response(found, media_type="application/json")


def _strict_json(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False)


ROUTES = (
    ("POST", "/v1/attend", answer_attend),
    ("POST", "/v1/inspect", answer_inspect),
    ("POST", "/v1/steps", answer_steps),
)
