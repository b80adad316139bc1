"""Files of checkpoints changed in place: tensors, and records in JSON."""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


@contextmanager
def edited_tensors(folder: Path) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of a checkpoint, and write them back with what was done to them."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    yield tensors
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


def set_tensors(folder: Path, tensors: Mapping[str, Tensor | None]) -> None:
    """Set tensors of a checkpoint; None takes a tensor out."""
    with edited_tensors(folder) as held:
        for name, tensor in tensors.items():
            if tensor is None:
                held.pop(name, None)
            else:
                held[name] = tensor.clone()


@contextmanager
def edited_json(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the record of a file, and write it back with what was done to it."""
    record = json.loads(path.read_text(encoding="utf-8"))
    yield record
    path.write_text(json.dumps(record), encoding="utf-8")


def set_fields(path: Path, **fields: Any) -> None:
    """Set fields of a record in JSON."""
    with edited_json(path) as record:
        record.update(fields)


def drop_fields(path: Path, *names: str) -> None:
    """Take fields out of a record in JSON, where they are in it."""
    with edited_json(path) as record:
        for name in names:
            record.pop(name, None)


def with_value(record: dict[str, Any], field: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """A copy of a record with another value in one place."""
    found = copy.deepcopy(record)
    within: Any = found
    for name in field[:-1]:
        within = within[name]
    within[field[-1]] = value
    return found
