"""Computation of losses and gradients with whole models in each process, or in shards (`distributed.py`)."""

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

from triptych.core.models import AnyModel, find_device, load_tensors
from triptych.errors import UsageError
from triptych.processes import World
from triptych.training.losses import Loss
from triptych.training.objectives import Objective, TrainingBatch
from triptych.training.precision import NarrowTwin
from triptych.training.sections import OptimisationConfig

Kind = Literal["ddp", "fsdp", "hybrid"]

# Weights, gradients and two moments of Adam in float32. Muon has one moment less for its matrices.
_BYTES_PER_PARAMETER = 16
# Share of a device's memory for the state; activations use the remainder.
_SHARE_FOR_STATE = 0.5


class LazyParameters(NamedTuple):
    """Future weights of a model on the "meta" device."""

    device: torch.device  # device of the weights
    values: Iterable[tuple[str, Tensor]]  # names and whole values, made one at a time


class Layout(NamedTuple):
    """Layout of a model on the processes of a run."""

    world: World = World()  # process group
    kind: Kind | None = None  # kind of parallelism; None for one process
    parameters: LazyParameters | None = (
        None  # weights of a model on "meta"; None for a model with weights
    )


ONE_PROCESS = Layout()


class LossOfBatch(nn.Module):
    """Loss of a batch as one module: a single call is the model's whole forward pass."""

    # FSDP hooks into the call of a module. Objectives call parts of their models, and read the output table
    # without a call.

    def __init__(self, objective: Objective[Any, Any], model: AnyModel) -> None:
        super().__init__()
        self.model = model
        self._objective = objective

    def forward(self, batch: TrainingBatch, step: int | None) -> tuple[Tensor, Tensor]:
        """Return training loss and likelihood, summed over tokens; the validation loss if `step` is None."""
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
    """Computation of losses and gradients of a run's model.

    The losses of all parts are divided by the tokens of all processes before the gradients are summed, so
    that a step equals the step of one process on the whole batch.
    """

    def __init__(
        self, objective: Objective[Any, Any], model: AnyModel, world: World
    ) -> None:
        # The optimizer updates the parameters of the objective's model.
        self.objective, self._world, self._seed = objective, world, torch.initial_seed()
        self.model = (
            model  # computes losses; in bfloat16, the twin of the objective's model
        )
        self._loss = LossOfBatch(objective, model)

    def begin_update(self, step: int) -> None:
        """Prepare update number `step` before its first batch."""
        if self._world.size == 1:
            return  # the state of the one generator is saved
        # The generator is seeded for each update and rank, so that states can omit the generators.
        drawn = np.random.SeedSequence(
            [self._seed, step, self._world.rank]
        ).generate_state(1, np.uint64)
        torch.manual_seed(int(drawn[0]))

    @abstractmethod
    def learn(
        self, batch: TrainingBatch, step: int, tokens: int, *, last: bool
    ) -> Tensor:
        """Add the gradients of a batch to the parameters' gradients; returns the loss.

        After the last batch of an update, they are summed over the processes.
        """

    def judge(self, batch: TrainingBatch) -> Loss:
        """Compute the validation loss of this process's part of a batch, without gradients."""
        return Loss(*self._loss(batch, None))

    def judge_all(self, batches: Iterable[TrainingBatch]) -> tuple[float, float]:
        """Return the validation loss of this process's batches in nats, summed, and their tokens."""
        loss = tokens = 0.0
        with torch.no_grad():
            for batch in batches:
                loss += self.judge(batch).likelihood.item()
                tokens += batch.num_target_tokens
        return loss, tokens

    def clip(self, limit: float) -> float:
        """Clip the norm of the whole model's gradients; returns the norm before."""
        norm = torch.nn.utils.clip_grad_norm_(self.objective.model.parameters(), limit)
        return self._whole(norm).item()

    def set_mode(self, *, training: bool) -> None:
        """Set training or evaluation mode."""
        self.objective.model.train(training)

    def follow(self) -> None:  # noqa: B027 - empty for a model without a twin
        """Update the computing model after a step of the optimizer."""

    @contextmanager
    def whole(self, *, on_host: bool = False) -> Iterator[Any]:
        """Yield the whole model in the first process, and None in the other processes.

        Every process must enter this context. The mode, training or evaluation, stays unchanged.
        """
        del on_host  # only shards are gathered on another device
        yield self.objective.model if self._world.is_first else None

    def gathered(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors on the CPU in the first process, else {}; all processes have to call it."""
        found: dict[str, Tensor] = {}
        for name, value in named.items():
            whole = self._whole(value.detach())
            if self._world.is_first:
                found[name] = whole.cpu().contiguous()
        return found

    def _whole(self, value: Tensor) -> Tensor:
        """Return the whole tensor, gathered from the parts of all processes."""
        return value

    def place(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """Return this process's part of a whole tensor, in the layout of a parameter."""
        del parameter
        return whole

    def load(self, tensors: dict[str, Tensor], origin: str) -> None:
        """Copy whole tensors into the parameters; every process passes all tensors."""
        load_tensors(self.objective.model, tensors, origin, self.place)


@final
class Whole(Computing):
    """Computation with the whole model in every process, or with its twin in bfloat16."""

    def __init__(
        self, objective: Objective[Any, Any], precision: str, world: World | None = None
    ) -> None:
        self._twin = NarrowTwin(objective.model) if precision == "bf16" else None
        model = objective.model if self._twin is None else self._twin.model
        super().__init__(objective, model, world or World())

    def learn(
        self, batch: TrainingBatch, step: int, tokens: int, *, last: bool
    ) -> Tensor:
        loss: Tensor = self._loss(batch, step)[0]
        (loss / tokens).backward()  # type: ignore[no-untyped-call]
        if self._twin is not None:
            self._twin.hand_over_gradients()
        if last:
            gradients = [weight.grad for weight in self.objective.model.parameters()]
            self._world.add_up(
                [gradient for gradient in gradients if gradient is not None]
            )
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
    """Batch with a loss of zero, for a process without a row: all processes must run the same collectives."""

    batch: TrainingBatch
    num_target_tokens: int = 0  # always 0

    def pinned(self) -> "NotCounted":
        """Copy the batch to page-locked memory."""
        return NotCounted(self.batch.pinned())


def rows_of_rank(
    indices: Int64[np.ndarray, "batch"], rank: int, size: int
) -> tuple[Int64[np.ndarray, "part"], bool]:
    """Return a process's rows of a batch, every `size`-th row, and whether they count.

    A process without a row gets the first row, and the result is ignored.
    """
    if size == 1:
        return indices, True
    own = indices[rank::size]
    return (own, True) if len(own) else (indices[:1], False)


def choose_parallel(
    config: OptimisationConfig, model: AnyModel, world: World
) -> tuple[Kind | None, str]:
    """Return the kind of parallelism, None for one process, and a sentence for the user."""
    # Whole models need fewer collectives: shards only if the state does not fit the memory.
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
    """Raise an error unless several processes can train by these settings."""
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
    physical = (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if hasattr(os, "sysconf")
        else 2**34
    )
    on_machine = min(int(text), physical) if text.isdigit() else physical
    return on_machine // (world.size // world.num_nodes)
