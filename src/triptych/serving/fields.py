"""The fields of a request's body, each checked for its type."""

import json
from collections.abc import Mapping
from typing import Any, final

from starlette.requests import Request

from triptych.serving.limits import RequestError

_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")


@final
class Fields(dict[str, Any]):
    """The fields by name; `RequestError` if one has the wrong type."""

    @classmethod
    async def read(cls, request: Request, max_bytes: int) -> "Fields":
        """Read JSON, whatever type it is sent as, or a form, whose fields may come twice."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > max_bytes:
                raise RequestError(413, f"the body has more than {max_bytes:,} bytes")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind in _FORMS and not body.lstrip().startswith(b"{"):

            async def replay() -> Mapping[str, Any]:
                return {"type": "http.request", "body": bytes(body), "more_body": False}

            form = await Request(request.scope, replay).form(max_files=0, max_fields=1000)  # type: ignore[arg-type]
            values = {name: form.getlist(name) for name in form}
            return cls({name: found[0] if len(found) == 1 else found for name, found in values.items()})
        try:
            fields = json.loads(body or b"{}")
            json.dumps(fields, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise RequestError(400, "the body has half of a surrogate pair, which is no character") from None
        except (ValueError, RecursionError):
            raise RequestError(400, "the body is not JSON") from None
        if not isinstance(fields, dict):
            raise RequestError(400, "the body is not a JSON object")
        return cls(fields)

    def text(self, name: str, default: str | None = None) -> str:
        """A text, which may be empty where the default is."""
        found = self.get(name, default)
        if not isinstance(found, str) or (not found and default != ""):
            raise RequestError(400, f"{name}: give a text")
        return found

    def number(self, name: str, least: int, most: int, default: int | None = None) -> int:
        """A whole number."""
        found = default if self.get(name) is None else self[name]
        if type(found) is not int or not least <= found <= most:
            raise RequestError(400, f"{name}: give a number from {least} to {most}")
        return found
