"""OpenAI's interface, asked by its own client: every documented field, types of values, log-probabilities."""

import inspect
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import triptych
from face.tiny import write_checkpoint
from served import Served
from triptych.serving.openai_fields import CHAT, COMPLETIONS, EMBEDDINGS, Followed, Ignored, Only

SHARED = Path(__file__).parents[3] / "shared" / "checkpoints" / "gpt2"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "openai.md"
END = "<|endoftext|>"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}assistant:"
TALK: list[Any] = [{"role": "user", "content": "hello"}]
# What the client itself takes, and does not send as a field.
OF_CLIENT = {"extra_body", "extra_headers", "extra_query", "timeout"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> triptych.Model:
    folder = tmp_path_factory.mktemp("gpt2") / "gpt2"
    shutil.copytree(SHARED, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return triptych.load(folder, device="cpu")


@pytest.fixture(scope="module")
def served(model: triptych.Model) -> Iterator[Served]:
    with Served({"m": model}) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_every_field_of_openais_client_is_in_the_table_and_in_the_code(client: openai.OpenAI) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for create, rules in (
        (client.completions.create, COMPLETIONS),
        (client.chat.completions.create, CHAT),
        (client.embeddings.create, EMBEDDINGS),
    ):
        documented = {*inspect.signature(create).parameters} - OF_CLIENT
        assert documented <= rules.keys()
        for name in rules:
            assert f"| `{name}`" in page or f", `{name}`" in page, name


OTHER_VALUES: dict[str, Any] = {
    **{"presence_penalty": 0.5, "frequency_penalty": -1, "logit_bias": {"50": 1}, "suffix": "end"},
    **{"best_of": 3, "tools": [{"type": "function"}], "tool_choice": "required", "modalities": ["audio"]},
    **{"functions": [{"name": "f"}], "function_call": {"name": "f"}, "reasoning_effort": "high"},
    **{"verbosity": "low", "audio": {"voice": "alloy"}, "moderation": {"model": "m"}},
    **{"web_search_options": {"search_context_size": "low"}},
    "response_format": {"type": "json_object"},
}
IGNORED_VALUES: dict[str, Any] = {
    **{"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
    **{"safety_identifier": "s", "prediction": {"type": "content", "content": "x"}},
    **{"prompt_cache_key": "k", "prompt_cache_options": {}, "prompt_cache_retention": "24h"},
    "parallel_tool_calls": False,
}


def test_a_field_is_refused_by_name_or_changes_nothing(client: openai.OpenAI) -> None:
    def complete(**fields: Any) -> str:
        found = client.completions.create(
            model="m", prompt="ROMEO:", max_tokens=3, temperature=0, extra_body=fields
        )
        return str(found.choices[0].text)

    def chat(**fields: Any) -> str:
        found = client.chat.completions.create(
            model="m", messages=TALK, max_tokens=3, temperature=0, extra_body=fields
        )
        return str(found.choices[0].message.content)

    for ask, rules in ((complete, COMPLETIONS), (chat, CHAT)):
        plain = ask()
        harmless: dict[str, Any] = {name: None for name in rules if name not in ("prompt", "messages")}
        harmless = {name: None for name in harmless if name not in ("model", "max_tokens", "temperature")}
        for name, rule in rules.items():
            if isinstance(rule, Ignored):
                assert ask(**{name: IGNORED_VALUES[name]}) == plain, name
            if isinstance(rule, Only):
                with pytest.raises(openai.BadRequestError, match=f"{name}.* is not supported"):
                    ask(**{name: OTHER_VALUES[name]})
                for value in rule.values:
                    harmless[name] = value
        assert ask(**harmless) == plain
        with pytest.raises(openai.BadRequestError, match="guided_json is no field of this request"):
            ask(guided_json={})
    with pytest.raises(openai.BadRequestError, match="best_of is not supported"):
        complete(best_of=3)
    for schema in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a"}}):
        with pytest.raises(openai.BadRequestError, match=f"response_format {schema['type']} is not"):
            chat(response_format=schema)
    with pytest.raises(openai.BadRequestError, match="echo: give true or false"):
        complete(echo="yes")


# What a field of each type is not, and would become if it was converted.
OF_ANOTHER_TYPE: dict[str, tuple[Any, ...]] = {
    "a text": (7, True, ["m"], {}),
    "a text, or a list of texts": (0, 7, False, {}, ["a", 7], [["a"]]),
    "a whole number": (True, "1", 1.0, 1.5, [1], {}),
    "a number": (True, "1", [1], {}, [], float("nan")),
    "true or false": (1, 0, "true", [], {}, 1.0),
    "an object": (0, [], "", False, [{}]),
    "tokens or text": (0, "", False, "both", ["text"]),
    "float or base64": (0, "", False, "int8", ["float"]),
}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("bert") / "bert"
    write_checkpoint("bert", folder)
    with Served({"m": triptych.load(folder, device="cpu")}) as running:
        yield running


def test_a_value_of_another_type_is_refused_and_not_converted(served: Served, encoder: Served) -> None:
    text = {"model": "m", "max_tokens": 1, "temperature": 0}
    requests: list[tuple[Served, str, dict[str, Any], Any]] = [
        (served, "/v1/completions", {**text, "prompt": "a"}, COMPLETIONS),
        (served, "/v1/chat/completions", {**text, "messages": TALK}, CHAT),
        (encoder, "/v1/embeddings", {"model": "m", "input": "a"}, EMBEDDINGS),
    ]
    tried = set[str]()
    for server, path, fields, rules in requests:
        assert server.ask(path, fields).status == 200
        for name, rule in rules.items():
            what = rule.kind.what if isinstance(rule, Followed) else ""
            tried.add(what)
            for value in OF_ANOTHER_TYPE.get(what, ()):
                found = server.ask(path, {**fields, name: value})
                assert found.status == 400, (path, name, value)
                if value == value:  # NaN is a number outside of all ranges
                    assert found.body["error"]["message"] == f"{name}: give {what}", (path, name, value)
    assert tried == {"", *OF_ANOTHER_TYPE}
    for name, value in (("presence_penalty", False), ("logit_bias", []), ("suffix", 0), ("suffix", False)):
        message = server_says(served, {**text, "prompt": "a", name: value})
        assert message == f"{name} is not supported: leave it out"


def server_says(served: Served, fields: dict[str, Any]) -> str:
    found = served.ask("/v1/completions", fields)
    assert found.status == 400
    return str(found.body["error"]["message"])


def test_numbers_at_the_edges_are_answered_or_refused_in_one_line(served: Served) -> None:
    fields = {"model": "m", "prompt": "a", "max_tokens": 2, "temperature": 1.0}
    for name in ("seed", "temperature", "top_p", "min_p", "top_k", "repetition_penalty", "n", "best_of"):
        for value in (-1, 0, 2**31, -(2**63), 2**64, 10**400):
            found = served.ask("/v1/completions", {**fields, name: value})
            assert found.status in (200, 400), (name, value)
            assert found.status == 200 or "\n" not in found.body["error"]["message"]


def test_an_error_in_a_stream_has_the_type_and_the_code_of_its_status(served: Served) -> None:
    fields = {"model": "m", "prompt": [1] * 3000, "max_tokens": 2}
    plain = served.ask("/v1/completions", fields)
    (event,) = served.events("/v1/completions", {**fields, "stream": True})
    assert (plain.status, plain.body["error"]["type"]) == (400, "invalid_request_error")
    assert event["error"] == {**plain.body["error"], "code": 400}


def test_content_in_parts_is_one_text_and_parts_of_another_kind_are_refused(client: openai.OpenAI) -> None:
    def ask(content: Any, role: str = "user") -> Any:
        messages: Any = [{"role": role, "content": content}]
        return client.chat.completions.create(model="m", messages=messages, max_tokens=4, temperature=0)

    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    whole = ask("hello")
    assert (ask(parts).choices, ask(parts).usage) == (whole.choices, whole.usage)
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    for content, says in (
        ([*parts, image], "message 1 has a part of image_url: only parts of type text"),
        ([{"type": "input_audio"}], "part of input_audio"),
        ([{"type": "text"}], "a part without a text"),
        ([], "give a text as content"),
        ([7], "part of no type"),
        (None, "give a text as content"),
    ):
        with pytest.raises(openai.BadRequestError, match=says):
            ask(content)
    with pytest.raises(openai.BadRequestError, match="the role is none of system, developer, user"):
        ask("hello", "im_end")


def test_in_a_prompt_special_tokens_are_read_and_in_a_message_they_are_text(
    client: openai.OpenAI, model: triptych.Model
) -> None:
    def count(prompt: str, **fields: Any) -> int:
        found = client.completions.create(model="m", prompt=prompt, max_tokens=1, extra_body=fields)
        return int(found.usage.prompt_tokens if found.usage else 0)

    def of_chat(text: str) -> int:
        messages: Any = [{"role": "user", "content": text}]
        found = client.chat.completions.create(model="m", messages=messages, max_tokens=1)
        return int(found.usage.prompt_tokens if found.usage else 0)

    text = f"a{END}b"
    assert count(text) == 3 == len(model.run(text).ids)
    plain = len(model.run(text, special_tokens="text").ids)
    assert count(text, special_tokens="text") == plain > 3
    assert of_chat(text) - of_chat("ab") >= plain - 3
    assert count("") == 1  # the token that begins a text
    ids = model.reader.tokenizer.chat_ids([{"role": "user", "content": text}])
    assert of_chat(text) == len(ids)
    assert sum(token in model.reader.tokenizer.special_ids for token in ids) == 1


TEXT = "今天天气很好😀 ROMEO: é"


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_log_probabilities_are_of_as_many_tokens_as_asked_for_and_lie_in_the_text(
    count: int, client: openai.OpenAI, model: triptych.Model
) -> None:
    (choice,) = client.completions.create(
        model="m", prompt=TEXT, max_tokens=3, temperature=0, echo=True, logprobs=count
    ).choices
    logs: Any = choice.logprobs
    ids = [*model.run(TEXT).ids]
    new = model.generate(TEXT, max_new_tokens=3)
    assert len(logs.tokens) == len(logs.top_logprobs) == len(logs.text_offset) == len(ids) + 3
    assert choice.text == TEXT + new.text
    assert logs.token_logprobs[0] is logs.top_logprobs[0] is None
    logits = model.run([*ids, *new.ids]).logits.log_softmax(dim=-1)
    for place, token in enumerate([*ids, *new.ids][1:], start=1):
        top = logs.top_logprobs[place]
        best = logits[place - 1].topk(max(count, 1))
        has_it = token in best.indices[:count].tolist()
        assert len(top) == (count if has_it else count + 1), place
        assert top[logs.tokens[place]] == logs.token_logprobs[place]
        assert logs.token_logprobs[place] == pytest.approx(float(logits[place - 1, token]), abs=1e-4)
        if count:  # as lm-evaluation-harness tells whether a token is the greedy one
            is_greedy = max(top, key=lambda name: top[name]) == logs.tokens[place]
            assert is_greedy == (int(best.indices[0]) == token), place
    assert logs.text_offset == sorted(logs.text_offset)
    assert all(0 <= offset <= len(choice.text) for offset in logs.text_offset)
    for place, name in enumerate(logs.tokens):
        if "<0x" not in name:
            start = logs.text_offset[place]
            assert choice.text[start : start + len(name)] == name
    assert len({*logs.tokens[:3]}) == 3  # the bytes of one character


def test_a_chats_log_probabilities_have_bytes(client: openai.OpenAI, model: triptych.Model) -> None:
    def ask(**fields: Any) -> Any:
        return client.chat.completions.create(
            model="m", messages=TALK, max_tokens=5, temperature=0, extra_body=fields
        ).choices[0]

    found = ask(logprobs=True, top_logprobs=4)
    told = found.logprobs.content
    assert [len(one.top_logprobs) for one in told] == [4] * 5
    assert all(one.top_logprobs[0].token == one.token for one in told)  # greedy
    assert b"".join(bytes(one.bytes) for one in told).decode() == found.message.content
    assert [one.logprob for one in told] == [one.top_logprobs[0].logprob for one in told]
    assert all(one.top_logprobs == [] for one in ask(logprobs=True).logprobs.content)
    assert ask().logprobs is None
    with pytest.raises(openai.BadRequestError, match="top_logprobs goes with logprobs"):
        ask(top_logprobs=2)


def test_a_stream_ends_with_the_number_of_tokens_where_that_is_asked_for(client: openai.OpenAI) -> None:
    options: Any = {"model": "m", "max_tokens": 3, "temperature": 0, "stream": True}
    wanted = client.completions.create(model="m", prompt="ROMEO:", max_tokens=3, temperature=0)
    asked = client.completions.create(prompt="ROMEO:", stream_options={"include_usage": True}, **options)
    events = [*asked]
    assert events[-1].choices == []
    assert events[-1].usage == wanted.usage
    assert "".join(event.choices[0].text for event in events[:-1]) == wanted.choices[0].text
    assert all(event.usage is None for event in client.completions.create(prompt="ROMEO:", **options))
    with pytest.raises(openai.BadRequestError, match="stream_options goes with stream"):
        client.completions.create(model="m", prompt="a", stream_options={"include_usage": True})
