"""How the model computes: whole in each process, or in shards (`distributed.py`)."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor, nn

from triptych.core.models.device import find_device
from triptych.core.models.storage import OwnModel, load_tensors
from triptych.errors import UsageError
from triptych.training.losses import Loss
from triptych.training.objectives import Objective, TrainingBatch
from triptych.training.precision import NarrowTwin
from triptych.training.processes import World
from triptych.training.sections import OptimisationConfig

Kind = Literal["ddp", "fsdp", "hybrid"]

# Weights, gradients and two moments of Adam in float32. Muon keeps one moment less of its matrices.
_BYTES_PER_PARAMETER = 16
# The rest of a device is for activations.
_SHARE_FOR_STATE = 0.5


class LazyParameters(NamedTuple):
    """What is to become the weights of a model whose parameters are on the "meta" device."""

    device: torch.device  # where they are to be
    values: Iterable[tuple[str, Tensor]]  # name and whole value of each, made one after the other


class Layout(NamedTuple):
    """The processes of a run, and how its model lies on them."""

    world: World = World()  # the processes
    kind: Kind | None = None  # None for one process
    parameters: LazyParameters | None = None  # the weights of a model that has none yet; None if it has


ONE_PROCESS = Layout()


class LossOfBatch(nn.Module):
    """The loss of a batch as one module, so that its one call is the model's whole forward pass."""

    # FSDP acts where a module is called. The objectives call parts of their models, and read the output table
    # without calling it.

    def __init__(self, objective: Objective[Any, Any], model: OwnModel) -> None:
        super().__init__()
        self.model = model
        self._objective = objective

    def forward(self, batch: TrainingBatch, step: int | None) -> tuple[Tensor, Tensor]:
        """Loss to minimise and likelihood, summed over tokens; of a validation if `step` is None."""
        share = 1.0
        if isinstance(batch, NotCounted):
            batch = batch.batch
            share = 0.0
        if step is None:
            found = self._objective.loss(self.model, batch)
        else:
            found = self._objective.training_loss(self.model, batch, step)
        return found.smoothed * share, found.likelihood * share


class Computing(ABC):
    """The model of a run as it computes losses and gradients.

    The losses of all parts are divided by the tokens of all processes before their gradients are summed, so
    that a step is that of one process on the whole batch.
    """

    def __init__(self, objective: Objective[Any, Any], model: OwnModel, world: World) -> None:
        # What is learned; its model's parameters are what the optimizer changes.
        self.objective, self._world, self._seed = objective, world, torch.initial_seed()
        self.model = model  # what computes; not always what is trained
        self._loss = LossOfBatch(objective, model)

    def begin_update(self, step: int) -> None:
        """Before the first batch of update number `step`."""
        if self._world.size == 1:
            return  # the state of the one generator is saved
        # Dropout is drawn anew for each update and rank, so no state of a generator has to be saved.
        drawn = np.random.SeedSequence([self._seed, step, self._world.rank]).generate_state(1, np.uint64)
        torch.manual_seed(int(drawn[0]))

    @abstractmethod
    def learn(self, batch: TrainingBatch, step: int, tokens: int, *, last: bool) -> Tensor:
        """Add the gradients of a batch to the parameters' gradients; returns the loss.

        After the last batch of an update, they are summed over the processes.
        """

    def judge(self, batch: TrainingBatch) -> Loss:
        """The validation's loss of this process's part of a batch, without gradients."""
        return Loss(*self._loss(batch, None))

    def judge_all(self, batches: Iterable[TrainingBatch]) -> tuple[float, float]:
        """The validation's loss of this process's parts of a text in nats, summed, and its tokens."""
        loss = tokens = 0.0
        with torch.no_grad():
            for batch in batches:
                loss += self.judge(batch).likelihood.item()
                tokens += batch.num_target_tokens
        return loss, tokens

    def clip(self, limit: float) -> float:
        """Scale the gradients to at most this norm, over the whole model; returns the norm before."""
        norm = torch.nn.utils.clip_grad_norm_(self.objective.model.parameters(), limit)
        return self._whole(norm).item()

    def set_mode(self, *, training: bool) -> None:
        """Training or evaluation."""
        self.objective.model.train(training)

    def follow(self) -> None:  # noqa: B027 - nothing more to do where what computes is what is trained
        """After the optimizer has changed the parameters."""

    @contextmanager
    def whole(self, *, on_host: bool = False) -> Iterator[Any]:
        """A context with the whole model, in evaluation mode or training mode as it is set.

        Every process must enter it. The first one gets the model, the others None.
        """
        del on_host  # it is whole where it computes
        yield self.objective.model if self._world.is_first else None

    def gathered(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors on the CPU; in the first process only, the others get nothing. All must call it."""
        found: dict[str, Tensor] = {}
        for name, value in named.items():
            whole = self._whole(value.detach())
            if self._world.is_first:
                found[name] = whole.cpu().contiguous()
        return found

    def _whole(self, value: Tensor) -> Tensor:
        """A tensor of which every process has its part."""
        return value

    def place(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """What this process keeps of a whole tensor with the layout of a parameter."""
        del parameter
        return whole

    def load(self, tensors: dict[str, Tensor], origin: str) -> None:
        """Copy whole tensors into the parameters; every process has them all."""
        load_tensors(self.objective.model, tensors, origin, self.place)


@final
class Whole(Computing):
    """The whole model in every process, or its twin in bfloat16."""

    def __init__(self, objective: Objective[Any, Any], precision: str, world: World | None = None) -> None:
        self._twin = NarrowTwin(objective.model) if precision == "bf16" else None
        model = objective.model if self._twin is None else self._twin.model
        super().__init__(objective, model, world or World())

    def learn(self, batch: TrainingBatch, step: int, tokens: int, *, last: bool) -> Tensor:
        loss: Tensor = self._loss(batch, step)[0]
        (loss / tokens).backward()  # type: ignore[no-untyped-call]
        if self._twin is not None:
            self._twin.hand_over_gradients()
        if last:
            gradients = [weight.grad for weight in self.objective.model.parameters()]
            self._world.add_up([gradient for gradient in gradients if gradient is not None])
        return loss.detach()

    def set_mode(self, *, training: bool) -> None:
        super().set_mode(training=training)
        if self._twin is not None:
            self._twin.model.train(training)
        self.follow()

    def follow(self) -> None:
        if self._twin is not None:
            self._twin.follow()


@final
@dataclass(frozen=True, eq=False)
class NotCounted:
    """A batch whose loss counts as zero: a process without a row computes one, as the others wait for it."""

    batch: TrainingBatch  # what is computed
    num_target_tokens: int = 0  # always 0

    def pinned(self) -> "NotCounted":
        """A copy in page-locked memory."""
        return NotCounted(self.batch.pinned())


def rows_of_rank(
    indices: Int64[np.ndarray, "batch"], rank: int, size: int
) -> tuple[Int64[np.ndarray, "part"], bool]:
    """The rows of a batch that a process takes: every `size`-th one."""
    if size == 1:
        return indices, True
    own = indices[rank::size]
    return (own, True) if len(own) else (indices[:1], False)


def choose_parallel(config: OptimisationConfig, model: OwnModel, world: World) -> tuple[Kind | None, str]:
    """The kind of parallelism, and why; None for one process."""
    if world.size == 1:
        return None, ""
    require_kind(config, world.size)
    if config.parallel is not None and config.parallel != "none":
        return config.parallel, f"{world.size} processes, {config.parallel}"
    device = find_device(config.device)
    needed = _BYTES_PER_PARAMETER * sum(weight.numel() for weight in model.parameters())
    memory = _device_bytes(device, world)
    sharded: Kind = "hybrid" if 1 < world.num_nodes < world.size else "fsdp"
    kind: Kind = "ddp" if needed <= _SHARE_FOR_STATE * memory else sharded
    return kind, (
        f"{world.size} processes; training.parallel left out, chosen: {kind} (weights, gradients and "
        f"optimizer take {needed / 2**30:.2f} GiB, a device has {memory / 2**30:.0f} GiB)"
    )


def require_kind(config: OptimisationConfig, num_processes: int) -> None:
    """Several processes can do what a recipe asks for."""
    if config.parallel == "none":
        raise UsageError(
            f"training.parallel = 'none' is for one process, and {num_processes} were started: use 'ddp' or "
            "'fsdp'"
        )
    if config.optimizer == "muon" and config.parallel != "ddp":
        raise UsageError(
            "training.optimizer = 'muon' needs whole matrices: set training.parallel = 'ddp', or "
            "optimizer = 'adamw'"
        )


def _device_bytes(device: torch.device, world: World) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="utf-8").strip() if limit.exists() else "max"
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**34
    on_machine = min(int(text), physical) if text.isdigit() else physical
    return on_machine // (world.size // world.num_nodes)
