"""The page of commands, made from the records that `--help` prints.

`python -m triptych.cli.reference docs/reference/commands.md` (`make docs`) writes it.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import typer

from triptych.cli.main import COMMANDS, application
from triptych.cli.verbs import read_verb
from triptych.files import write_text

_HEAD = """# Commands

`triptych COMMAND --help` prints what this page shows. `make docs` writes this page from the same records.
"""


def commands_page() -> str:
    """A section for every command: what it does, two examples, its arguments and options."""
    return "\n".join([_HEAD, *(line for name in COMMANDS for line in _section(name))])


def _section(name: str) -> Iterator[str]:
    verb = read_verb(name)
    yield from (f"## {name}\n", f"{verb.text}\n", "```sh", *verb.examples, "```\n")
    group = typer.main.get_command(application([name]))
    command = group.commands[name]  # type: ignore[attr-defined]
    context = command.make_context(name, [], resilient_parsing=True)
    yield from ("| option | meaning |", "|---|---|")
    for parameter in command.get_params(context):
        if (record := parameter.get_help_record(context)) is not None:
            option, meaning = (cell.replace("|", "\\|").replace("\n", " ") for cell in record)
            yield f"| `{option}` | {meaning} |"
    yield ""


if __name__ == "__main__":
    write_text(Path(sys.argv[1]), commands_page())
