"""Keys of configurations read by configuration classes of `transformers`, or by code of its models.

The keys are data (`class_fields.json`, made by `tests/checkpoints/class_fields.py`), so `transformers` need
not be installed.
"""

import json
from collections.abc import Collection, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from triptych.core.storage.settings import Settings


def known_keys(settings: Settings) -> Collection[str] | None:
    """Return the keys read from a record of a class, or None if `transformers` lacks such a class."""
    kind = _kind_of(settings)
    if kind is None:
        return None
    return frozenset(_file()["of_all"]).union(_file()["classes"][kind]["keys"])


def is_known(path: str, keys: Collection[str]) -> bool:
    """Return True if a key is known; a path of keys is known if all of its keys are."""
    return all(name in keys for name in path.split("."))


def _kind_of(settings: Settings) -> str | None:
    """Return the `model_type` of a record, or that of the corresponding part of the outer class."""
    classes = _file()["classes"]
    kind = settings.outermost.record.get("model_type")
    if settings.path:
        for name in settings.path.split("."):
            kind = classes[kind]["parts"].get(name) if kind in classes else None
        kind = settings.record.get("model_type", kind)
    return kind if isinstance(kind, str) and kind in classes else None


@cache
def _file() -> Mapping[str, Any]:
    path = files("triptych.core.checkpoints") / "class_fields.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
