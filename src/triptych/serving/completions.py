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

from triptych.attending.attention import readable
from triptych.decoding import Continuation, GenerationOptions, SamplingOptions
from triptych.serving.fields import Fields
from triptych.serving.limits import RequestError
from triptych.serving.models import Continuing, Scored, Scoring, ServedModel
from triptych.serving.server import Server

_MOST_SAMPLES, _MOST_LOGPROBS = 16, 20
# Tokens of a prompt whose logits are held at once.
_MOST_SCORED = 2048
# Options of OpenAI's interface that are accepted with these values only.
_FIXED: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "best_of": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "tools": (None, []),
}


class _Wanted(NamedTuple):
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
    generator = model.generator
    prompts = read_token_ids(server, fields, "prompt", generator.encode, generator.tokenizer.vocab_size)
    asked = _asked(server, model, fields, prompts, "max_tokens", 16)
    head = _frame(model, "cmpl", "text_completion")
    if asked.stream:
        return _streamed(server, request, asked, head, lambda text: {"text": text, "logprobs": None})
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
    asked = _asked(server, model, Fields(fields | {"logprobs": None, "echo": False}), [ids], name, 512)
    if asked.stream:
        head = _frame(model, "chatcmpl", "chat.completion.chunk")
        return _streamed(
            server,
            request,
            asked,
            head,
            lambda text: {"delta": {"role": "assistant", "content": text} if text else {}},
        )
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
    return JSONResponse({**_frame(model, "chatcmpl", "chat.completion"), "choices": choices, "usage": usage})


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(name), str) for name in ("role", "content")
    )


def read_token_ids(
    server: Server, fields: Fields, name: str, encode: Callable[[str], list[int]], vocab_size: int
) -> list[list[int]]:
    """A text or token ids, or several of either, as token ids."""
    given, most = fields.get(name), server.limits.max_items
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        given = [given]
    if not isinstance(given, list) or not given or len(given) > most:
        raise RequestError(400, f"{name}: give a text, token ids, or a list of at most {most}")
    server.check_texts([one for one in given if isinstance(one, str)])
    for one in given:
        are_ids = isinstance(one, list) and one and all(type(x) is int and 0 <= x < vocab_size for x in one)
        if not are_ids and not isinstance(one, str):
            raise RequestError(400, f"{name}: token ids are numbers from 0 to {vocab_size - 1}")
    found = [encode(one) if isinstance(one, str) else one for one in given]
    if sum(map(len, found)) > server.limits.max_characters:
        raise RequestError(413, f"{name}: at most {server.limits.max_characters:,} tokens in a request")
    return found


def _asked(
    server: Server, model: ServedModel, fields: Fields, prompts: list[list[int]], limit: str, default: int
) -> _Wanted:
    for name, values in _FIXED.items():
        if fields.get(name) not in values:
            raise RequestError(400, f"{name} is not supported: leave it out")
    most = fields.number(limit, 0, server.limits.max_new_tokens, default)
    samples = fields.number("n", 1, _MOST_SAMPLES, 1)
    logprobs = None if fields.get("logprobs") is None else fields.number("logprobs", 0, _MOST_LOGPROBS)
    echo, stream = fields.get("echo") is True, fields.get("stream") is True
    if stream and (echo or logprobs is not None):
        raise RequestError(400, "stream goes without echo and logprobs: leave them out")
    stop = fields.get("stop") or ()

    def given(name: str, kind: Callable[[Any], Any], default: Any = None) -> Any:
        return default if fields.get(name) is None else kind(fields[name])

    try:
        penalty, temperature = (given(name, float, 1.0) for name in ("repetition_penalty", "temperature"))
        rest = (given("top_k", int), given("top_p", float), given("min_p", float))
        sampling = SamplingOptions(penalty, temperature, *rest)
        # Without a seed every request draws its own; greedy requests draw nothing and are computed together.
        drawn = given("seed", int, random.SystemRandom().getrandbits(31))
        seed, num_samples = (0, 1) if sampling.is_greedy else (drawn, samples)
        stops = (stop,) if isinstance(stop, str) else tuple(map(str, stop))
        options = GenerationOptions(max(most, 1), sampling, seed, num_samples, stop_texts=stops)
    except (ValueError, TypeError, OverflowError) as error:
        raise RequestError(400, str(error)) from None
    return _Wanted(model, prompts, options if most else None, echo, logprobs, stream, samples)


async def _choices(
    server: Server, request: Request, asked: _Wanted
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """What the prompts are continued by, prompt by prompt, and what it took."""
    scored: list[Scored | None] = [None] * len(asked.prompts)
    if asked.echo and asked.logprobs is not None:
        most = min(asked.model.generator.model.context or _MOST_SCORED, _MOST_SCORED)
        if (longest := max(map(len, asked.prompts))) > most + 1:
            why = f"prompt: {longest:,} tokens; with echo and logprobs at most {most + 1:,}"
            raise RequestError(400, why)
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
    asked: _Wanted, index: int, ids: Sequence[int], one: Continuation | None, scored: Scored | None
) -> dict[str, Any]:
    tokenizer = asked.model.generator.tokenizer

    def shown(tokens: Sequence[int]) -> list[str]:
        return [*map(readable, tokenizer.pieces(tokens))]

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
        named = {"tokens": pieces, "token_logprobs": found, "top_logprobs": tops}
        logprobs = {**named, "text_offset": offsets}
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": _finish(one)}


def _frame(model: ServedModel, prefix: str, kind: str) -> dict[str, Any]:
    number = f"{prefix}-{uuid.uuid4().hex}"
    return {"id": number, "object": kind, "created": int(time.time()), "model": model.name}


def _streamed(
    server: Server,
    request: Request,
    asked: _Wanted,
    head: dict[str, Any],
    part: Callable[[str], dict[str, Any]],
) -> Response:
    """Server-sent events: the text of every choice as it comes, then why each ended.

    `part` gives the field of a choice that holds a text.
    """
    if asked.options is None:
        raise RequestError(400, "stream: give max_tokens of at least 1")
    job = Continuing(asked.model, asked.options)
    parts: asyncio.Queue[tuple[int, int, str] | None] = asyncio.Queue()
    started = time.perf_counter()

    def event(number: int, sample: int, text: str, finish: str | None = None) -> str:
        index = number * asked.num_samples + sample
        return _event({**head, "choices": [{"index": index, **part(text), "finish_reason": finish}]})

    async def events() -> AsyncIterator[str]:
        given: dict[tuple[int, int], int] = {}  # characters
        computing = asyncio.ensure_future(
            server.compute(request, job, asked.prompts, lambda at, told: parts.put_nowait((at, *told)))
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
