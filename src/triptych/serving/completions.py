"""OpenAI's interface: models, completions (also as a stream) and chat completions."""

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from triptych.literals import SpecialTokens
from triptych.running.decoding import Continuation, GenerationOptions, SamplingOptions
from triptych.serving.answers import json_answer
from triptych.serving.limits import RequestError, openai_error
from triptych.serving.logprobs import (
    TokenNames,
    ToldToken,
    as_chat_logprobs,
    as_completion_logprobs,
    told_tokens,
)
from triptych.serving.openai_fields import CHAT, COMPLETIONS, check_fields, flag
from triptych.serving.request_fields import Fields
from triptych.serving.served_models import Continuing, Scored, Scoring, ServedModel
from triptych.serving.server import Server

_MOST_SAMPLES = 16
_MOST_LOGPROBS = 20
# Largest number of tokens of a prompt to score: all their logits are in memory together.
_MOST_SCORED = 2048
# Roles of messages.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class _Wanted(NamedTuple):
    """Request for completions: prompts as token ids, and options."""

    model: ServedModel
    prompts: list[list[int]]
    options: GenerationOptions | None  # None: generate 0 tokens
    echo: bool
    logprobs: int | None
    stream: bool
    counts_usage: bool  # end a stream with the number of tokens
    num_samples: int


async def list_models(server: Server, request: Request) -> Response:
    """The models that are served."""
    data = [
        {
            "id": name,
            "object": "model",
            "created": server.started,
            "owned_by": "triptych",
        }
        for name in server.models
    ]
    return JSONResponse({"object": "list", "data": data})


async def complete(server: Server, request: Request) -> Response:
    """Continue prompts, texts or token ids; with `echo`, `logprobs`, `n`, `seed`, `stop`, `stream`."""
    fields = await server.fields(request)
    check_fields(fields, COMPLETIONS)
    model = server.model(fields.get("model"), "generate")
    generator = model.generator
    special_tokens: SpecialTokens = (
        "text" if fields.get("special_tokens") == "text" else "tokens"
    )

    def encode(text: str) -> list[int]:
        return generator.encode(text, special_tokens=special_tokens)

    # Special tokens in a prompt count as tokens unless the request asks for text.
    prompts = await read_token_ids(
        server, fields, "prompt", encode, generator.model.vocab_size
    )
    wanted = (
        None
        if fields.get("logprobs") is None
        else fields.number("logprobs", 0, _MOST_LOGPROBS)
    )
    asked = _asked(server, model, fields, prompts, "max_tokens", 16, wanted)
    if fields.get("best_of") not in (None, 1, asked.num_samples):
        raise RequestError(400, "best_of is not supported: leave it out, or give n")
    head = _frame(model, "cmpl", "text_completion")
    if asked.stream:
        return _streamed(
            server, request, asked, head, lambda text: {"text": text, "logprobs": None}
        )
    return await _choices(server, request, asked, head, _completion)


async def chat(server: Server, request: Request) -> Response:
    """Answer a conversation, written as the chat template of the model's tokenizer says."""
    fields = await server.fields(request)
    check_fields(fields, CHAT)
    model = server.model(fields.get("model"), "generate")
    messages = _messages(fields.get("messages"))
    server.check_texts([message["content"] for message in messages])
    # Special tokens in a message are text, so that a message cannot end its turn. A separate process renders
    # the template.
    chat_ids = partial(model.generator.tokenizer.chat_ids, special_tokens="text")
    ids = await asyncio.to_thread(chat_ids, messages)
    name = "max_tokens" if "max_tokens" in fields else "max_completion_tokens"
    tells = flag(fields, "logprobs")
    if fields.get("top_logprobs") is not None and not tells:
        raise RequestError(400, "top_logprobs goes with logprobs: true")
    wanted = fields.number("top_logprobs", 0, _MOST_LOGPROBS, 0) if tells else None
    asked = _asked(server, model, fields, [ids], name, 512, wanted)
    if asked.stream:
        head = _frame(model, "chatcmpl", "chat.completion.chunk")
        return _streamed(
            server,
            request,
            asked,
            head,
            lambda text: {
                "delta": {"role": "assistant", "content": text} if text else {}
            },
        )
    return await _choices(
        server, request, asked, _frame(model, "chatcmpl", "chat.completion"), _answer
    )


def _messages(given: Any) -> list[dict[str, Any]]:
    """Read the messages of a conversation; the text parts of a message are joined."""
    # Other keys of a message are passed to the chat template.
    if not isinstance(given, list) or not given:
        raise RequestError(
            400, "messages: give a list of objects with role and content"
        )
    found = list[dict[str, Any]]()
    for number, message in enumerate(given, start=1):
        where = f"messages: message {number}"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(400, f"{where}: give an object with role and content")
        if message["role"] not in _ROLES:
            raise RequestError(400, f"{where}: the role is none of {', '.join(_ROLES)}")
        found.append(message | {"content": _content(message.get("content"), where)})
    return found


def _content(given: Any, where: str) -> str:
    """Read the text of a message: a string, or the joined text parts of a list."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not given:
        raise RequestError(
            400, f"{where}: give a text as content, or a list of parts that are texts"
        )
    for part in given:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = kind[:64] if isinstance(kind, str) else "no type"
            raise RequestError(
                400, f"{where} has a part of {shown}: only parts of type text are read"
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(400, f"{where} has a part without a text")
    return "".join(part["text"] for part in given)


async def read_token_ids(
    server: Server,
    fields: Fields,
    name: str,
    encode: Callable[[str], list[int]],
    vocab_size: int,
) -> list[list[int]]:
    """Read a field with one or several texts or lists of token ids; returns token ids."""
    # Texts are encoded in another thread, after the limits of the request are checked.
    given = fields.get(name)
    most = server.limits.max_items
    if isinstance(given, str) or (
        isinstance(given, list) and given and type(given[0]) is int
    ):
        given = [given]
    if not isinstance(given, list) or not given or len(given) > most:
        raise RequestError(
            400, f"{name}: give a text, token ids, or a list of at most {most}"
        )
    server.check_texts([one for one in given if isinstance(one, str)])
    for one in given:
        are_ids = (
            isinstance(one, list)
            and one
            and all(type(x) is int and 0 <= x < vocab_size for x in one)
        )
        if not are_ids and not isinstance(one, str):
            raise RequestError(
                400, f"{name}: token ids are numbers from 0 to {vocab_size - 1}"
            )

    def encode_all() -> list[list[int]]:
        return [encode(one) if isinstance(one, str) else one for one in given]

    found = await asyncio.to_thread(encode_all)
    if sum(map(len, found)) > server.limits.max_characters:
        raise RequestError(
            413, f"{name}: at most {server.limits.max_characters:,} tokens in a request"
        )
    return found


def _asked(
    server: Server,
    model: ServedModel,
    fields: Fields,
    prompts: list[list[int]],
    limit: str,
    default: int,
    logprobs: int | None,
) -> _Wanted:
    most = fields.number(limit, 0, server.limits.max_new_tokens, default)
    samples = fields.number("n", 1, _MOST_SAMPLES, 1)
    echo = flag(fields, "echo")
    stream = flag(fields, "stream")
    if stream and (echo or logprobs is not None):
        raise RequestError(400, "stream goes without echo and logprobs: leave them out")
    of_stream = fields.get("stream_options") or {}
    if of_stream and not stream:
        raise RequestError(400, "stream_options goes with stream: true")
    counts_usage = flag(of_stream, "include_usage")
    stops = _stop_texts(server, fields)

    def number(name: str, default: float | None = None) -> Any:
        return default if fields.get(name) is None else float(fields[name])

    try:
        sampling = SamplingOptions(
            repetition_penalty=number("repetition_penalty", 1.0),
            temperature=number("temperature", 1.0),
            top_k=fields.get("top_k"),
            top_p=number("top_p"),
            min_p=number("min_p"),
        )
        # Without a seed, every request draws a seed. Greedy requests have seed 0, so that their jobs are
        # equal and are computed together.
        given = fields.get("seed")
        drawn = random.SystemRandom().getrandbits(31) if given is None else given
        seed, num_samples = (0, 1) if sampling.is_greedy else (drawn, samples)
        options = GenerationOptions(
            max(most, 1),
            sampling,
            seed,
            num_samples,
            stop_texts=stops,
            num_top=logprobs or 0,
        )
    except (ValueError, OverflowError) as error:
        raise RequestError(400, str(error)) from None
    return _Wanted(
        model,
        prompts,
        options if most else None,
        echo,
        logprobs,
        stream,
        counts_usage,
        samples,
    )


def _stop_texts(server: Server, fields: Fields) -> tuple[str, ...]:
    """Read the stop texts; their number and length are limited, because every token searches for them."""
    stop = fields.get("stop") or []
    stops: list[str] = [stop] if isinstance(stop, str) else stop
    most = server.limits.max_items
    if len(stops) > most:
        raise RequestError(400, f"stop: give at most {most:,} texts")
    server.check_texts(stops)
    return tuple(stops)


async def _choices(
    server: Server,
    request: Request,
    asked: _Wanted,
    head: Mapping[str, Any],
    choice: "_Choice",
) -> Response:
    """Answer with the choices of all prompts, prompt by prompt, and the usage."""
    scored: list[Scored | None] = [None] * len(asked.prompts)
    if asked.echo and asked.logprobs is not None:
        most = min(asked.model.generator.model.context or _MOST_SCORED, _MOST_SCORED)
        if (longest := max(map(len, asked.prompts))) > most + 1:
            why = f"prompt: {longest:,} tokens; with echo and logprobs at most {most + 1:,}"
            raise RequestError(400, why)
        scored = await server.compute(
            request, Scoring(asked.model, asked.logprobs), asked.prompts
        )
    continued: list[list[Continuation]] = [[] for _ in asked.prompts]
    if asked.options is not None:
        continued = await server.compute(
            request, Continuing(asked.model, asked.options), asked.prompts
        )
    # Greedy samples are equal: they are computed once.
    chosen = [
        (ids, of_prompt[min(sample, len(of_prompt) - 1)] if of_prompt else None, score)
        for ids, of_prompt, score in zip(asked.prompts, continued, scored, strict=True)
        for sample in range(asked.num_samples)
    ]
    usage = _usage(asked, sum(len(one.ids) for _, one, _ in chosen if one is not None))
    server.count_tokens(usage["prompt_tokens"], usage["completion_tokens"])

    def record() -> dict[str, Any]:
        names = TokenNames(asked.model.generator.tokenizer)
        choices = [
            {
                "index": number,
                **choice(asked, names, *of),
                "finish_reason": _finish(of[1]),
            }
            for number, of in enumerate(chosen)
        ]
        return {**head, "choices": choices, "usage": usage}

    return await json_answer(record)


def _usage(asked: _Wanted, new: int) -> dict[str, int]:
    read = sum(map(len, asked.prompts))
    return {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}


_Choice = Callable[
    [_Wanted, TokenNames, Sequence[int], Continuation | None, Scored | None],
    dict[str, Any],
]


def _completion(
    asked: _Wanted,
    names: TokenNames,
    ids: Sequence[int],
    one: Continuation | None,
    scored: Scored | None,
) -> dict[str, Any]:
    """Format a choice of a completion."""
    # Log-probabilities of an echoed prompt precede the log-probabilities of new tokens.
    prompt = names.tokenizer.decode([ids])[0] if asked.echo else ""
    text = prompt + ("" if one is None else one.text)
    if asked.logprobs is None:
        return {"text": text, "logprobs": None}
    told = list[ToldToken]()
    if scored is not None:
        told += told_tokens(
            names, (), ids, [None, *scored.log_probs], [(), *scored.tops]
        )
    if one is not None:
        after = told_tokens(names, ids, one.ids, one.log_probs, one.tops)
        told += [token._replace(offset=token.offset + len(prompt)) for token in after]
    return {"text": text, "logprobs": as_completion_logprobs(told, len(text))}


def _answer(
    asked: _Wanted,
    names: TokenNames,
    ids: Sequence[int],
    one: Continuation | None,
    scored: Scored | None,
) -> dict[str, Any]:
    """Format a choice of a chat completion."""
    text = "" if one is None else one.text
    logprobs = None
    if asked.logprobs is not None and one is not None:
        told = told_tokens(names, ids, one.ids, one.log_probs, one.tops)
        logprobs = {"content": as_chat_logprobs(told, asked.logprobs), "refusal": None}
    return {"message": {"role": "assistant", "content": text}, "logprobs": logprobs}


def _frame(model: ServedModel, prefix: str, kind: str) -> dict[str, Any]:
    number = f"{prefix}-{uuid.uuid4().hex}"
    return {
        "id": number,
        "object": kind,
        "created": int(time.time()),
        "model": model.name,
    }


def _streamed(
    server: Server,
    request: Request,
    asked: _Wanted,
    head: dict[str, Any],
    part: Callable[[str], dict[str, Any]],
) -> Response:
    """Stream server-sent events: new text of every choice, and then each choice's finish reason.

    `part` returns the field of a choice with a text.
    """
    if asked.options is None:
        raise RequestError(400, "stream: give max_tokens of at least 1")
    job = Continuing(asked.model, asked.options)
    parts: asyncio.Queue[tuple[int, int, str] | None] = asyncio.Queue()
    started = time.perf_counter()

    def event(number: int, sample: int, text: str, finish: str | None = None) -> str:
        index = number * asked.num_samples + sample
        usage = {"usage": None} if asked.counts_usage else {}
        return _event(
            {
                **head,
                "choices": [{"index": index, **part(text), "finish_reason": finish}],
                **usage,
            }
        )

    async def events() -> AsyncIterator[str]:
        given: dict[tuple[int, int], int] = {}  # number of characters sent
        computing = asyncio.ensure_future(
            server.compute(
                request,
                job,
                asked.prompts,
                lambda at, told: parts.put_nowait((at, *told)),
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
        except Exception as error:  # noqa: BLE001 (the answer has begun: an event reports the error)
            status, message = server.explain(error)
            # The HTTP status is sent already: the event has it as code.
            yield _event({"error": openai_error(status, message, code=status)})
            return
        finally:
            computing.cancel()
        for number, of_prompt in enumerate(found):
            for sample in range(asked.num_samples):
                one = of_prompt[min(sample, len(of_prompt) - 1)]
                if rest := one.text[given.get((number, sample), 0) :]:
                    yield event(number, sample, rest)
                yield event(number, sample, "", _finish(one))
        usage = _usage(asked, sum(len(one.ids) for one in chain.from_iterable(found)))
        server.count_tokens(usage["prompt_tokens"], usage["completion_tokens"])
        if asked.counts_usage:
            yield _event({**head, "choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    return StreamingResponse(
        events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
    )


def _finish(one: Continuation | None) -> str:
    return "length" if one is None or one.finish in ("length", "positions") else "stop"


def _event(record: dict[str, Any]) -> str:
    return f"data: {json.dumps(record, ensure_ascii=False)}\n\n"


ROUTES = (
    ("GET", "/v1/models", list_models),
    ("POST", "/v1/completions", complete),
    ("POST", "/v1/chat/completions", chat),
)
