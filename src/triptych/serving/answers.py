"""JSON answers, serialised in pieces outside the event loop: a large answer does not delay other answers."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from starlette.responses import Response


async def json_answer(make: Callable[[], Mapping[str, Any]]) -> Response:
    """Make a record and serialise it in another thread."""
    return Response(
        await asyncio.to_thread(lambda: json_text(make())),
        media_type="application/json",
    )


def json_text(record: Mapping[str, Any]) -> str:
    """Serialise a record, with lists item by item: `json.dumps` of one value blocks all other threads."""
    return "".join(_pieces(record))


def _pieces(record: Mapping[str, Any]) -> Iterator[str]:
    before = "{"
    for name, value in record.items():
        yield f"{before}{_dumped(name)}:"
        before = ","
        if isinstance(value, list):
            yield "["
            yield from (
                f"{',' if number else ''}{_dumped(item)}"
                for number, item in enumerate(value)
            )
            yield "]"
        else:
            yield _dumped(value)
    yield "}" if record else "{}"


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
