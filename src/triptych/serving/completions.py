"""OpenAI's interface: models, completions (also as a stream) and chat completions."""

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from triptych.decoding import Continuation, GenerationOptions, SamplingOptions
from triptych.serving.limits import RequestError
from triptych.serving.models import Continuing, Scored, Scoring, ServedModel
from triptych.serving.server import Server

_MOST_SAMPLES, _MOST_LOGPROBS = 16, 20
# Tokens of a prompt whose logits are held at once.
_MOST_SCORED = 2048
# What OpenAI's interface has and this one computes only with these values.
_FIXED: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "best_of": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "tools": (None, []),
}


class _Asked(NamedTuple):
    """A request for completions: prompts as token ids, and what is wanted of each."""

    model: ServedModel
    prompts: list[list[int]]
    options: GenerationOptions | None  # None for no new token
    echo: bool
    logprobs: int | None
    stream: bool
    num_samples: int


async def list_models(server: Server, request: Request) -> Response:
    """The models that are served."""
    data = [
        {"id": name, "object": "model", "created": server.started, "owned_by": "triptych"}
        for name in server.models
    ]
    return JSONResponse({"object": "list", "data": data})


async def complete(server: Server, request: Request) -> Response:
    """Continue prompts, texts or token ids; with `echo`, `logprobs`, `n`, `seed`, `stop`, `stream`."""
    fields = await server.fields(request)
    model = server.model(fields.get("model"), "generate")
    asked = _asked(server, model, fields, _prompts(server, model, fields), "max_tokens", 16)
    head = _head(model, "cmpl", "text_completion")
    if asked.stream:
        return _streamed(server, request, asked, head, _completion_part)
    choices, usage = await _choices(server, request, asked)
    return JSONResponse({**head, "choices": choices, "usage": usage})


async def chat(server: Server, request: Request) -> Response:
    """Answer a conversation, written as the chat template of the model's tokenizer says."""
    fields = await server.fields(request)
    model, messages = server.model(fields.get("model"), "generate"), fields.get("messages")
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise RequestError(400, "messages: give a list of objects with role and content, a text each")
    server.check_texts([message["content"] for message in messages])
    tokenizer = model.generator.tokenizer
    (ids,) = tokenizer.encode([tokenizer.chat(messages)], add_special=False, parse_special=True)
    name = "max_tokens" if "max_tokens" in fields else "max_completion_tokens"
    asked = _asked(server, model, {**fields, "logprobs": None, "echo": False}, [ids], name, 512)
    if asked.stream:
        head = _head(model, "chatcmpl", "chat.completion.chunk")
        return _streamed(server, request, asked, head, _chat_part)
    found, usage = await _choices(server, request, asked)
    choices = [
        {
            "index": one["index"],
            "message": {"role": "assistant", "content": one["text"]},
            "logprobs": None,
            "finish_reason": one["finish_reason"],
        }
        for one in found
    ]
    return JSONResponse({**_head(model, "chatcmpl", "chat.completion"), "choices": choices, "usage": usage})


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(name), str) for name in ("role", "content")
    )


def _prompts(server: Server, model: ServedModel, fields: dict[str, Any]) -> list[list[int]]:
    generator = model.generator
    return read_texts(
        server, fields.get("prompt"), "prompt", generator.encode, generator.tokenizer.vocab_size
    )


def read_texts(
    server: Server, given: Any, name: str, encode: Callable[[str], list[int]], vocab_size: int
) -> list[list[int]]:
    """A text or token ids, or several of either, as token ids."""
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        given = [given]
    if not isinstance(given, list) or not given or len(given) > server.limits.max_items:
        raise RequestError(
            400, f"{name}: give a text, token ids, or a list of at most {server.limits.max_items}"
        )
    texts = [one for one in given if isinstance(one, str)]
    server.check_texts(texts)
    found = []
    for one in given:
        if isinstance(one, str):
            found.append(encode(one))
        elif (
            isinstance(one, list)
            and one
            and all(type(token) is int and 0 <= token < vocab_size for token in one)
        ):
            found.append(one)
        else:
            raise RequestError(400, f"{name}: token ids are numbers from 0 to {vocab_size - 1}")
    if sum(map(len, found)) > server.limits.max_characters:
        raise RequestError(413, f"{name}: at most {server.limits.max_characters:,} tokens in a request")
    return found


def _asked(
    server: Server,
    model: ServedModel,
    fields: dict[str, Any],
    prompts: list[list[int]],
    name_of_limit: str,
    default: int,
) -> _Asked:
    for name, values in _FIXED.items():
        if fields.get(name) not in values:
            raise RequestError(400, f"{name} is not supported: leave it out")
    most = _number(fields, name_of_limit, default, 0, server.limits.max_new_tokens)
    samples = _number(fields, "n", 1, 1, _MOST_SAMPLES)
    logprobs = None if fields.get("logprobs") is None else _number(fields, "logprobs", 0, 0, _MOST_LOGPROBS)
    echo, stream = fields.get("echo") is True, fields.get("stream") is True
    if stream and (echo or logprobs is not None):
        raise RequestError(400, "stream goes without echo and logprobs: leave them out")
    stop = fields.get("stop") or ()
    try:
        sampling = SamplingOptions(
            _float(fields, "repetition_penalty", 1.0),
            _float(fields, "temperature", 1.0),
            None if fields.get("top_k") is None else int(fields["top_k"]),
            *(None if fields.get(name) is None else float(fields[name]) for name in ("top_p", "min_p")),
        )
        # Without a seed every request draws its own; greedy requests draw nothing and are computed together.
        seed = fields.get("seed")
        seed = (
            0 if sampling.is_greedy else random.SystemRandom().getrandbits(31) if seed is None else int(seed)
        )
        stops = (stop,) if isinstance(stop, str) else tuple(map(str, stop))
        options = GenerationOptions(
            max(most, 1), sampling, seed, 1 if sampling.is_greedy else samples, stop_texts=stops
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError(400, str(error)) from None
    return _Asked(model, prompts, options if most else None, echo, logprobs, stream, samples)


def _number(fields: dict[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = default if fields.get(name) is None else fields[name]
    if type(value) is not int or not least <= value <= most:
        raise RequestError(400, f"{name}: give a number from {least} to {most}")
    return value


def _float(fields: dict[str, Any], name: str, default: float) -> float:
    return default if fields.get(name) is None else float(fields[name])


async def _choices(
    server: Server, request: Request, asked: _Asked
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """What the prompts are continued by, prompt by prompt, and what it took."""
    scored: list[Scored | None] = [None] * len(asked.prompts)
    if asked.echo and asked.logprobs is not None:
        most = min(asked.model.generator.model.context or _MOST_SCORED, _MOST_SCORED)
        if (longest := max(map(len, asked.prompts))) > most + 1:
            raise RequestError(
                400, f"prompt: {longest:,} tokens; with echo and logprobs at most {most + 1:,}"
            )
        scored = await server.compute(request, Scoring(asked.model, max(asked.logprobs, 1)), asked.prompts)
    continued: list[list[Continuation]] = [[] for _ in asked.prompts]
    if asked.options is not None:
        continued = await server.compute(request, Continuing(asked.model, asked.options), asked.prompts)
    choices, tokens = list[dict[str, Any]](), 0
    for ids, of_prompt, score in zip(asked.prompts, continued, scored, strict=True):
        for sample in range(asked.num_samples):
            # Greedy samples are all alike.
            one = of_prompt[min(sample, len(of_prompt) - 1)] if of_prompt else None
            tokens += 0 if one is None else len(one.ids)
            choices.append(_choice(asked, len(choices), ids, one, score))
    read = sum(map(len, asked.prompts))
    server.count_tokens(read, tokens)
    return choices, {"prompt_tokens": read, "completion_tokens": tokens, "total_tokens": read + tokens}


def _choice(
    asked: _Asked, index: int, ids: Sequence[int], one: Continuation | None, scored: Scored | None
) -> dict[str, Any]:
    tokenizer = asked.model.generator.tokenizer

    def shown(tokens: Sequence[int]) -> list[str]:
        return [piece.replace("▁", " ") for piece in tokenizer.pieces(tokens)]

    prompt = tokenizer.decode([ids])[0] if asked.echo else ""
    text = prompt + ("" if one is None else one.text)
    logprobs = None
    if asked.logprobs is not None:
        pieces, found, tops = list[str](), list[float | None](), list[dict[str, float] | None]()
        if scored is not None:
            pieces += shown(ids)
            found += [None, *scored.log_probs]
            tops.append(None)
            for token, log_prob, top in zip(pieces[1:], scored.log_probs, scored.tops, strict=True):
                names = shown([best for best, _ in top])
                tops.append({**dict(zip(names, (value for _, value in top), strict=True)), token: log_prob})
        if one is not None:
            own = shown(one.ids)
            pieces += own
            found += one.log_probs[: len(own)]
            tops += [{piece: value} for piece, value in zip(own, one.log_probs, strict=False)]
        offsets = [*accumulate(map(len, pieces), initial=0)][: len(pieces)]
        logprobs = {
            "tokens": pieces,
            "token_logprobs": found,
            "top_logprobs": tops,
            "text_offset": offsets,
        }
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": _finish(one)}


def _head(model: ServedModel, prefix: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model.name,
    }


# From a choice's number, its text and why it ends, to the choice in a part of a stream.
_Part = Callable[[int, str, str | None], dict[str, Any]]


def _completion_part(index: int, text: str, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


def _chat_part(index: int, text: str, finish: str | None) -> dict[str, Any]:
    delta = {"role": "assistant", "content": text} if text else {}
    return {"index": index, "delta": delta, "finish_reason": finish}


def _streamed(server: Server, request: Request, asked: _Asked, head: dict[str, Any], part: _Part) -> Response:
    """Server-sent events: the text of every choice as it comes, then why each ended."""
    if asked.options is None:
        raise RequestError(400, "stream: give max_tokens of at least 1")
    job = Continuing(asked.model, asked.options)
    parts: asyncio.Queue[tuple[int, int, str] | None] = asyncio.Queue()
    started = time.perf_counter()

    def event(number: int, sample: int, text: str, finish: str | None = None) -> str:
        return _event({**head, "choices": [part(number * asked.num_samples + sample, text, finish)]})

    async def events() -> AsyncIterator[str]:
        given: dict[tuple[int, int], int] = {}  # characters
        computing = asyncio.ensure_future(
            server.compute(
                request, job, asked.prompts, lambda number, told: parts.put_nowait((number, *told))
            )
        )
        computing.add_done_callback(lambda _: parts.put_nowait(None))
        try:
            while (arrived := await parts.get()) is not None:
                number, sample, text = arrived
                if not given:
                    server.first.observe(time.perf_counter() - started)
                given[number, sample] = given.get((number, sample), 0) + len(text)
                yield event(number, sample, text)
            found: list[list[Continuation]] = await computing
        except Exception as error:  # noqa: BLE001 (the answer has begun, so that it says what happened)
            status, message = server.explain(error)
            yield _event({"error": {"message": message, "type": "server_error", "code": status}})
            return
        finally:
            computing.cancel()
        for number, of_prompt in enumerate(found):
            for sample in range(asked.num_samples):
                one = of_prompt[min(sample, len(of_prompt) - 1)]
                if rest := one.text[given.get((number, sample), 0) :]:
                    yield event(number, sample, rest)
                yield event(number, sample, "", _finish(one))
        server.count_tokens(sum(map(len, asked.prompts)), sum(len(o.ids) for ones in found for o in ones))
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _finish(one: Continuation | None) -> str:
    return "length" if one is None or one.finish in ("length", "positions") else "stop"


def _event(record: dict[str, Any]) -> str:
    return f"data: {json.dumps(record, ensure_ascii=False)}\n\n"


ROUTES = (
    ("GET", "/v1/models", list_models),
    ("POST", "/v1/completions", complete),
    ("POST", "/v1/chat/completions", chat),
)
