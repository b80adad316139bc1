"""A matrix of requests: each field of each path with values that it is not made for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TRANSLATE = {"q": "twelve <b>and</b>", "source": "en", "target": "de", "format": "html", "alternatives": 1}
_OF_BOTH = {"model": "gpt", "n": 1, "seed": 3, "stop": ["x"], "stream": False, "stream_options": None}
_OF_BOTH |= {"temperature": 0.9, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
_OF_BOTH |= {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "user": "u", "api_key": "k"}
_COMPLETION = {"prompt": "The cat", "max_tokens": 3, "logprobs": 2, "echo": True, "best_of": 1}
_COMPLETION |= {"special_tokens": "text", "suffix": ""}
_CHAT = {"messages": [{"role": "user", "content": "The cat"}], "max_tokens": 3, "logprobs": True}
_CHAT |= {"top_logprobs": 2, "max_completion_tokens": 3, "response_format": {"type": "text"}, "tools": []}
_CHAT |= {"tool_choice": "none", "modalities": ["text"], "metadata": {}, "reasoning_effort": "none"}
_LOOK = {"model": "gpt", "text": "a cat"}
_SHOWN = {**_LOOK, "target": "", "changes": ["ablate(1.0)"]}
_PLACE = {"layer": "1", "head": 0}

# A request that each path answers, with every field that it has.
REQUESTS: dict[str, dict[str, Any]] = {
    "/translate": {**_TRANSLATE, "glossary": {"twelve": "elf"}, "details": True, "alignments": True},
    "/detect": {"q": "twelve"},
    "/v1/completions": {**_OF_BOTH, **_COMPLETION},
    "/v1/chat/completions": {**_OF_BOTH, **_CHAT},
    "/v1/embeddings": {"model": "bert", "input": "a cat", "encoding_format": "float", "dimensions": None},
    "/v1/attend": {**_LOOK, "target": None, "heads": "1.*"},
    "/v1/steps": {**_LOOK, "layer": 1, "head": 0, "query": -1},
    "/v1/inspect": {"model": "gpt", "layers": [0], "heads": [0]},
    "/v1/explore/models": {},
    "/v1/explore/view": _SHOWN,
    "/v1/explore/gallery": _SHOWN,
    "/v1/explore/row": {**_SHOWN, **_PLACE, "query": -1},
    "/v1/explore/write": {**_LOOK, "changes": [], "count": 2},
    "/v1/explore/held_out": {"model": "gpt", "changes": [], "parts": 1},
    "/v1/explore/head": {"model": "gpt", "changes": [], **_PLACE},
}
# As JSON text, which says more than Python's values do.
ODD = [
    *("null", "true", "false", "0", "-1", "-0.0", "1", "2", "0.5", "1e-300", "5e-324", "1e300", "1e400"),
    *("NaN", "Infinity", "-Infinity", str(1 << 31), str(1 << 63), str(-1 << 63), "9" * 400, "9" * 4000),
    *('""', '" "', '"1"', '"²"', '"☃"', r'"\u0000"', r'"\ud800"', r'"a\nb"', '"*"', '"a.b"', '"1.0"'),
    *(json.dumps("9" * 5000), json.dumps("a" * 3000), json.dumps("☃ " * 1500)),
    *("[]", "[[]]", "[null]", "[0]", "[1e300]", "[NaN]", '[""]', '["a", 1]', "[-1]", f"[{10**20}]"),
    *("{}", '{"a": 1}', '{"a": {"b": []}}', '{"": ""}'),
    *('[{"role": "user"}]', '[{"role": "user", "content": 1}]', '[{"role": 1, "content": "a"}]'),
    *("[" * 400 + "]" * 400, '{"a": ' * 400 + "1" + "}" * 400, "[" * 90_000 + "]" * 90_000),
    *(json.dumps(["a"] * 3000), json.dumps([1] * 3000)),
    *('["("]', '["ablate()"]', '["rewrite(x)"]', '["tie(1, a, b)"]', '["even(1)", "even(1.0.0)"]'),
]
_CALLS = (
    "ablate({})", "even({})", "unscaled({})", "tie({}, W_Q, W_K)", "truncate({}, 1)", "truncate(1.0, {})",
)  # fmt: skip
_PLACES = ("", "1", "1.0", "1.0.0", "1.9", "9.0", "-1.0", "1.-1", "²", "1.²", "*", "1.*", "1.0 1.1", "1e9")
ODD_CHANGES = [json.dumps([call.format(place)]) for call in _CALLS for place in _PLACES]


def with_chat_template(folder: Path) -> Path:
    """Give the tokenizer of a checkpoint a chat template."""
    file = folder / "tokenizer_config.json"
    template = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return folder


def matrix() -> Iterator[tuple[str, str, str]]:
    """Yield each path, field and odd value."""
    for path, fields in REQUESTS.items():
        for name in fields or {"changes": None}:
            for value in (*ODD, *(ODD_CHANGES if name == "changes" else ())):
                yield path, name, value


def body_of(path: str, name: str, value: str) -> bytes:
    """Write a request in which a field has a value."""
    fields = {own: json.dumps(given) for own, given in REQUESTS[path].items()} | {name: value}
    return f"{{{', '.join(f'{json.dumps(own)}: {given}' for own, given in fields.items())}}}".encode()
