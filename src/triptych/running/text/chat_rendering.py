"""The rendering process of chat templates, started by `chat.py` as a script.

It reads a JSON object with "template", "variables" and "tokens" (special tokens as further variables). It
writes an object with "text" and "own", the character ranges written by the template rather than by messages,
or with "error" and "message". A template is untrusted code: it runs in jinja2's sandbox, in a process without
access to files, killed by the system if it exceeds its memory or CPU time.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any, NoReturn, SupportsIndex, final

from jinja2 import (
    FunctionLoader,
    TemplateError,
    TemplateSyntaxError,
    nodes,
    pass_environment,
)
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Environment
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

if sys.platform != "win32":
    import resource

# More than the context of any model, and small enough for a line of JSON.
MOST_CHARACTERS = 1 << 24
CPU_SECONDS = 2
_MEMORY_BYTES = 1 << 29
# Roles of messages spelled out by templates in special tokens (`<|user|>`).
_ROLES = {"system", "developer", "user", "assistant", "tool", "function"}


@final
class OwnText(str):
    """A string with a mark on every character written by the template.

    Special tokens spelled by marked characters are tokens. All other characters are plain text of messages.
    Characters without a known origin after an operation count as messages, so that a message cannot pass for
    the template.
    """

    _own: bytes  # 1 or 0 per character

    def __new__(cls, text: str = "", own: bytes | None = None) -> "OwnText":
        """Mark characters by the bytes of `own`, 1 for the template; the default marks no character."""
        made = super().__new__(cls, text)
        made._own = bytes(len(text)) if own is None else own
        assert len(made._own) == len(text)
        return made

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> "OwnText":
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> "OwnText":
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __getitem__(self, place: SupportsIndex | slice) -> "OwnText":
        if not isinstance(place, slice):
            number = range(len(self))[place]
            place = slice(number, number + 1)
        return OwnText(str.__getitem__(self, place), self._own[place])

    def strip(self, chars: str | None = None, /) -> "OwnText":
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> "OwnText":
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> "OwnText":
        return self[: len(str.rstrip(self, chars))]

    def removeprefix(self, prefix: str, /) -> "OwnText":
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str, /) -> "OwnText":
        return self[: len(str.removesuffix(self, suffix))]

    def lower(self) -> str:
        return self._alike(str.lower(self))

    def upper(self) -> str:
        return self._alike(str.upper(self))

    def capitalize(self) -> str:
        return self._alike(str.capitalize(self))

    def title(self) -> str:
        return self._alike(str.title(self))

    def _alike(self, text: str) -> str:
        """Return the text with the marks of this string if the lengths agree, or else without marks."""
        return OwnText(text, self._own) if len(text) == len(self) else text

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._found(
            str.split(self, sep, maxsplit), 0 if sep is None else len(sep)
        )

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._found(
            str.rsplit(self, sep, maxsplit), 0 if sep is None else len(sep)
        )

    def splitlines(self, keepends: bool = False) -> list[str]:
        whole = self._found(str.splitlines(self, keepends=True), 0)
        kept = str.splitlines(self, keepends=keepends)
        return [line[: len(own)] for line, own in zip(whole, kept, strict=True)]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        first, middle, last = self._found(str.partition(self, sep), 0)
        return first, middle, last

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        first, middle, last = self._found(str.rpartition(self, sep), 0)
        return first, middle, last

    def _found(self, parts: Sequence[str], between: int = 0) -> list[str]:
        """Locate parts of the text in order, at least `between` characters apart; return the marked parts."""
        found = list[str]()
        end = 0
        for number, part in enumerate(parts):
            end += between if number else 0
            start = str.index(self, part, end)
            end = start + len(part)
            found.append(self[start:end])
        return found

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> "OwnText":
        if not old:
            return OwnText(str.replace(self, old, new, count))
        return OwnText.join(_as_own(new), self.split(old, count))

    def join(self, parts: Iterable[str], /) -> "OwnText":
        found = list[str]()
        for number, part in enumerate(parts):
            found += [self, part] if number else [part]
        return joined(found)

    def ranges(self) -> list[tuple[int, int]]:
        """Return start and end of each range of characters written by the template."""
        found = list[tuple[int, int]]()
        end = 0
        for is_own, run in groupby(self._own):
            start = end
            end = end + sum(1 for _ in run)
            if is_own:
                found.append((start, end))
        return found


def _as_own(text: str) -> OwnText:
    return text if isinstance(text, OwnText) else OwnText(text)


def own(text: str) -> OwnText:
    """Mark a text as written by the template."""
    return OwnText(text, b"\1" * len(text))


def joined(parts: Iterable[object]) -> OwnText:
    """Join parts as `"".join` and `~` do."""
    found = [_as_own(str(part)) for part in parts]
    return OwnText("".join(found), b"".join(part._own for part in found))


@pass_environment
def _join(
    environment: Environment,
    value: Iterable[Any],
    d: str = "",
    attribute: str | int | None = None,
) -> OwnText:
    """Apply the filter `join`."""
    parts = (
        value
        if attribute is None
        else map(make_attrgetter(environment, attribute), value)
    )
    return _as_own(d).join(map(str, parts))


class _Writer(CodeGenerator):
    """A code generator for templates with marks on their literal text."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str):
            self.write(f"environment.own({str.__repr__(value)})")
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(f"environment.own({node.data!r})")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.own({''.join(map(str, group))!r})"


class _Templates(ImmutableSandboxedEnvironment):
    """The sandbox, with marked text."""

    code_generator_class = _Writer
    concat = staticmethod(joined)
    own = staticmethod(own)


class RefusalError(TemplateError):
    """The error of `raise_exception`: the template refuses the messages."""


@final
class Generation(Extension):
    """The tag `{% generation %}` around an assistant's answer: its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (the library's own attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the body into a block with a separate scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("render"), [], [], body).set_lineno(
            line
        )

    def render(self, caller: Callable[[], str]) -> str:
        """Return the rendered body."""
        return caller()


def render_template(
    template: str, variables: Mapping[str, Any], tokens: Mapping[str, str]
) -> OwnText:
    """Render a template with the functions and filters of chat templates in `transformers`."""
    environment = _Templates(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
        loader=FunctionLoader(_refuse_file),
    )
    environment.filters["tojson"] = _to_json
    environment.filters["join"] = _join
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    given: dict[str, Any] = {name: own(token) for name, token in tokens.items()} | dict(
        variables
    )
    if "messages" in given:
        given["messages"] = [_with_own_role(message) for message in given["messages"]]
    # Generate in parts, so that an endless template is stopped at the limit.
    parts: list[str] = []
    size = 0
    for part in environment.from_string(template).generate(**given):
        size += len(part)
        if size > MOST_CHARACTERS:
            raise OverflowError(f"it writes more than {MOST_CHARACTERS:,} characters")
        parts.append(part)
    return joined(parts)


def _with_own_role(message: Any) -> Any:
    """Mark a known role as the template's, since templates spell it out in special tokens."""
    if isinstance(message, dict) and message.get("role") in _ROLES:
        return message | {"role": own(message["role"])}
    return message


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
    # jinja2's filter would escape characters for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _render_or_explain(request: dict[str, Any]) -> dict[str, Any]:
    try:
        found = render_template(
            request["template"], request["variables"], request["tokens"]
        )
        return {"text": found, "own": found.ranges()}
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


# Templates to trigger imports on first use in Python and jinja2, for escapes in text and for errors.
_REHEARSAL = (
    "{{ ['a\\n', 1] | tojson(indent=2) }}{{ strftime_now('%d %b %Y') }}{{ [1] | pprint }}{{ lipsum(1) }}",
    "{{ ['a'] | join(' ') ~ 'b' }}",
    "{{ 1 / 0 }}",
    "{{ nothing.at.all }}",
    "{% nothing %}",
)


def _limit() -> None:
    """Set the system's limits for the process, after the rehearsal: later imports cannot open files."""
    for template in _REHEARSAL:
        _render_or_explain({"template": template, "variables": {}, "tokens": {}})
    if sys.platform != "win32":
        limits = {
            resource.RLIMIT_CPU: CPU_SECONDS,
            resource.RLIMIT_AS: _MEMORY_BYTES,
            resource.RLIMIT_NOFILE: 3,  # input, output and errors are already open
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
