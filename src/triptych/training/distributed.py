"""Models in shards on several processes (FSDP2).

Gradients are summed, never averaged: with gloo, an averaging reduce-scatter returns the sum (pytorch
#162338).
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from triptych.core.models import AnyModel, EncoderDecoder, OffsetNorm
from triptych.errors import UsageError
from triptych.processes import World
from triptych.training.computing import Computing, Kind, LazyParameters
from triptych.training.losses import Loss
from triptych.training.objectives import Objective, TrainingBatch


def spread(
    objective: Objective[Any, Any],
    kind: Kind,
    precision: str,
    world: World,
    shard_size: int | None = None,
    parameters: LazyParameters | None = None,
) -> Computing:
    """Shard a model over the processes."""
    # A mesh of one replica is only its dimension of shards.
    device = (
        next(objective.model.parameters()).device
        if parameters is None
        else parameters.device
    )
    shape = mesh_shape(kind, world.size, world.num_nodes, shard_size)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("copy", "shard"))
    shards = Shards(
        objective, mesh if shape[0] > 1 else mesh["shard"], precision, world
    )
    if parameters is not None:
        shards.make(parameters.values)
    return shards


def mesh_shape(
    kind: Kind, size: int, num_nodes: int, shard_size: int | None = None
) -> tuple[int, int]:
    """Return the shape of the device mesh: number of replicas of the model, and shards per replica."""
    if kind == "fsdp":
        return 1, size
    shards = shard_size or (2 if num_nodes == 1 else size // num_nodes)
    if shards < 2 or size % shards or size // shards < 2:
        groups = f"groups of {shards}" if shard_size else f"{num_nodes} machines"
        raise UsageError(
            "training.parallel = 'hybrid' shards within a group of processes and copies across: "
            f"{size} processes in {groups} cannot do that; use another training.shard_size, 'fsdp' or 'ddp'"
        )
    return size // shards, shards


@final
class Shards(Computing):
    """Computation with a shard of each parameter in every process; blocks are gathered in use (FSDP2)."""

    # Blocks that share parameters are one FSDP group. Embeddings, positions and output table are in the root
    # group, so that tied tables are gathered and updated as one parameter. In bfloat16, blocks and norms
    # compute in bfloat16; the root's tables stay in float32, the same as in `NarrowTwin`.

    def __init__(
        self,
        objective: Objective[Any, Any],
        mesh: DeviceMesh,
        precision: str,
        world: World,
    ) -> None:
        super().__init__(objective, objective.model, world)
        self._mesh, self._tied = mesh, _tied(objective.model)
        self._blank = _without_values(objective.model)
        policy = MixedPrecisionPolicy()
        blocks = list(objective.model.blocks)
        groups = _of_same_parameters(blocks)
        if precision == "bf16":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            for stack in objective.model.stacks.values():
                stack.embeddings.stream_dtype = torch.bfloat16
            groups += [[norm] for norm in _norms_outside(objective.model, blocks)]
        for group in groups:
            fully_shard(group, mesh=mesh, mp_policy=policy)
        fully_shard(self._loss, mesh=mesh)
        self._parts = [
            module for module in self._loss.modules() if isinstance(module, FSDPModule)
        ]
        for part in self._parts:
            # Plain sums (see above): `Trainer` divides the loss by the tokens of all processes.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)

    @torch.no_grad()
    def make(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Allocate the shards of a model on "meta", and fill them from names and whole values."""
        model = self.objective.model
        device = self._mesh.device_type
        buffers = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        model.to_empty(device=device)
        for (
            module,
            name,
            buffer,
        ) in buffers:  # buffers have their values: only parameters were deferred
            setattr(module, name, buffer.to(device))
        left = dict(model.named_parameters())
        for name, value in values:
            parameter = left.pop(name)
            parameter.copy_(self.place(parameter, value))
        assert not left, f"no values for {', '.join(left)}"

    def learn(
        self, batch: TrainingBatch, step: int, tokens: int, *, last: bool
    ) -> Tensor:
        assert isinstance(self._loss, FSDPModule)
        self._loss.set_requires_gradient_sync(last)
        loss: Tensor = self._loss(batch, step)[0]
        (loss / tokens).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def judge(self, batch: TrainingBatch) -> Loss:
        found = super().judge(batch)
        for part in self._parts:
            part.reshard()
        return found

    @contextmanager
    def whole(self, *, on_host: bool = False) -> Iterator[AnyModel | None]:
        model = self.objective.model
        device = "cpu" if on_host else self._mesh.device_type
        tensors = self.gathered(
            {name: value.detach() for name, value in model.named_parameters()}
        )
        if not self._world.is_first:
            yield None
            return
        # `pop` releases each gathered tensor after its copy.
        whole = copy.deepcopy(self._blank)
        for name in [*tensors]:
            parameter = nn.Parameter(
                tensors.pop(name).to(device), whole.get_parameter(name).requires_grad
            )
            _put(whole, name, parameter)
        for name, first in self._tied:
            _put(whole, name, whole.get_parameter(first))
        for module, held in zip(whole.modules(), model.modules(), strict=True):
            for name, buffer in held.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        yield whole.train(model.training)

    def _whole(self, value: Tensor) -> Tensor:
        return value.full_tensor() if isinstance(value, DTensor) else value

    def place(self, parameter: Tensor, whole: Tensor) -> Tensor:
        assert isinstance(parameter, DTensor), "every parameter is in a group"
        whole = whole.to(parameter.device)
        return distribute_tensor(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=None
        )


def _without_values(model: AnyModel) -> AnyModel:
    """Copy a model to the "meta" device."""
    held = [*model.parameters(), *model.buffers()]
    empty = {id(one): torch.empty_like(one, device="meta") for one in held}
    for one in model.parameters():
        empty[id(one)] = nn.Parameter(empty[id(one)], one.requires_grad)
    return copy.deepcopy(model, empty)


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replace the parameter of this name."""
    owner, _, own = name.rpartition(".")
    setattr(model.get_submodule(owner), own, parameter)


def _tied(model: nn.Module) -> list[tuple[str, str]]:
    """Return pairs of names for tied parameters: a repeated name, and the first name of the parameter."""
    first: dict[int, str] = {}
    names = [
        (name, first.setdefault(id(value), name))
        for name, value in model.named_parameters(remove_duplicate=False)
    ]
    return [(name, other) for name, other in names if name != other]


def _of_same_parameters(blocks: list[nn.Module]) -> list[list[nn.Module]]:
    """Group blocks with the same parameters."""
    found: dict[tuple[int, ...], list[nn.Module]] = {}
    for block in blocks:
        found.setdefault(
            tuple(id(parameter) for parameter in block.parameters()), []
        ).append(block)
    return list(found.values())


def _norms_outside(model: AnyModel, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the norms outside the blocks, except norms in a language model's embeddings."""
    inside = {
        id(module)
        for module in chain.from_iterable(block.modules() for block in blocks)
    }
    before = (
        set()
        if isinstance(model, EncoderDecoder)
        else set(map(id, model.embeddings.modules()))
    )
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.LayerNorm | nn.RMSNorm | OffsetNorm)
        and id(module) not in inside | before
    ]
