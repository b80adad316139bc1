"""Types and shapes of every function and dataclass of ours, checked while tests run.

The checks are those of `jaxtyping.jaxtyped(typechecker=beartype.beartype)`, in a fraction of the time. Its
wrapper binds each call to the signature and checks the arguments twice: that took longer than the tests.
"""

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, ForwardRef, TypeVar

import jaxtyping
from beartype import beartype
from beartype.roar import BeartypeException

_by_jaxtyping = jaxtyping.jaxtyped
# In it a name of an axis has one size.
_one_call = jaxtyping.jaxtyped("context")


def install() -> Any:
    """Check the package from its first import on; as a context, until its end."""
    jaxtyping.jaxtyped = _checked
    return jaxtyping.install_import_hook("triptych", "beartype.beartype")


def _checked(fn: Any = None, *, typechecker: Any) -> Any:
    if fn is None:
        return functools.partial(_checked, typechecker=typechecker)
    if inspect.isclass(fn):
        if dataclasses.is_dataclass(fn) and "__init__" in vars(fn):
            fn.__init__ = _checked(fn.__init__, typechecker=typechecker)  # type: ignore[misc]
        return fn
    if not inspect.isfunction(fn):
        return _by_jaxtyping(fn, typechecker=typechecker)
    if any(isinstance(part, str) for part in _parts([*fn.__annotations__.values()])):
        return _when_called(fn, typechecker)
    return _at_once(fn, typechecker)


def _at_once(fn: Any, typechecker: Any) -> Any:
    try:
        checked = _local(fn) if "<locals>" in fn.__qualname__ else beartype(fn)
    except BeartypeException:  # a default of another type, as the options of commands have
        return _by_jaxtyping(fn, typechecker=typechecker)
    parts = _parts([*fn.__annotations__.values()])
    if any(inspect.isclass(part) and issubclass(part, jaxtyping.AbstractArray) for part in parts):
        return _with_shapes(checked)
    return checked


def _local(fn: Any) -> Any:
    """Check a function made in another one: beartype writes its check once, not at every call."""
    first = _checks_of_local.get(fn.__code__)
    if first is None:
        first = _checks_of_local[fn.__code__] = beartype(fn)
        return first
    if "__beartype_func" not in (first.__kwdefaults__ or {}):  # nothing in it to check
        return fn
    checked = types.FunctionType(first.__code__, first.__globals__, first.__name__)
    checked.__kwdefaults__ = first.__kwdefaults__ | {"__beartype_func": fn}
    return functools.update_wrapper(checked, fn)


_checks_of_local: dict[types.CodeType, Any] = {}


def _when_called(fn: Any, typechecker: Any) -> Any:
    """Check a function whose annotations name what its module defines later; Any for what it never does."""
    made: list[Callable[..., Any]] = []

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not made:
            fn.__annotations__ = {name: _named(one, fn) for name, one in fn.__annotations__.items()}
            made.append(_at_once(fn, typechecker))
        return made[0](*args, **kwargs)

    return call


def _named(annotation: Any, fn: Any) -> Any:
    def of_one(value: Any) -> None: ...

    of_one.__annotations__ = {"value": annotation}
    try:
        return typing.get_type_hints(of_one, fn.__globals__, include_extras=True)["value"]
    except (NameError, AttributeError):  # imported for the type checker alone, or the class of a function
        return Any


def _with_shapes(checked: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(checked)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _one_call:
            return checked(*args, **kwargs)

    return call


def _parts(annotation: Any) -> Iterator[Any]:
    """An annotation and everything in it; the text of what is written as one."""
    if isinstance(annotation, list | tuple):
        for one in annotation:
            yield from _parts(one)
        return
    yield annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else annotation
    if typing.get_origin(annotation) is not typing.Literal:
        yield from _parts(typing.get_args(annotation))
    if isinstance(annotation, TypeVar):
        yield from _parts([annotation.__bound__, *annotation.__constraints__])
