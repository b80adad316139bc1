"""Files with user-defined classes, such as a parameterisation of attention, named as `FILE.py:CLASS`.

A file is executed only if a person names it: in a recipe for training, in a study, or with `--code`. A run
stores the file's name and SHA-256 but not its text, so opening a run never executes code from the
run. A file is registered by its name without the folder, until another file of the same name is registered.

`use_code` registers a file and reads it. The file is executed when `find_class` first needs a class of it,
after `require_digests` has compared the digest stored in a run. A file with another digest is refused and
never executed, and the file registered before by the same name is restored.
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
    """A registered file: its text and, once executed, its module.

    Attributes:
        before: executed file registered by the same name before this file.
    """

    path: Path
    source: bytes
    sha256: str
    before: "_File | None"
    module: ModuleType | None = None

    def executed(self) -> ModuleType:
        """Return the module; the first call executes the file."""
        if self.module is not None:
            return self.module
        # The module's name depends only on the text, so that processes can exchange pickled objects.
        module = ModuleType(f"triptych_code_{self.sha256[:16]}")
        module.__file__ = str(self.path)
        sys.modules[module.__name__] = module
        try:
            exec(compile(self.source, str(self.path), "exec"), vars(module))
        except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's file may raise any exception)
            del sys.modules[module.__name__]
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
            ends = (
                ": a file of classes must not end the process"
                if isinstance(error, SystemExit)
                else ""
            )
            raise UsageError(
                f"{self.path}{line}: {type(error).__name__}: {error}{ends}"
            ) from None
        self.module = module
        self.before = None
        return module


_FILES: dict[str, _File] = {}


def use_code(path: str | Path) -> None:
    """Register a file and read it; execution waits until a class of the file is needed."""
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
    # Only executed files are restored later: an unexecuted file passes on its predecessor.
    before = known if known is None or known.module is not None else known.before
    _FILES[path.name] = _File(path, source, sha256, before)


def use_named(tree: Any) -> None:
    """Register the files named in a person's own recipe or study, from the current folder.

    A file already registered by a name keeps its path and is read again.
    """
    for name in sorted(named_files(tree)):
        use_code(_FILES[name].path if name in _FILES else name)


def is_in_file(name: str) -> bool:
    """Return True if a name has the form of a class in a file."""
    return ".py:" in name


def find_class(name: str, base: ClassT, key: str) -> ClassT:
    """Return the class `FILE.py:CLASS`, a subclass of `base`, and set its `name`.

    `key` is the key of the recipe, for messages.
    """
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
    # A class that the file only imports has another owner: it must not be renamed.
    if not isinstance(found, type) or found.__module__ != module.__name__:
        raise UsageError(f"{_FILES[file].path} defines no class {own}")
    if not issubclass(found, base):
        raise ValueError(
            f"{key} = {name!r} is no {base.__name__}: derive it from that class"
        )
    named: Any = found
    named.name = name
    return named  # type: ignore[no-any-return]


def named_files(tree: Any) -> set[str]:
    """Return the files of all classes named in a tree of plain values."""
    if isinstance(tree, str):
        match = _NAME.fullmatch(tree)
        return set() if match is None else {match[1]}
    values: Iterable[Any] = tree.values() if isinstance(tree, Mapping) else ()
    values = tree if isinstance(tree, list | tuple) else values
    return set[str]().union(*map(named_files, values))


def file_digests(tree: Any) -> dict[str, str]:
    """Return the SHA-256 of each registered file named in a tree."""
    return {
        name: _FILES[name].sha256
        for name in sorted(named_files(tree))
        if name in _FILES
    }


def require_digests(wanted: Mapping[str, object]) -> None:
    """Check, before execution, that the registered files are the files of a run's training.

    A file with another digest raises `UsageError`. Unless it was executed before, for another purpose, it is
    unregistered, and the file registered before by the same name is restored.
    """
    # Unregistered files are refused later, by `find_class`.
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
    """Return the paths of all registered files, for another process."""
    return [file.path for file in _FILES.values()]


def executed_paths() -> list[Path]:
    """Return the paths of all executed files, for a process to unpickle objects of their classes."""
    return [file.path for file in _FILES.values() if file.module is not None]


def of_ended(stop: SystemExit) -> Path | None:
    """Return the registered file in the traceback of a `SystemExit`, or None."""
    files = {str(file.path): file.path for file in _FILES.values()}
    passed = (frame.filename for frame in traceback.extract_tb(stop.__traceback__))
    return next((files[name] for name in passed if name in files), None)


def execute(path: Path) -> None:
    """Register and execute a file, to unpickle objects of its classes."""
    use_code(path)
    _FILES[path.name].executed()
