"""The processes of a distributed training.

`torchrun` starts them and sets their number in the environment. They agree on every decision about the next
step: when to stop, and which error ends the run. All must have the same text and code.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from triptych.errors import ElsewhereError, TriptychError, UsageError
from triptych.launch import num_launched, num_on_machine, num_restarts, place_on_machine

T = TypeVar("T")

_ERROR_KEY = "error"
# Time to wait for the message of a failed process.
_SECONDS_FOR_MESSAGE = 3.0
_MESSAGE_BYTES = 25 * 2**20  # least size of a message of small tensors
_ALL_DAY = timedelta(days=30)
_MINUTES_OF_A_WEEK = 7 * 24 * 60.0
_JOINS = count()  # joins so far; all processes join in the same order


@dataclass(frozen=True)
class _Failure:
    rank: int
    message: str
    exit_code: int

    @classmethod
    def of(cls, rank: int, error: BaseException) -> "_Failure":
        if isinstance(error, ElsewhereError):
            return cls(rank, str(error), error.exit_code)
        known = isinstance(error, TriptychError)
        message = str(error) if known else f"{type(error).__name__}: {error}"
        return cls(
            rank, message, error.exit_code if isinstance(error, TriptychError) else 1
        )

    def error(self) -> ElsewhereError:
        return ElsewhereError(f"rank {self.rank}: {self.message}", self.exit_code)


@final
class World:
    """Process group of a run, from one process's view. Without a launcher it has one process."""

    def __init__(
        self, store: Store | None = None, timeout_minutes: float = _MINUTES_OF_A_WEEK
    ) -> None:
        self._store = store
        self._timeout_minutes = timeout_minutes
        # Rank of this process from 0; number of processes; number of machines.
        self.rank, self.size, self.num_nodes = 0, 1, 1
        if store is not None:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            local = num_on_machine()
            self.num_nodes = self.size // local if self.size % local == 0 else 1
        self.seconds_waited = 0.0  # time in reductions so far
        self._num_waits = self._num_turns = 0

    @property
    def is_first(self) -> bool:
        """True if this process writes the files of the run and prints messages."""
        return self.rank == 0

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Sum each value over the processes, in float64."""
        return self._reduced(
            torch.tensor(list(numbers), dtype=torch.float64), dist.ReduceOp.SUM
        ).tolist()

    def largest(self, number: int) -> int:
        """Return the maximum of a value over the processes."""
        return int(self._reduced(torch.tensor(number), dist.ReduceOp.MAX))

    def _reduced(self, values: torch.Tensor, by: Any) -> torch.Tensor:
        if self._store is not None:
            started = time.monotonic()
            dist.all_reduce(values, by)  # on the CPU: the group has a backend for it
            self.seconds_waited += time.monotonic() - started
        return values

    def add_up(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum tensors over the processes, in-place and on their device; small tensors share a message."""
        # Tensors are collected up to `_MESSAGE_BYTES`, and the last message is smaller.
        piece = list[torch.Tensor]()
        size = 0
        for number, tensor in enumerate(
            tensors if self._store is not None else (), start=1
        ):
            piece = [*piece, tensor]
            size = size + tensor.nbytes
            if size >= _MESSAGE_BYTES or number == len(tensors):
                flat = torch.cat([one.flatten() for one in piece])
                dist.all_reduce(flat)
                parts = torch.split(flat, [one.numel() for one in piece])
                for one, part in zip(piece, parts, strict=True):
                    one.copy_(part.view_as(one))
                piece = []
                size = 0

    def gathered(self, value: T) -> list[T]:
        """Gather a value from every process; returns the values by rank."""
        found = [value] * self.size
        if self._store is not None:
            dist.all_gather_object(found, value)
        return found

    def on_first(self, action: Callable[[], T], *, patiently: bool = False) -> T:
        """Call `action` in the first process only, and return its result in all processes.

        With `patiently`, the other processes wait up to 30 days, without the process group's time limit.
        """
        store = self._store
        if store is None:
            return action()
        done = f"done-{self._num_waits}"
        self._num_waits = self._num_waits + 1

        def act() -> T | None:
            if self.rank > 0:
                if patiently:
                    store.wait([done], _ALL_DAY)
                return None
            try:
                return action()
            finally:
                if patiently:
                    store.set(done, "")

        return self.gathered(self.on_all(act))[0]  # type: ignore[return-value]

    def on_all(self, action: Callable[[], T]) -> T:
        """Call `action` in every process, wait for all, and return this process's result.

        If a call fails, every process raises an error.
        """
        if self._store is None:
            return action()
        own: BaseException | None = None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 - raised below, after the other processes know
            own = error
        failure = None if own is None else _Failure.of(self.rank, own)
        failures = [one for one in self.gathered(failure) if one is not None]
        if own is not None and (self.rank == 0 or not isinstance(own, TriptychError)):
            raise own
        if failures:
            raise failures[0].error()
        return result

    def turns(self, count: int) -> "Turns":
        """Return indices of pieces of work for the processes to share; every process must make this call."""
        self._num_turns += 1
        store = dist.HashStore() if self._store is None else self._store  # type: ignore[attr-defined]
        key = f"turns-{self._num_turns}"
        return Turns(lambda name, more: store.add(f"{key}-{name}", more), count)

    def require_same(self, what: Mapping[str, str]) -> None:
        """Raise an error unless all processes have the same digests of texts, recipe and code."""
        of_ranks = self.gathered(dict(what))
        for rank, other in enumerate(of_ranks):
            for name in of_ranks[0].keys() | other.keys():
                if other.get(name) != of_ranks[0].get(name):
                    raise TriptychError(
                        f"rank {rank} has another version of {name} than rank 0: all processes need the same "
                        "text, recipe and code"
                    )

    def tell(self, error: BaseException) -> None:
        """Store an error for the other processes before this process ends."""
        if self._store is not None and not isinstance(error, ElsewhereError):
            self._store.set(_ERROR_KEY, json.dumps(vars(_Failure.of(self.rank, error))))

    def explained(self, error: RuntimeError) -> TriptychError | None:
        """Return the cause of a communication error; None if `error` is not a communication error."""
        # torch raises RuntimeError for all of them: only the text differs.
        text = str(error)
        if "imed out" in text or "imeout" in text:
            return TriptychError(
                f"rank {self.rank} waited {self._timeout_minutes:g} minutes for another process, which hangs "
                "or is cut off; look at the logs of the ranks. training.timeout_minutes of a recipe sets how "
                "long a process waits. What is saved is whole: triptych train --resume goes on from it"
            )
        if not any(
            word in text for word in ("onnection", "gloo", "NCCL", "ocket", "peer")
        ):
            return None
        deadline = time.monotonic() + _SECONDS_FOR_MESSAGE
        while self._store is not None and time.monotonic() < deadline:
            if self._store.check([_ERROR_KEY]):
                return _Failure(**json.loads(self._store.get(_ERROR_KEY))).error()
            time.sleep(0.05)
        return ElsewhereError(
            "another process ended without a word (killed, or out of memory); what is saved is whole: the "
            "same command goes on from it (triptych train: with --resume)",
            1,
        )


@final
class Turns:
    """Indices from 0, shared by the processes: a free process takes the next index."""

    def __init__(self, add: Callable[[str, int], int], count: int) -> None:
        self._add = add
        self.count = count

    def take(self) -> int | None:
        """Return the next index; None after the last index, or after a process has failed."""
        if self._add("given-up", 0):
            return None
        number = self._add("taken", 1) - 1
        return number if number < self.count else None

    def taken(self) -> Iterator[int]:
        """Yield this process's indices."""
        while (number := self.take()) is not None:
            yield number

    def end_one(self) -> None:
        """Count the work of one taken index as finished."""
        self._add("ended", 1)

    @property
    def are_over(self) -> bool:
        """True if the work of every index is finished, or a process has failed."""
        return self._add("ended", 0) >= self.count or self._add("given-up", 0) > 0

    @contextmanager
    def given_up_on_error(self) -> Iterator[None]:
        """Stop all processes after their present piece of work if the block raises an error."""
        try:
            yield
        except BaseException:
            self._add("given-up", 1)
            raise


def do_each(items: Sequence[str], work: Callable[[str], T], world: World) -> list[T]:
    """Distribute the calls of `work` over the processes; returns the results of all items."""
    if world.size == 1:
        return [work(item) for item in items]
    said = hashlib.sha256(json.dumps(list(items)).encode()).hexdigest()
    world.require_same({"the list of what is to be done": said, **code_digests()})
    turns = world.turns(len(items))
    own = dict[int, T]()

    def do_own() -> None:
        with turns.given_up_on_error():
            for number in turns.taken():
                own[number] = work(items[number])

    # Every item was done by one process: the union has all results.
    world.on_all(do_own)
    found = dict[int, T]()
    for one in world.gathered(own):
        found |= one
    return [found[number] for number in range(len(items))]


@contextmanager
def launched(
    device: str, timeout_minutes: float = _MINUTES_OF_A_WEEK
) -> Iterator[World]:
    """Join the processes of `torchrun` inside the block; yield a single process without a launcher."""
    if num_launched() == 1:
        yield World()
        return
    on_gpu = device.startswith("cuda") or (
        device == "auto" and torch.cuda.is_available()
    )
    if on_gpu:
        _take_gpu(device)
    store = _join_world(on_gpu, timeout_minutes)
    world = World(store, timeout_minutes)
    try:
        yield world
    except RuntimeError as error:
        explained = world.explained(error)
        world.tell(explained or error)
        if explained is None:
            raise
        raise explained from None
    except Exception as error:  # the other processes get every kind of error
        world.tell(error)
        raise
    finally:
        dist.destroy_process_group()


def _take_gpu(device: str) -> None:
    local = place_on_machine()
    found = torch.cuda.device_count()
    if device not in ("auto", "cuda"):
        raise UsageError(
            f"the device is {device!r}, but each process needs a GPU of its own: use 'cuda'"
        )
    # Every process of the machine sees the same count, so that all raise and no process waits in a join. A
    # launcher without LOCAL_WORLD_SIZE may have started processes on other machines.
    started = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), local + 1)
    if started > found:
        raise UsageError(
            f"torchrun started {started} processes on a machine of {found} GPUs: lower --nproc-per-node, or "
            "take the device 'cpu'"
        )
    torch.cuda.set_device(local)


def _join_world(on_gpu: bool, timeout_minutes: float) -> Store:
    timeout = timedelta(minutes=timeout_minutes)
    missing = [
        name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if missing:
        raise UsageError(
            f"{' and '.join(missing)} are not set: start the processes with torchrun"
        )
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        # Restarted or rejoining processes must not find the addresses of an earlier attempt.
        store = PrefixStore(f"attempt-{num_restarts()}-{next(_JOINS)}", store)
        joined = PrefixStore("triptych-group", store)
        dist.init_process_group(
            backend, store=joined, rank=rank, world_size=size, timeout=timeout
        )
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise TriptychError(f"the processes could not be joined: {reason}") from None
    return PrefixStore("triptych", store)


def code_digests() -> dict[str, str]:
    """Return the digest of this package and torch's version; both must be the same in all processes."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode())
        digest.update(path.read_bytes())
    return {"the code of triptych": digest.hexdigest(), "torch": torch.__version__}
