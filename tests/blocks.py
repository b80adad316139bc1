"""The blocks of a page: what a reader would save, type and run, in their order."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from triptych.cli.main import run as run_command

# A number as a page may show it: 1,048,576, 0.33, 1e-15, 96%.
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?%?")
_SAVED = re.compile(r"`([\w-]+\.(?:toml|py))`")
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->$")
# The directories of this environment's commands first: python, torchrun.
_PATH = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


class Block(NamedTuple):
    """A fenced block and its line.

    Attributes:
        saved_as: the file that the sentence before it says it is saved as.
        not_run: why it cannot run here, from the comment of the page before it.
    """

    language: str
    text: str
    line: int
    saved_as: str | None = None
    not_run: str | None = None

    @property
    def is_code(self) -> bool:
        return self.language in ("python", "sh", "console") and self.saved_as is None

    def commands(self) -> list[tuple[str, str]]:
        """The commands that a reader types, each with the output that the page shows."""
        text = self.text.replace("\\\n", " ")
        if self.language == "sh":
            return [(line, "") for line in text.splitlines() if line]
        found = [command.partition("\n") for command in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]]
        return [(line, output) for line, _, output in found]


class Ran(NamedTuple):
    """What a block printed, and what the page shows of it; None if it shows nothing."""

    block: Block
    printed: str
    shown: str | None


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in re.finditer(r"^```(\w+)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        before = text[: fence.start()].rstrip().rpartition("\n\n")[2]
        named = [name for name in _SAVED.findall(before) if name.endswith(fence[1].replace("python", "py"))]
        saved = fence[1] == "toml" or before.lower().startswith("save this")
        line = text.count("\n", 0, fence.start()) + 1
        reason = _NOT_RUN.search(before)
        saved_as = named[-1] if named and saved else None
        found.append(Block(fence[1], fence[2], line, saved_as, reason[1] if reason else None))
    return found


def run_blocks(
    page: Path, *, typed: Callable[[str], str] = str, names: dict[str, Any] | None = None
) -> Iterator[Ran]:
    """Run the blocks of a page in the current folder; `typed` may change a command, `names` are Python's."""
    names = {} if names is None else names
    blocks = blocks_of(page)
    for block, following in zip(blocks, [*blocks[1:], Block("end", "", 0)], strict=True):
        shown = following.text if following.language == "text" else None
        if block.saved_as is not None:
            Path(block.saved_as).write_text(block.text, encoding="utf-8")
        elif block.not_run is not None:
            continue
        elif block.language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                # The lines before it, left empty, make tracebacks name the page's own lines.
                exec(compile("\n" * block.line + block.text, page.name, "exec"), names)
            yield Ran(block, printed.getvalue(), shown)
        elif block.is_code:
            for line, output in block.commands():
                yield Ran(block, _call(typed(line), f"{page.name}, line {block.line}"), output or None)


def _call(line: str, where: str) -> str:
    """What a command prints; with `# fails` behind it, it must fail. What `pip` installs is there."""
    line, _, remark = line.partition("   # ")
    before, _, command = line.rpartition(" | ")
    words = shlex.split(command, comments=True)
    if words[:2] == ["pip", "install"]:
        return ""
    if words[0] != "triptych":
        done = subprocess.run(line, shell=True, env=os.environ | _PATH, capture_output=True, text=True)
        assert done.returncode == 0, f"{where}: {line}\n{done.stdout}{done.stderr}"
        return done.stdout
    argv, stdin = sys.argv, sys.stdin
    printed, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in "oe")
    sys.argv = words
    sys.stdin = io.TextIOWrapper(io.BytesIO((shlex.split(before)[1] + "\n").encode() if before else b""))
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
            run_command()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv, sys.stdin = argv, stdin
    out, err = (stream.buffer.getvalue().decode() for stream in (printed, errors))  # type: ignore[attr-defined]
    assert bool(code) == (remark == "fails"), f"{where}: {line}\n{out}{err}"
    return out


def assert_shown(ran: Ran, where: str) -> None:
    """What a block printed is what the page shows: the same words, and nearly the same numbers."""
    shown, printed = ran.shown or "", ran.printed
    if ran.block.language == "console":  # of a command's output, the lines that matter
        printed = _lines_like(shown, printed)
    masked = [_NUMBER.sub("#", text).split() for text in (shown, printed)]
    assert masked[0] == masked[1], f"{where}, line {ran.block.line}:\n{ran.printed}"
    for expected, found in zip(_NUMBER.findall(shown), _NUMBER.findall(printed), strict=True):
        assert is_near(expected, found), f"{where}, line {ran.block.line}: {expected}, printed {found}"


def _lines_like(shown: str, printed: str) -> str:
    """For each line shown the next printed one that differs from it in numbers only."""
    left, kept = iter(printed.splitlines()), []
    for line in shown.splitlines():
        masked = _NUMBER.sub("#", line).split()
        kept.append(next((one for one in left if _NUMBER.sub("#", one).split() == masked), ""))
    return "\n".join(kept)


def is_near(shown: str, printed: str) -> bool:
    """Whether a number is the one shown, to what another machine may make of it."""
    if "." not in shown and "e" not in shown and not shown.endswith("%"):
        return shown == printed
    one, other = (float(number.replace(",", "").rstrip("%")) for number in (shown, printed))
    if "e" in shown:  # a rounding error: its size is what matters, and less is as good
        return other <= 100 * max(one, 1e-16)
    if shown.endswith("%"):  # the result of a training
        return abs(one - other) <= 8
    return abs(one - other) <= max(0.1 * abs(one), 0.005)
