"""Changed code put into functions that are imported already, so that nothing need be imported again."""

import gc
import types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

# CO_NEWLOCALS: functions have it, modules and classes do not.
_OF_FUNCTIONS = 0x0002


class Functions:
    """The functions of imported sources, by file and qualified name."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[types.FunctionType]] = defaultdict(list)
        for thing in gc.get_objects():
            if type(thing) is types.FunctionType:
                code = thing.__code__
                self._found[code.co_filename, code.co_qualname].append(thing)

    def swap(self, source: Path, before: str, after: str) -> bool:
        """Give functions of a source the code that they have in the changed one.

        Returns:
            Whether that is all that the change does: it is in the body of a function, and only one function
            of its name is there.
        """
        path = str(source)
        modules = [compile(text, path, "exec", dont_inherit=True) for text in (before, after)]
        one, other = (list(_functions(module)) for module in modules)
        if len(one) != len(other) or [*_frames(modules[0])] != [*_frames(modules[1])]:
            return False
        changed = [(old, new) for old, new in zip(one, other, strict=True) if old != new]
        swaps = []
        for old, new in changed:
            found = self._found.get((path, old.co_qualname), [])
            names = [code.co_qualname for code in one].count(old.co_qualname)
            if names != 1 or not found or any(f.__code__.co_freevars != new.co_freevars for f in found):
                return False
            swaps += [(function, new) for function in found]
        for function, new in swaps:
            function.__code__ = new
        return bool(swaps)


def _functions(code: types.CodeType) -> Iterator[types.CodeType]:
    """Those of a module and of its classes, in order; not those within functions."""
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            if const.co_flags & _OF_FUNCTIONS:
                yield const
            else:
                yield from _functions(const)


def _frames(code: types.CodeType) -> Iterator[tuple[bytes, str, tuple[str, ...]]]:
    constants = [const for const in code.co_consts if not isinstance(const, types.CodeType)]
    yield code.co_code, repr(constants), code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType) and not const.co_flags & _OF_FUNCTIONS:
            yield from _frames(const)
