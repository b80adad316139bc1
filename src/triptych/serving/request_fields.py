"""Fields of a request's body, with checks of their types."""

import gc
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, final

from starlette.datastructures import UploadFile
from starlette.requests import Request

from triptych.serving.doors import URL_ENCODED, content_type, is_form
from triptych.serving.limits import RequestError

_MOST_FIELDS = 1000


class Uploaded(NamedTuple):
    """File in a form."""

    name: str
    content: bytes


@final
class Fields(dict[str, Any]):
    """Fields by name; a field of the wrong type raises `RequestError`."""

    @classmethod
    async def read(
        cls, request: Request, max_bytes: int, max_files: int = 0
    ) -> "Fields":
        """Read the body: JSON with any content type, or a form; repeated fields of a form become lists."""
        # `json.dumps` checks that every text can be encoded in UTF-8.
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > max_bytes:
                raise RequestError(413, f"the body has more than {max_bytes:,} bytes")
        if is_form(request) and not body.lstrip().startswith(b"{"):
            return cls(await _fields_of_form(request, bytes(body), max_files))
        try:
            with _without_collections():
                fields = json.loads(body or b"{}")
                json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise RequestError(
                400, "the body has half of a surrogate pair, which is no character"
            ) from None
        except (ValueError, RecursionError):
            raise RequestError(400, "the body is not JSON") from None
        if not isinstance(fields, dict):
            raise RequestError(400, "the body is not a JSON object")
        return cls(fields)

    def text(self, name: str, default: str | None = None) -> str:
        """Read a text; an empty text is allowed only if the default is ""."""
        found = self.get(name, default)
        if not isinstance(found, str) or (not found and default != ""):
            raise RequestError(400, f"{name}: give a text")
        return found

    def number(
        self, name: str, least: int, most: int, default: int | None = None
    ) -> int:
        """Read an integer between `least` and `most`."""
        found = default if self.get(name) is None else self[name]
        if type(found) is not int or not least <= found <= most:
            raise RequestError(400, f"{name}: give a number from {least} to {most}")
        return found


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable garbage collection inside the block: it took most of the time of a body with many lists."""
    were_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if were_on:
            gc.enable()


async def _fields_of_form(
    request: Request, body: bytes, max_files: int
) -> dict[str, Any]:
    # Separators are counted before the form is parsed.
    if content_type(request) == URL_ENCODED and body.count(b"&") >= _MOST_FIELDS:
        raise RequestError(400, f"the form has more than {_MOST_FIELDS:,} fields")

    async def replay() -> Mapping[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    try:
        form = await Request(request.scope, replay).form(  # type: ignore[arg-type]
            max_files=max_files, max_fields=_MOST_FIELDS
        )
    except (ValueError, LookupError):  # of another or an unknown encoding
        raise RequestError(400, "the form cannot be read: send UTF-8") from None
    values: dict[str, list[Any]] = {name: form.getlist(name) for name in form}
    files = dict[str, Any]()
    for name in [
        name for name, own in values.items() if isinstance(own[0], UploadFile)
    ]:
        (file,) = values.pop(name)[:1]
        files[name] = Uploaded(file.filename or "", await file.read())
    await form.close()
    found = {name: own[0] if len(own) == 1 else own for name, own in values.items()}
    try:
        json.dumps(
            [found, [file.name for file in files.values()]], ensure_ascii=False
        ).encode()
    except (UnicodeEncodeError, TypeError):
        raise RequestError(400, "the form has what is no text in UTF-8") from None
    return found | files
