"""Conversations as text, rendered by the chat template of a checkpoint."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from triptych.errors import DataError, UsageError

_SCRIPT = Path(__file__).with_name("chat_rendering.py")
# Limit of wall-clock time, generous because the machine may be busy. The process also limits its CPU time.
_SECONDS = 60.0
# Field names for the reasoning of an answer; most templates use the first name, some the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class WrittenChat(NamedTuple):
    """The text of a conversation."""

    text: str
    # character ranges written by the template; all other characters are from messages
    own: list[tuple[int, int]]


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, object]],
    tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool,
    origin: str,
) -> WrittenChat:
    """Render a conversation as in `transformers`."""
    if not messages:
        raise UsageError("the conversation is empty; give at least one message")
    variables = {
        "messages": [_with_reasoning(message) for message in messages],
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    # A template is untrusted code, so it is rendered in a separate process with limits.
    try:
        request = json.dumps(
            {"template": template, "variables": variables, "tokens": tokens}
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"the messages cannot be given to a chat template: {error}"
        ) from None
    where = f"the chat template of {origin}"
    answer = _run_script(request, where)
    if "text" in answer:
        return WrittenChat(
            answer["text"], [(start, end) for start, end in answer["own"]]
        )
    message = " ".join(str(answer["message"]).split())
    match answer["error"]:
        case "refusal":
            raise UsageError(f"{where} refuses the messages: {message}")
        case "forbidden":
            raise DataError(
                f"{where} does what no template may: {message}; give a prompt without it"
            )
        case "too much":
            raise DataError(f"{where} is stopped: {message}; give a prompt without it")
        case _:
            raise DataError(f"{where} is damaged: {message}; give a prompt without it")


def _run_script(request: str, where: str) -> dict[str, Any]:
    """Run the rendering process; return its answer, a text or an error."""
    try:
        done = subprocess.run(
            # -P: modules in the script's folder must not shadow modules of libraries.
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
        # The system killed the process before it could report an error.
        raise DataError(
            f"{where} takes too much time or memory; give a prompt without it"
        ) from None
    return answer


def _with_reasoning(message: Mapping[str, object]) -> dict[str, object]:
    """Return the fields other than None, with an answer's reasoning under all names used by templates."""
    found = {name: value for name, value in message.items() if value is not None}
    reasoning = next((found[name] for name in _REASONING if name in found), None)
    if reasoning is None:
        return found
    return {"thinking": reasoning, **found, "reasoning_content": reasoning}
