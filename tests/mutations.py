"""Files with some of their values changed, as a seed decides."""

import copy
import json
import random
import struct
import tomllib
from collections.abc import Callable
from typing import Any

import tomli_w

# What a file may hold in place of what belongs there.
STRANGE: tuple[Any, ...] = (
    *(0, -1, 1, 3, 10**6, 10**9, 2**31, 2**63, 10**30, 0.5, -0.0, 1e-320, 1e308, float("inf"), float("nan")),
    *("", "x", "1", "ü\u0000\ud800", "../../x", "a" * 100_000, "float32", "/dev/null"),
    *(None, True, False, [], {}, [[]], [1, 2], {"x": 1}, [None] * 1000, {"type": "x"}),
)


def _places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of every value in a tree of dictionaries and lists, the way to it."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [
        *([path] if path else []),
        *(place for key, value in inner for place in _places(value, (*path, key))),
    ]


def mutated_tree(tree: Any, chance: random.Random) -> Any:
    """A copy with one or two values changed, removed, or doubled under another name."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.choice((1, 1, 1, 2))):
        *above, last = chance.choice(_places(tree))
        holder = tree
        for key in above:
            holder = holder[key]
        kind = chance.random()
        if kind < 0.12:
            del holder[last]
        elif kind < 0.2 and isinstance(holder, dict):
            holder[chance.choice(("x", "num_layers", "d_model", f"{last}s"))] = holder[last]
        elif kind < 0.4 and isinstance(holder[last], int | float):
            holder[last] = chance.choice(
                (holder[last] + 1, -holder[last], holder[last] * 1000, holder[last] / 2)
            )
        else:
            holder[last] = copy.deepcopy(chance.choice(STRANGE))  # a second change may go into it
        if not tree:
            break
    return tree


def mutated_json(content: bytes, chance: random.Random) -> bytes:
    """JSON with other values, and now and then a byte that is wrong."""
    changed = json.dumps(mutated_tree(json.loads(content), chance)).encode()
    return mutated_bytes(changed, chance) if chance.random() < 0.05 else changed


def mutated_toml(content: bytes, chance: random.Random) -> bytes:
    """TOML with other values, and now and then a byte that is wrong."""
    tree = mutated_tree(tomllib.loads(content.decode()), chance)
    changed = tomli_w.dumps(_without_none(tree)).encode("utf-8", "surrogatepass")
    return mutated_bytes(changed, chance) if chance.random() < 0.05 else changed


def _without_none(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_none(value) for key, value in tree.items() if value is not None}
    return [_without_none(value) for value in tree if value is not None] if isinstance(tree, list) else tree


def mutated_safetensors(content: bytes, chance: random.Random) -> bytes:
    """Safetensors with other values in the header, or another length of it."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    for name, value in list(header.get("__metadata__", {}).items()):
        if value.startswith("{"):
            header["__metadata__"][name] = json.loads(value)
    header = mutated_tree(header, chance)
    if isinstance(header.get("__metadata__"), dict):
        for name, value in header["__metadata__"].items():
            header["__metadata__"][name] = value if isinstance(value, str) else json.dumps(value)
    changed = json.dumps(header).encode()
    stated = len(changed) if chance.random() < 0.9 else chance.choice((0, 1, 10**6, 2**40, 2**63, 2**64 - 1))
    return struct.pack("<Q", stated) + changed + content[8 + length :]


def mutated_bytes(content: bytes, chance: random.Random) -> bytes:
    """A few bytes other, more or fewer."""
    changed = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) + 1)
        kind = chance.randrange(3)
        if kind == 0 and at < len(changed):
            changed[at] = chance.randrange(256)
        elif kind == 1:
            changed[at:at] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 12)))
        else:
            del changed[at : at + chance.choice((1, 2, 100))]
    return bytes(changed)


Mutation = Callable[[bytes, random.Random], bytes]
