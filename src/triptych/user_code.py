"""Files of a user's own classes, such as a parameterisation of attention: `FILE.py:CLASS` names one.

A file is executed because a person names it: in a recipe that is trained, in a study, or with `--code`. A run
keeps the file's name and SHA-256 and nothing of its text, so opening a run executes nothing that came with
it. A file is known by its name, without the folder, until another of that name is given.

Giving a file (`use_code`) only reads it. The file is executed when a class of it is first needed
(`find_class`). The digest that a run has of the file is compared before that (`require_digests`). A file that
differs is refused and never executed, and the file that was known by that name before is known again.
"""

import hashlib
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, final

from triptych.errors import UsageError
from triptych.untrusted import LONGEST_TEXT, read_limited

ClassT = TypeVar("ClassT", bound=type)

_NAME = re.compile(r"([^/\\:]+\.py):([A-Za-z_]\w*)")


@final
@dataclass
class _File:
    """A file that a person gave: its text, and the module that the text defines once it was executed.

    Attributes:
        before: the executed file that was known by the same name when this file was given.
    """

    path: Path
    source: bytes
    sha256: str
    before: "_File | None"
    module: ModuleType | None = None

    def executed(self) -> ModuleType:
        """Return the module, which the first call makes by executing the file."""
        if self.module is not None:
            return self.module
        # Every process gives a module of the same text the same name: what it defines can be pickled.
        module = ModuleType(f"triptych_code_{self.sha256[:16]}")
        module.__file__ = str(self.path)
        sys.modules[module.__name__] = module
        try:
            exec(compile(self.source, str(self.path), "exec"), vars(module))
        except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever somebody's file raises)
            del sys.modules[module.__name__]
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
            ends = ": a file of classes must not end the process" if isinstance(error, SystemExit) else ""
            raise UsageError(f"{self.path}{line}: {type(error).__name__}: {error}{ends}") from None
        self.module = module
        self.before = None
        return module


_FILES: dict[str, _File] = {}


def use_code(path: str | Path) -> None:
    """Give a file, whose classes can then be named. It is read here, and executed when a class is needed."""
    path = Path(path).absolute()
    try:
        source = read_limited(path, LONGEST_TEXT)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}): --code FILE says where a file of classes lies"
        ) from None
    sha256 = hashlib.sha256(source).hexdigest()
    known = _FILES.get(path.name)
    if known is not None and known.sha256 == sha256:
        known.path = path
        return
    before = known if known is None or known.module is not None else known.before
    _FILES[path.name] = _File(path, source, sha256, before)


def use_named(tree: Any) -> None:
    """Give the files that a person's own recipe or study names, from the current folder.

    A file that was given stays the one of its name, and is read again.
    """
    for name in sorted(named_files(tree)):
        use_code(_FILES[name].path if name in _FILES else name)


def is_in_file(name: str) -> bool:
    """Whether a name is of a class in a file."""
    return ".py:" in name


def find_class(name: str, base: ClassT, key: str) -> ClassT:
    """The class of a name, which a recipe gives at a key: derived from `base`, whose `name` it gets."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise UsageError(
            f"{name!r} is not FILE.py:CLASS: leave out the folder, and give it with --code FOLDER/FILE.py"
        )
    file, own = match.groups()
    if file not in _FILES:
        raise UsageError(
            f"{name!r} is in a file that is never executed by itself: give it with --code {file} "
            f'(code="{file}" in Python)'
        )
    module = _FILES[file].executed()
    found = getattr(module, own, None)
    # A class that the file imports belongs to others, who know it by another name.
    if not isinstance(found, type) or found.__module__ != module.__name__:
        raise UsageError(f"{_FILES[file].path} defines no class {own}")
    if not issubclass(found, base):
        raise ValueError(f"{key} = {name!r} is no {base.__name__}: derive it from that class")
    named: Any = found
    named.name = name
    return named  # type: ignore[no-any-return]


def named_files(tree: Any) -> set[str]:
    """The files of all classes that a tree of plain values names."""
    if isinstance(tree, str):
        match = _NAME.fullmatch(tree)
        return set() if match is None else {match[1]}
    values: Iterable[Any] = tree.values() if isinstance(tree, Mapping) else ()
    values = tree if isinstance(tree, list | tuple) else values
    return set[str]().union(*map(named_files, values))


def file_digests(tree: Any) -> dict[str, str]:
    """The SHA-256 of each file that a tree names."""
    return {name: _FILES[name].sha256 for name in sorted(named_files(tree)) if name in _FILES}


def require_digests(wanted: Mapping[str, object]) -> None:
    """Check that the files are those that a run was trained with, before any of them is executed.

    A file that differs raises a `UsageError`. If it was not executed before, for something else, it is
    forgotten, and the file that was known by its name before is known again.
    """
    for name, sha256 in wanted.items():
        given = _FILES.get(name)
        if given is None or given.sha256 == sha256:
            continue
        if given.module is None:
            del _FILES[name]
            if given.before is not None:
                _FILES[name] = given.before
        raise UsageError(
            f"{given.path} (SHA-256 {given.sha256[:12]}…) is not the {name} that the run was trained with "
            f"({str(sha256)[:12]}…): give that file with --code"
        )


def paths() -> list[Path]:
    """Return where the files lie that were given, for another process."""
    return [file.path for file in _FILES.values()]


def executed_paths() -> list[Path]:
    """Return where the files lie that were executed, for a process that gets objects of their classes."""
    return [file.path for file in _FILES.values() if file.module is not None]


def of_ended(stop: SystemExit) -> Path | None:
    """Return the file whose code ended the process by an exception; None if none of them did."""
    files = {str(file.path): file.path for file in _FILES.values()}
    passed = (frame.filename for frame in traceback.extract_tb(stop.__traceback__))
    return next((files[name] for name in passed if name in files), None)


def execute(path: Path) -> None:
    """Give a file and execute it, because objects of its classes are to be unpickled."""
    use_code(path)
    _FILES[path.name].executed()
