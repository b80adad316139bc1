"""Access checks: keys, hosts and origins."""

import hmac
import ipaddress
import re
from collections.abc import Sequence
from typing import final
from urllib.parse import urlsplit

from starlette.requests import Request

from triptych.serving.limits import RequestError

KEY_NEEDED = "a key is needed: send api_key or Authorization: Bearer"
URL_ENCODED = "application/x-www-form-urlencoded"
_FORMS = (URL_ENCODED, "multipart/form-data")
_NO_TYPE = ""


@final
class Keys:
    """Keys of a server; without keys, every client of this machine has access."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    @property
    def are_needed(self) -> bool:
        return bool(self._keys)

    def check_head(self, request: Request) -> bool:
        """Check the key in the headers of a request; return False if a needed key is missing there."""
        key = _key_in(request)
        if not self._keys:
            return True
        if key is None:
            return False
        self._require_known(key)
        return True

    def check_body(self, given: object) -> None:
        """Check the key in the body of a request without a key in its headers."""
        if given is None or given == "":
            raise RequestError(401, KEY_NEEDED)
        self._require_known(str(given))

    def _require_known(self, key: str) -> None:
        if not sum(hmac.compare_digest(key.encode(), own) for own in self._keys):
            raise RequestError(403, "this key is not known")


def _key_in(request: Request) -> str | None:
    """Return the key in the headers; None if it is missing."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return request.headers.get("x-api-key", "").strip() or None


def check_host(request: Request) -> None:
    """Check that the Host header is a loopback name or address.

    DNS rebinding points an attacker's host name to this machine; for a browser, page and server then have the
    same origin.
    """
    host = request.headers.get("host", "")
    if not _is_loopback(re.sub(r":\d+$", "", host)):
        raise RequestError(
            400, f"Host: {host} is not this machine: ask localhost or 127.0.0.1"
        )


def check_origin(request: Request) -> None:
    """Refuse requests from pages of another origin, for a server without keys.

    A browser allows any page to send a form or plain text to any address without a preflight request.
    """
    origin = request.headers.get("origin")
    host = request.headers.get("host", "")
    if origin is not None and _netloc(origin) != host.lower():
        raise RequestError(
            403,
            f"Origin: {origin} may not ask: start the server with keys for other pages",
        )
    if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        raise RequestError(
            403,
            "a page of another origin may not ask: start the server with keys for it",
        )
    kind = content_type(request)
    if (
        request.method == "POST"
        and kind not in (_NO_TYPE, *_FORMS)
        and not _is_json(kind)
    ):
        raise RequestError(
            415,
            f"Content-Type: {kind} is none of application/json and {', '.join(_FORMS)}",
        )


def _netloc(origin: str) -> str | None:
    """Return the host and port of an origin in lower case; None if the origin is invalid."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def content_type(request: Request) -> str:
    """Return the type of a request's body, without its parameters."""
    return (
        request.headers.get("content-type", _NO_TYPE).partition(";")[0].strip().lower()
    )


def is_form(request: Request) -> bool:
    """Return True if the body is a form."""
    return content_type(request) in _FORMS


def _is_json(kind: str) -> bool:
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


def _is_loopback(host: str) -> bool:
    """Return True if a name or an address is always this machine's; names are compared without case."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(
            host.removeprefix("[").removesuffix("]")
        ).is_loopback
    except ValueError:
        return False
