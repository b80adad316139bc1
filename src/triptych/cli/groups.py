"""Options of a command in groups.

Typer reads one parameter for each option. A command with many of them takes groups here, each a `NamedTuple`
whose fields are options with their defaults: typer sees the fields in the place of the group.
"""

from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer, of one that has groups of options among its parameters."""
    hints, groups = get_type_hints(command, include_extras=True), dict[str, Any]()
    parameters = list[Parameter]()
    for parameter in signature(command).parameters.values():
        kind = hints[parameter.name]
        if not (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")):
            parameters.append(parameter.replace(annotation=kind, kind=Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = kind
        own: Any = kind
        for name, annotation in get_type_hints(kind, include_extras=True).items():
            default = own._field_defaults.get(name, Parameter.empty)
            parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))

    def called(**given: Any) -> None:
        made = {name: kind(**{own: given.pop(own) for own in kind._fields}) for name, kind in groups.items()}
        command(**given, **made)

    called.__name__, called.__doc__, called.__module__ = (
        command.__name__,
        command.__doc__,
        command.__module__,
    )
    called.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called
