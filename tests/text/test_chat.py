"""Chat templates: the text of transformers, and what a stranger's template may not do."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from triptych.errors import DataError, TriptychError, UsageError
from triptych.running.text import PretrainedTokenizer, load_tokenizer

CHATML = """{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""  # noqa: E501
INSTRUCTION = """{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'].strip() + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""
HEADERS = """{{- bos_token }}
{%- if not date_string is defined and strftime_now is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- set system_message = messages[0]['content'] | trim if messages[0]['role'] == 'system' else "" %}
{%- if tools is not none %}{{- "Environment: ipython\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\n\n" + system_message + "<|eot_id|>" }}
{%- for message in messages[1:] %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- message['role'] + '\n\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
"""
THINKING = """{%- set ns = namespace(last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and message.content is string %}
        {%- set ns.last_query_index = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role != "assistant" %}
        {{- message.role + '\n' + message.content + '<|im_end|>\n' }}
        {%- continue %}
    {%- endif %}
    {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
    {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
    {%- if loop.index0 > ns.last_query_index or loop.last %}
        {{- '<think>\n' + reasoning + '\n</think>\n\n' + content }}
    {%- else %}
        {{- content }}
    {%- endif %}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>' }}{%- endif %}
"""
BLOCKS = """{{ bos_token }}
{% macro of(message) %}
{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}
{% for item in message['content'] %}{% if item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}
{% endif %}
{% endmacro %}
{% for message in messages %}
<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{% generation %}{{ of(message) }}{% endgeneration %}<end_of_turn>
{{ message | tojson }} {{ {'ä': [1, none, '<']} | tojson(indent=2) }}
{% endfor %}
{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
# What 108 published templates use besides: tests, filters, methods, neighbours in a loop, a macro of itself.
WIDE = """{%- macro value(x) -%}
{%- if x is mapping -%}
{%- for key, inner in x | dictsort -%}{{ key | upper }}={{ value(inner) }}{% if not loop.last %},{% endif %}{%- endfor -%}
{%- elif x is string or x is boolean or x is number -%}{{ x | string }}
{%- elif x is iterable and x is sequence -%}{% for inner in x %}[{{ value(inner) }}]{% endfor %}
{%- else -%}{{ x | default('', true) | safe }}{%- endif -%}
{%- endmacro -%}
{%- set given = messages | map(attribute='role') | list -%}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list -%}
{%- set others = messages | rejectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') -%}
{{- '<|im_start|>' ~ given | join(',') | title ~ users | length ~ others | lower ~ '<|im_end|>' -}}
{%- for message in messages -%}
{%- set text = message.get('content', '') -%}
{%- if loop.first or loop.previtem.role != message.role -%}{{ '<|im_start|>' + message.role.capitalize() }}{%- endif -%}
{%- if text.startswith(' ') or text.endswith(' ') -%}{{ text.rstrip() + '_' }}{%- else -%}{{ text }}{%- endif -%}
{{- value({'n': loop.index, 'a': [1, 2.5, true], 't': ('x', none), 'm': {'k': text[:3]}}) -}}
{%- for name, field in message.items() if name is not in(['role', 'content']) -%}{{ name ~ field | string }}{%- endfor -%}
{%- if loop.nextitem is undefined -%}{{ '<|im_end|>' }}{%- break -%}{%- endif -%}
{%- if '3' | int == 3 and loop.nextitem.role is not true -%}{{ '<|im_end|>' }}{%- endif -%}
{%- endfor -%}
"""  # noqa: E501
TEMPLATES = {
    "chatml": CHATML, "instruction": INSTRUCTION, "headers": HEADERS, "thinking": THINKING, "blocks": BLOCKS,
    "wide": WIDE,
}  # fmt: skip
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "  Hello, wörld? <eos> {{ 7 * 7 }} "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."},
    {"role": "user", "content": "Then\ngo on: \"'&<>"},
]
SYSTEM: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
CONVERSATIONS = {
    "one": TALK[:1],
    "talk": TALK,
    "system": [*SYSTEM, *TALK],
    "ends with an answer": TALK[:2],
    "reasoning": [TALK[0], {"role": "assistant", "content": "a", "reasoning": "b", "tool_calls": None}],
}


def tokenizer_of(folder: Path, template: object, **files: str) -> PretrainedTokenizer:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<bos>": 0, "<eos>": 1, "a": 2}, "a"))
    inner.add_special_tokens(["<bos>", "<eos>"])
    inner.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": template}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return load_tokenizer(folder)


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_has_the_text_of_transformers(name: str, tmp_path: Path) -> None:
    from jinja2 import TemplateError
    from transformers import AutoTokenizer

    tokenizer = tokenizer_of(tmp_path, TEMPLATES[name])
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    refused = 0
    for conversation, prompt in [(talk, True) for talk in CONVERSATIONS.values()] + [(TALK, False)]:
        try:
            expected = oracle.apply_chat_template(conversation, tokenize=False, add_generation_prompt=prompt)
        except TemplateError as error:
            refused += 1
            with pytest.raises(UsageError, match=str(error).split("/")[0]):
                tokenizer.chat(conversation, add_generation_prompt=prompt)
        else:
            assert tokenizer.chat(conversation, add_generation_prompt=prompt) == expected
    assert refused == (1 if name == "instruction" else 0)


def test_the_file_of_a_template_goes_before_the_configuration(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, "old", chat_template__jinja="new {{ eos_token }}")
    assert tokenizer.chat(TALK) == "new <eos>"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    (tmp_path / "chat_template.jinja").unlink()
    assert tokenizer_of(tmp_path, named).chat(TALK) == "d"
    with pytest.raises(UsageError, match="has the chat templates tool_use and no default"):
        tokenizer_of(tmp_path, named[1:]).chat(TALK)
    with pytest.raises(UsageError, match="no chat template"):
        tokenizer_of(tmp_path, None).chat(TALK)


FORBIDDEN = {
    "a file that is included": "{% include '/etc/passwd' %}",
    "a file that is imported": "{% import '/etc/passwd' as x %}{{ x }}",
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a global": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "a function's code": "{{ raise_exception.__globals__['json'] }}",
    "an open file": "{{ open('/etc/passwd').read() }}",
    "a format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "a change of the messages": "{{ messages.append(1) }}",
}
ENDLESS = {
    "a loop in a loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a long loop": "{% for a in range(1000000000) %}x{% endfor %}",
    "a long text": "{{ 'x' * 1000000000 }}",
    "much text": "{% set x = 'x' * 1000000 %}{% for a in range(99) %}{{ x }}{% endfor %}",
    "a large number": "{{ 7 ** (7 ** (7 ** 7)) }}",
    "a macro of itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep brackets": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
}
DAMAGED = {
    "no end": "{% for message in messages %}",
    "an unknown tag": "{% nothing %}",
    "an unknown filter": "{{ 1 | nothing }}",
    "nothing's field": "{{ nothing.at.all }}",
    "a wrong sum": "{{ 1 + 'a' }}",
    "a division": "{{ 1 / 0 }}",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", FORBIDDEN | ENDLESS | DAMAGED)
def test_a_template_that_may_not_or_cannot_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, (FORBIDDEN | ENDLESS | DAMAGED)[case])
    with pytest.raises(DataError) as refused:
        tokenizer.chat(TALK)
    message = str(refused.value)
    assert message.startswith(f"the chat template of {tmp_path}")
    assert "\n" not in message
    assert len(message) < 1600
    if case.startswith("a file that"):
        assert "does what no template may: reading the file '/etc/passwd'" in message
    assert "open files" not in message  # the sandbox refuses before the system does


def test_the_process_of_a_template_may_not_open_files(tmp_path: Path) -> None:
    import subprocess
    import sys

    from triptych.running.text import chat_rendering

    code = f"""
import sys
sys.path.insert(0, {str(Path(chat_rendering.__file__).parent)!r})
import chat_rendering
chat_rendering._limit()
try:
    open({str(Path(__file__))!r})
except OSError as error:
    print(error.strerror)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "Too many open files"


@pytest.mark.parametrize(
    "messages", [[], [{"role": "user", "content": {1, 2}}], [{"role": "user", "content": b"a"}]]
)
def test_messages_that_are_none_are_refused(messages: list[dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(TriptychError, match=r"empty|cannot be given"):
        tokenizer_of(tmp_path, CHATML).chat(messages)
