"""How the model computes: whole in one process, as copies, or in shards."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from triptych.models.storage import OwnModel, load_tensors
from triptych.training.losses import Loss
from triptych.training.objectives import Objective, TrainingBatch
from triptych.training.parallel.striping import NotCounted
from triptych.training.parallel.world import Alone, World
from triptych.training.precision import NarrowTwin

Kind = Literal["ddp", "fsdp", "hybrid"]


class Unmade(NamedTuple):
    """What is to become the weights of a model whose parameters are on the "meta" device.

    Attributes:
        device: where they are to be.
        values: name and whole value of each, made one after the other.
    """

    device: torch.device
    values: Iterable[tuple[str, Tensor]]


class Layout(NamedTuple):
    """The processes of a run, and how its model lies on them.

    Attributes:
        world: the processes.
        kind: None for one process.
        unmade: the weights of a model that has none yet; None if it has.
    """

    world: World = Alone()
    kind: Kind | None = None
    unmade: Unmade | None = None


ONE_PROCESS = Layout()


class Computing(ABC):
    """The model of a run as it computes losses and gradients.

    Attributes:
        objective: what is learned; its model's parameters are what the optimizer changes.
    """

    objective: Objective[Any, Any]

    @property
    @abstractmethod
    def model(self) -> OwnModel:
        """What computes; not always what is trained."""

    @abstractmethod
    def begin_update(self, step: int) -> None:
        """Before the first batch of update number `step`."""

    @abstractmethod
    def learn(self, batch: TrainingBatch, step: int, tokens: int, *, last: bool) -> Tensor:
        """Add the gradients of a batch to those of the parameters."""

    @abstractmethod
    def judge(self, batch: TrainingBatch) -> Loss:
        """The validation's loss of this process's part of a batch, without gradients."""

    def judge_all(self, batches: Iterable[TrainingBatch]) -> tuple[float, float]:
        """The validation's loss of this process's parts of a text in nats, summed, and its tokens.

        The model must be in evaluation mode.
        """
        loss = tokens = 0.0
        with torch.no_grad():
            for batch in batches:
                loss += self.judge(batch).likelihood.item()
                tokens += batch.num_target_tokens
        return loss, tokens

    @abstractmethod
    def clip(self, limit: float) -> float:
        """Scale the gradients to at most this norm, over the whole model; returns the norm before."""

    @abstractmethod
    def set_mode(self, *, training: bool) -> None:
        """Training or evaluation."""

    @abstractmethod
    def follow(self) -> None:
        """After the optimizer has changed the parameters."""

    @abstractmethod
    def whole(self, *, on_host: bool = False) -> AbstractContextManager[Any]:
        """A context with the whole model, in evaluation mode or training mode as it is set.

        Every process must enter it. The first one gets the model, the others None.
        """

    @abstractmethod
    def gathered(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors on the CPU; in the first process only, the others get nothing. All must call it."""

    @abstractmethod
    def place(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """What this process keeps of a whole tensor with the layout of a parameter."""

    def load(self, tensors: dict[str, Tensor], origin: str) -> None:
        """Copy whole tensors into the parameters; every process has them all."""
        load_tensors(self.objective.model, tensors, origin, self.place)


@final
class OneProcess(Computing):
    """The whole model in one process, or its twin in bfloat16."""

    def __init__(self, objective: Objective[Any, Any], precision: str) -> None:
        self.objective = objective
        self._twin = NarrowTwin(objective.model) if precision == "bf16" else None

    @property
    def model(self) -> OwnModel:
        model: OwnModel = self.objective.model if self._twin is None else self._twin.model
        return model

    def begin_update(self, step: int) -> None:
        del step

    def learn(self, batch: TrainingBatch, step: int, tokens: int, *, last: bool) -> Tensor:
        del last
        loss = self.objective.training_loss(self.model, batch, step).smoothed
        (loss / tokens).backward()  # type: ignore[no-untyped-call]
        if self._twin is not None:
            self._twin.hand_over_gradients()
        return loss.detach()

    def judge(self, batch: TrainingBatch) -> Loss:
        return self.objective.loss(self.model, batch)

    def clip(self, limit: float) -> float:
        return torch.nn.utils.clip_grad_norm_(self.objective.model.parameters(), limit).item()

    def set_mode(self, *, training: bool) -> None:
        self.objective.model.train(training)
        if self._twin is not None:
            self._twin.model.train(training)
            self._twin.follow()

    def follow(self) -> None:
        if self._twin is not None:
            self._twin.follow()

    @contextmanager
    def whole(self, *, on_host: bool = False) -> Iterator[OwnModel]:
        del on_host  # it is whole where it computes
        yield self.objective.model

    def gathered(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.detach().cpu().contiguous() for name, value in named.items()}

    def place(self, parameter: Tensor, whole: Tensor) -> Tensor:
        del parameter
        return whole


class LossOfBatch(nn.Module):
    """The loss of a batch as one module, so that its one call is the model's whole forward pass.

    torch's wrappers act where a module is called. The objectives call parts of their models, and read the
    output table without calling it; within this module all that is one call.
    """

    def __init__(self, objective: Objective[Any, Any]) -> None:
        super().__init__()
        self.model: OwnModel = objective.model
        self._objective = objective

    def forward(self, batch: TrainingBatch, step: int | None) -> tuple[Tensor, Tensor]:
        """Loss to minimise and likelihood, summed over tokens; of a validation if `step` is None."""
        share = 1.0
        if isinstance(batch, NotCounted):
            batch, share = batch.batch, 0.0
        if step is None:
            found = self._objective.loss(self.model, batch)
        else:
            found = self._objective.training_loss(self.model, batch, step)
        return found.smoothed * share, found.likelihood * share
