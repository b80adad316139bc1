"""Pieces of work that exchange nothing, such as scores of many models: one of the processes does each."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from itertools import repeat
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from triptych.training.parallel.world import World, code_digests

ResultT = TypeVar("ResultT")


def do_each(
    items: Sequence[str], work: Callable[[str], ResultT], world: World, kind: type[ResultT]
) -> list[ResultT]:
    """Do a piece of work for each item, each in one of the processes."""
    if world.size == 1:
        return [work(item) for item in items]
    said = hashlib.sha256(json.dumps(list(items)).encode()).hexdigest()
    world.require_same({"the list of what is to be done": said, **code_digests()})
    turns, own = world.turns(len(items)), dict[int, ResultT]()

    def do_own() -> None:
        with turns.given_up_on_error():
            for number in turns.taken():
                own[number] = work(items[number])

    world.on_all(do_own)
    records = {number: asdict(one) for number, one in own.items()}  # type: ignore[call-overload]
    found = dict[int, ResultT]()
    for text in world.gathered_texts(json.dumps(records)):
        found |= {int(number): rebuilt(kind, record) for number, record in json.loads(text).items()}
    return [found[number] for number in range(len(items))]


def rebuilt(kind: Any, value: Any) -> Any:
    """What a dataclass was before `asdict` and JSON: dataclasses and tuples are themselves again.

    Numbers stay what they are: an integer in the place of a float is not made one.
    """
    inner = get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: rebuilt(hints[name], own) for name, own in value.items()})  # type: ignore[operator]
    match get_origin(kind):
        case origin if origin is tuple:
            return tuple(map(rebuilt, repeat(inner[0]) if Ellipsis in inner else inner, value))
        case origin if origin is list:
            return [rebuilt(inner[0], own) for own in value]
        case origin if origin is dict:
            return {name: rebuilt(inner[1], own) for name, own in value.items()}
        case origin if origin in (Union, UnionType) and value is not None:
            kinds = [one for one in inner if one is not NoneType]
            return rebuilt(kinds[0], value) if len(kinds) == 1 else value
    return value
