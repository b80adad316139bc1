"""Files of a user's own classes, such as a parameterisation of attention: `FILE.py:CLASS` names one.

A file is executed because a person names it: in a recipe that is trained, in a study, or with `--code`. A run
keeps the file's name and SHA-256 and nothing of its text, so opening a run executes nothing that came with
it. A file is known by its name, without the folder, until another of that name is given.
"""

import hashlib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, final

from triptych.errors import UsageError
from triptych.storage.untrusted import LONGEST_TEXT, read_limited

ClassT = TypeVar("ClassT", bound=type)

_NAME = re.compile(r"([^/\\:]+\.py):([A-Za-z_]\w*)")


@final
@dataclass(frozen=True)
class _File:
    path: Path
    sha256: str
    module: ModuleType


_FILES: dict[str, _File] = {}


def use_code(path: str | Path) -> None:
    """Execute a file, whose classes can then be named."""
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
        _FILES[path.name] = _File(path, sha256, known.module)
        return
    # Every process gives a module of the same text the same name: what it defines can be pickled.
    module = ModuleType(f"triptych_code_{sha256[:16]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, str(path), "exec"), vars(module))
    except Exception as error:  # noqa: BLE001 (whatever somebody's file raises)
        del sys.modules[module.__name__]
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UsageError(f"{path}{line}: {type(error).__name__}: {error}") from None
    _FILES[path.name] = _File(path, sha256, module)


def use_named(tree: Any) -> None:
    """Execute the files that a person's own recipe or study names, from the current folder.

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
    module = _FILES[file].module
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


def require_digests(wanted: Mapping[str, str]) -> None:
    """Check that the files are those that a run was trained with."""
    for name, sha256 in wanted.items():
        if name in _FILES and _FILES[name].sha256 != sha256:
            raise UsageError(
                f"{_FILES[name].path} (SHA-256 {_FILES[name].sha256[:12]}…) is not the {name} that the run "
                f"was trained with ({sha256[:12]}…): give that file with --code"
            )


def paths() -> list[Path]:
    """Where the files lie that were given, for another process."""
    return [file.path for file in _FILES.values()]
