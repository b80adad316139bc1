"""Conversations as text, by the chat template of a checkpoint."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from triptych.errors import DataError, UsageError

_SCRIPT = Path(__file__).with_name("chat_rendering.py")
# By the clock: the process starts in a tenth of a second, but the machine may be busy. Its own limit is on
# the time that it computes.
_SECONDS = 60.0
# Names under which the reasoning of an answer is given; templates read the first, some the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class WrittenChat(NamedTuple):
    """The text of a conversation."""

    text: str
    # beginnings and ends of what the template itself wrote; messages wrote the rest
    own: list[tuple[int, int]]


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, object]],
    tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool,
    origin: str,
) -> WrittenChat:
    """The text of a conversation, as `transformers` renders it."""
    if not messages:
        raise UsageError("the conversation is empty; give at least one message")
    variables = {
        "messages": [_with_reasoning(message) for message in messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        request = json.dumps({"template": template, "variables": variables, "tokens": tokens})
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the messages cannot be given to a chat template: {error}") from None
    where = f"the chat template of {origin}"
    answer = _run_script(request, where)
    if "text" in answer:
        return WrittenChat(answer["text"], [(start, end) for start, end in answer["own"]])
    message = " ".join(str(answer["message"]).split())
    match answer["error"]:
        case "refusal":
            raise UsageError(f"{where} refuses the messages: {message}")
        case "forbidden":
            raise DataError(f"{where} does what no template may: {message}; give a prompt without it")
        case "too much":
            raise DataError(f"{where} is stopped: {message}; give a prompt without it")
        case _:
            raise DataError(f"{where} is damaged: {message}; give a prompt without it")


def _run_script(request: str, where: str) -> dict[str, Any]:
    """What the process that renders says: a text, or what went wrong."""
    try:
        done = subprocess.run(
            # -P keeps modules of the script's folder from taking the place of others.
            [sys.executable, "-P", str(_SCRIPT)],
            input=request.encode(),
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DataError(
            f"{where} runs for more than {_SECONDS:.0f} seconds; give a prompt without it"
        ) from None
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        # The system ended it: it has no way to say why.
        raise DataError(f"{where} takes too much time or memory; give a prompt without it") from None
    return answer


def _with_reasoning(message: Mapping[str, object]) -> dict[str, object]:
    """The fields that say something; an answer's reasoning under every name that templates read."""
    found = {name: value for name, value in message.items() if value is not None}
    reasoning = next((found[name] for name in _REASONING if name in found), None)
    if reasoning is None:
        return found
    return {"thinking": reasoning, **found, "reasoning_content": reasoning}
