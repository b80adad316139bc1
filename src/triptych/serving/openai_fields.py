"""Every field that OpenAI documents for completions and chat completions: followed, ignored, or refused.

`docs/reference/openai.md` has the table. What is ignored cannot change the answer. A field that could is
followed, or refused unless it has a value that changes nothing; so is one that nobody documents.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from triptych.serving.fields import Fields
from triptych.serving.limits import RequestError


class Followed(NamedTuple):
    """A field that does what OpenAI says of it."""


class Ignored(NamedTuple):
    """A field that cannot change the answer."""


class Only(NamedTuple):
    """A field with these values alone, which change nothing."""

    values: tuple[Any, ...]


Rule = Followed | Ignored | Only

_FOLLOWED, _IGNORED = Followed(), Ignored()
# What both kinds of requests have; the last row is our own.
_OF_BOTH: dict[str, Rule] = {
    **dict.fromkeys(
        ("model", "n", "seed", "stop", "stream", "stream_options", "temperature", "top_p", "logprobs"),
        _FOLLOWED,
    ),
    **dict.fromkeys(("top_k", "min_p", "repetition_penalty", "api_key"), _FOLLOWED),
    "user": _IGNORED,
    "presence_penalty": Only((0,)),
    "frequency_penalty": Only((0,)),
    "logit_bias": Only(({},)),
}
COMPLETIONS: Mapping[str, Rule] = {
    **_OF_BOTH,
    **dict.fromkeys(("prompt", "max_tokens", "echo", "best_of", "special_tokens"), _FOLLOWED),
    "suffix": Only(("",)),
}
CHAT: Mapping[str, Rule] = {
    **_OF_BOTH,
    **dict.fromkeys(("messages", "max_tokens", "max_completion_tokens", "top_logprobs"), _FOLLOWED),
    **dict.fromkeys(("metadata", "store", "service_tier", "safety_identifier", "prediction"), _IGNORED),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), _IGNORED),
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


def check_fields(fields: Fields, rules: Mapping[str, Rule]) -> None:
    """Refuse what a request asks for and would not get."""
    for name, value in fields.items():
        rule = rules.get(name)
        if rule is None:
            raise RequestError(400, f"{name[:64]} is no field of this request: leave it out")
        if isinstance(rule, Only) and value is not None and value not in rule.values:
            kind = value.get("type") if isinstance(value, dict) else None
            what = f"{name} {kind[:64]}" if isinstance(kind, str) else name
            raise RequestError(400, f"{what} is not supported: leave it out")


def flag(fields: Mapping[str, Any], name: str) -> bool:
    """Read a field that is true or false."""
    found = fields.get(name)
    if found is not None and not isinstance(found, bool):
        raise RequestError(400, f"{name}: give true or false")
    return found is True
