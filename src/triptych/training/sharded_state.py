"""States of a run in shards: each process writes its part.

`torch.distributed.checkpoint` writes safetensors: one folder for every state, one file for each process. The
marker `complete.json` is written last; a folder without a marker is incomplete. Tensors have the names of the
one-file state; the files store whole shapes and the offset of each shard, so that any number of processes can
read them. Optimizer tensors have the names of their parameters, because the indices of
`optimizer.state_dict()` depend on the layout.
"""

import json
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from triptych.core.models import AnyModel, model_tensors
from triptych.errors import DataError, TriptychError, first_line
from triptych.processes import World
from triptych.training.optimizers import Optimizer
from triptych.training.state import (
    Counters,
    complete_states,
    read_marker,
    shards_folder,
    write_marker,
)


@final
class ShardedStates:
    """Writer of states in the background of training."""

    def __init__(self, folder: Path, world: World, keep: int) -> None:
        self._folder = folder
        self._world = world
        self._keep = keep
        names = (path.name.removeprefix("saved-") for path in folder.glob("saved-*"))
        self._number = world.on_first(
            lambda: max([*(int(name) for name in names if name.isdigit()), 0])
        )
        # Collectives of the saving thread overlap with training collectives, and need a separate group.
        self._group = dist.new_group(backend="gloo")
        self._saving: tuple[Future[Any], Path, str, Callable[[], None]] | None = None

    def save(
        self, counters: Counters, tensors: dict[str, Tensor], saved: Callable[[], None]
    ) -> None:
        """Start saving a state; the tensors are copied before this method returns.

        `saved` is called once the state is complete.
        """
        self.finish()
        self._number += 1
        path = shards_folder(self._folder, self._number)

        def make_empty() -> None:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)

        self._world.on_first(make_empty)
        writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
        # The writer first copies the tensors, because training changes them during the write.
        held: dict[str, Any] = {name: value.detach() for name, value in tensors.items()}
        future = async_save(held, storage_writer=writer, process_group=self._group)
        assert isinstance(future, Future)
        self._saving = future, path, json.dumps(asdict(counters)), saved

    def poll(self) -> None:
        """Mark the state as complete if its tensors are written."""
        if (
            self._saving is not None
            and self._saving[0].done()
            and self._saving[0].exception() is None
        ):
            self._mark()

    def finish(self) -> None:
        """Wait until the state is complete in all processes."""
        if self._saving is None:
            return

        def wait() -> None:
            assert self._saving is not None
            try:
                self._saving[0].result()
            except (CheckpointException, OSError, RuntimeError) as error:
                path = self._saving[1]
                self._saving = None
                raise TriptychError(
                    f"{path} could not be saved ({_reason(error)}); what was saved before is whole: free "
                    "some space, then resume the run"
                ) from None

        # The marker comes last, once all processes have written: a state without it is incomplete.
        self._world.on_all(wait)
        self._world.on_first(self._mark)
        self._saving = None

    def _mark(self) -> None:
        if self._saving is None or not self._world.is_first:
            return
        # Older states are removed only after this state has its marker.
        _, path, counters, saved = self._saving
        if read_marker(path) is None:
            write_marker(path, json.loads(counters), self._world.size)
            (self._folder / "last.safetensors").unlink(missing_ok=True)
            saved()
            kept = {path, *complete_states(self._folder)[-self._keep :]}
            for old in self._folder.glob("saved-*"):
                if old not in kept:
                    shutil.rmtree(old, ignore_errors=True)


def read_sharded_state(
    path: Path, model: AnyModel, optimizer: Optimizer, world: World
) -> None:
    """Load a sharded state into a model and its optimizer; their layout may differ from the saved layout."""
    reader = HuggingFaceStorageReader(str(path))
    try:
        held = reader.read_metadata().state_dict_metadata
    # The reader does not validate: a damaged header raises errors of many classes.
    except Exception as error:  # noqa: BLE001
        raise DataError(
            f"{path} is damaged ({_reason(error)}): resume from another state"
        ) from None
    wanted: dict[str, Any] = {
        f"model.{name}": value for name, value in model_tensors(model).items()
    }
    wanted |= {
        name: value for name, value in optimizer.empty_tensors().items() if name in held
    }
    if missing := sorted(wanted.keys() ^ held.keys()):
        raise DataError(
            f"{path} is the state of another model: {missing[0]} is on one side only"
        )
    for name, value in wanted.items():
        if tuple(held[name].size) != tuple(value.shape):  # type: ignore[union-attr]
            raise DataError(
                f"{path}: {name} is {list(held[name].size)}, the model wants {list(value.shape)}: "  # type: ignore[union-attr]
                "a shard is missing, or the state is another model's"
            )
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "torch.distributed is disabled", UserWarning
            )
            load(wanted, storage_reader=reader, no_dist=world.size == 1)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise DataError(
            f"{path} is damaged ({_reason(error)}): resume from another state"
        ) from None
    optimizer.load(wanted)


def _reason(error: BaseException) -> str:
    """Return the first line of an error, or of the error of the first process that failed."""
    if isinstance(error, CheckpointException):
        failures = sorted(error.failures.items())
        if failures:
            rank, (inner, _) = failures[0]
            return f"rank {rank}: {_reason(inner)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error)
