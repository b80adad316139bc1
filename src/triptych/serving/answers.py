"""Answers as JSON, written outside the event loop and in pieces, so that no large one holds up another."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from starlette.responses import Response


async def json_answer(make: Callable[[], Mapping[str, Any]]) -> Response:
    """Make a record and write it, both in another thread."""
    return Response(await asyncio.to_thread(lambda: json_text(make())), media_type="application/json")


def json_text(record: Mapping[str, Any]) -> str:
    """Write a record, its lists by their items: while one value is written, no other thread runs."""
    return "".join(_pieces(record))


def _pieces(record: Mapping[str, Any]) -> Iterator[str]:
    before = "{"
    for name, value in record.items():
        yield f"{before}{_dumped(name)}:"
        before = ","
        if isinstance(value, list):
            yield "["
            yield from (f"{',' if number else ''}{_dumped(item)}" for number, item in enumerate(value))
            yield "]"
        else:
            yield _dumped(value)
    yield "}" if record else "{}"


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
