"""Rules for all documented fields of OpenAI's completions, chats and embeddings.

`docs/reference/openai.md` has the table. An ignored field cannot change the answer. A followed field needs a
value of the right type. Any other documented field is refused, except with a value equivalent to its absence.
Undocumented fields are refused.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from triptych.serving.limits import RequestError
from triptych.serving.request_fields import Fields


class Kind(NamedTuple):
    """Type of values. Values of another type are refused, not converted."""

    what: str  # description for error messages
    holds: Callable[[Any], bool]


class Followed(NamedTuple):
    """Field with the effect documented by OpenAI."""

    kind: Kind


class Ignored(NamedTuple):
    """Field without an effect on the answer."""


class Only(NamedTuple):
    """Field restricted to values without an effect."""

    values: tuple[Any, ...]


Rule = Followed | Ignored | Only


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _one_of(*values: str) -> Kind:
    return Kind(
        " or ".join(values), lambda value: isinstance(value, str) and value in values
    )


_TEXT = Kind("a text", lambda value: isinstance(value, str))
_TEXTS = Kind(
    "a text, or a list of texts",
    lambda value: isinstance(value, str) or _are_texts(value),
)
_WHOLE = Kind("a whole number", lambda value: type(value) is int)
_NUMBER = Kind("a number", lambda value: type(value) in (int, float))
_FLAG = Kind("true or false", lambda value: isinstance(value, bool))
_OBJECT = Kind("an object", lambda value: isinstance(value, dict))
# Checked by the code that reads the field.
_READ_LATER = Kind("", lambda value: True)

_IGNORED = Ignored()
# Fields of all kinds of requests; `api_key` is triptych's extension.
_OF_ALL: dict[str, Rule] = {
    "model": Followed(_TEXT),
    "user": _IGNORED,
    "api_key": Followed(_TEXT),
}
# Fields of completions and chats; the last two rows are triptych's extensions.
_OF_BOTH: dict[str, Rule] = {
    **_OF_ALL,
    **dict.fromkeys(("n", "seed"), Followed(_WHOLE)),
    **dict.fromkeys(("temperature", "top_p"), Followed(_NUMBER)),
    "stop": Followed(_TEXTS),
    "stream": Followed(_FLAG),
    "stream_options": Followed(_OBJECT),
    "presence_penalty": Only((0,)),
    "frequency_penalty": Only((0,)),
    "logit_bias": Only(({},)),
    "top_k": Followed(_WHOLE),
    **dict.fromkeys(("min_p", "repetition_penalty"), Followed(_NUMBER)),
}
COMPLETIONS: Mapping[str, Rule] = {
    **_OF_BOTH,
    "prompt": Followed(_READ_LATER),
    **dict.fromkeys(("max_tokens", "best_of", "logprobs"), Followed(_WHOLE)),
    "echo": Followed(_FLAG),
    "suffix": Only(("",)),
    "special_tokens": Followed(_one_of("tokens", "text")),
}
CHAT: Mapping[str, Rule] = {
    **_OF_BOTH,
    "messages": Followed(_READ_LATER),
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "top_logprobs"), Followed(_WHOLE)
    ),
    "logprobs": Followed(_FLAG),
    **dict.fromkeys(
        ("metadata", "store", "service_tier", "safety_identifier", "prediction"),
        _IGNORED,
    ),
    **dict.fromkeys(
        ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), _IGNORED
    ),
    "parallel_tool_calls": _IGNORED,
    "response_format": Only(({"type": "text"},)),
    "modalities": Only((["text"],)),
    "tools": Only(([],)),
    "tool_choice": Only(("none", "auto")),
    "functions": Only(([],)),
    "function_call": Only(("none", "auto")),
    "reasoning_effort": Only(("none",)),
    "verbosity": Only(("medium",)),
    **dict.fromkeys(("audio", "moderation", "web_search_options"), Only(())),
}
EMBEDDINGS: Mapping[str, Rule] = {
    **_OF_ALL,
    "input": Followed(_READ_LATER),
    "encoding_format": Followed(_one_of("float", "base64")),
    "dimensions": Followed(_WHOLE),
}


def check_fields(fields: Fields, rules: Mapping[str, Rule]) -> None:
    """Refuse a request with an unsupported field or value."""
    for name, value in fields.items():
        rule = rules.get(name)
        if rule is None:
            raise RequestError(
                400, f"{name[:64]} is no field of this request: leave it out"
            )
        if value is None:
            continue
        if isinstance(rule, Followed) and not rule.kind.holds(value):
            raise RequestError(400, f"{name}: give {rule.kind.what}")
        # True and False are not numbers, although Python compares them equal to 1 and 0.
        if isinstance(rule, Only) and (
            isinstance(value, bool) or value not in rule.values
        ):
            kind = value.get("type") if isinstance(value, dict) else None
            what = f"{name} {kind[:64]}" if isinstance(kind, str) else name
            raise RequestError(400, f"{what} is not supported: leave it out")


def flag(fields: Mapping[str, Any], name: str) -> bool:
    """Read a boolean field; a missing field is False."""
    found = fields.get(name)
    if found is not None and not _FLAG.holds(found):
        raise RequestError(400, f"{name}: give {_FLAG.what}")
    return found is True
