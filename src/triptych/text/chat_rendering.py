"""The process in which a chat template is rendered; `chat.py` starts it as a script.

It reads a JSON object with "template" and "variables" and writes one with "text", or with "error" and
"message". A template is a program by a stranger: it runs in jinja2's sandbox, in a process that may not open
files, and that the system ends when it takes too much memory or time.
"""

import json
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn, final

from jinja2 import FunctionLoader, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

if sys.platform != "win32":
    import resource

# Past what a model reads, and within what a line of JSON may hold.
MOST_CHARACTERS = 1 << 24
CPU_SECONDS = 2
_MEMORY_BYTES = 1 << 29


class RefusalError(TemplateError):
    """What `raise_exception` raises: the template does not take the messages."""


@final
class Generation(Extension):
    """`{% generation %}`, which marks what an assistant says: rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (the library's own attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        """The body, as a block of its own scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("render"), [], [], body).set_lineno(line)

    def render(self, caller: Callable[[], str]) -> str:
        """What is in the block."""
        return caller()


def render_template(template: str, variables: dict[str, Any]) -> str:
    """The text of a template, with the functions that `transformers` gives chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
        loader=FunctionLoader(_refuse_file),
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    parts: list[str] = []
    size = 0
    for part in environment.from_string(template).generate(**variables):
        size += len(part)
        if size > MOST_CHARACTERS:
            raise OverflowError(f"it writes more than {MOST_CHARACTERS:,} characters")
        parts.append(part)
    return "".join(parts)


def _refuse_file(name: str) -> NoReturn:
    raise SecurityError(f"reading the file {name!r}")


def _raise_exception(message: object) -> None:
    raise RefusalError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes what HTML does not allow.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _render_or_explain(request: dict[str, Any]) -> dict[str, str]:
    try:
        return {"text": render_template(request["template"], request["variables"])}
    except RefusalError as error:
        return {"error": "refusal", "message": str(error)}
    except SecurityError as error:
        return {"error": "forbidden", "message": str(error)}
    except TemplateSyntaxError as error:
        return {"error": "damaged", "message": f"line {error.lineno}: {error.message}"}
    except MemoryError:
        return {"error": "too much", "message": "it takes too much memory"}
    except OverflowError as error:
        return {"error": "too much", "message": str(error)}
    except RecursionError:
        return {"error": "too much", "message": "it calls itself too deep"}
    except Exception as error:  # noqa: BLE001 (whatever a stranger's program does wrong)
        return {"error": "damaged", "message": str(error) or type(error).__name__}


# Python and jinja2 import some of their modules when they are first needed: for escapes in text, for errors.
_REHEARSAL = (
    "{{ ['a\\n', 1] | tojson(indent=2) }}{{ strftime_now('%d %b %Y') }}{{ [1] | pprint }}{{ lipsum(1) }}",
    "{{ 1 / 0 }}",
    "{{ nothing.at.all }}",
    "{% nothing %}",
)


def _limit() -> None:
    """What the system allows the process from here on; what it imports, it has imported before."""
    for template in _REHEARSAL:
        _render_or_explain({"template": template, "variables": {}})
    if sys.platform != "win32":
        limits = {
            resource.RLIMIT_CPU: CPU_SECONDS,
            resource.RLIMIT_AS: _MEMORY_BYTES,
            resource.RLIMIT_NOFILE: 3,  # those that are open: input, output, errors
            resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_CORE: 0,
        }
        for kind, most in limits.items():
            resource.setrlimit(kind, (most, most))


def _main() -> None:
    request = json.load(sys.stdin.buffer)
    _limit()
    sys.stdout.buffer.write(json.dumps(_render_or_explain(request)).encode())


if __name__ == "__main__":
    _main()
