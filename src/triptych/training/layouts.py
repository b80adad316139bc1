"""Devices, the layouts of a model on them, and what a layout needs in a training step."""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

from triptych.errors import UsageError

# Share of a device's memory that is planned for. An allocator cannot use all, and libraries have buffers.
USABLE = 0.9
Quantity = int | float  # bytes or operations; on the command line with a unit


@final
@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal machines. Rates are what is reached in practice, not what a data sheet says.

    Attributes:
        devices: number of devices, with a process on each.
        device_memory: memory of a device in bytes, such as 80GB or 40GiB.
        node_size: devices of a machine.
        device_flops: operations a second that matrix products reach on a device. Default: 400T, about 40 % of
            an H100's in bfloat16.
        device_bandwidth: bytes a second between a device and its memory. Default: 3TB.
        node_bandwidth: bytes a second that a device sends within its machine. Default: 300GB.
        link_bandwidth: bytes a second that a device sends to other machines. Default: 40GB.
        link_latency: seconds until a message reaches another machine.

    Raises:
        UsageError: devices that do not make machines of one size, or a figure that is not positive.
    """

    devices: int
    device_memory: Quantity
    node_size: int = 8
    device_flops: Quantity = 4e14
    device_bandwidth: Quantity = 3e12
    node_bandwidth: Quantity = 3e11
    link_bandwidth: Quantity = 4e10
    link_latency: float = 5e-6

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                raise UsageError(f"--{name.replace('_', '-')} is {value}: it must be more than 0")
        if self.devices > self.node_size and self.devices % self.node_size:
            raise UsageError(
                f"--devices {self.devices} are not a multiple of --node-size {self.node_size}: machines have "
                "one size"
            )

    @property
    def num_nodes(self) -> int:
        return max(self.devices // self.node_size, 1)


class LayoutSettings(NamedTuple):
    """What a recipe says of how a model lies on devices."""

    kind: Literal["none", "ddp", "fsdp", "hybrid"]  # as `training.parallel`
    shards: int  # processes that share one copy of the model
    checkpointing: bool  # as `training.activation_checkpointing`

    @property
    def settings(self) -> dict[str, str | int | bool]:
        """The keys of a recipe that say so."""
        found: dict[str, str | int | bool] = {"training.parallel": self.kind}
        if self.kind == "hybrid":
            found["training.shard_size"] = self.shards
        return {**found, "training.activation_checkpointing": self.checkpointing}

    def __str__(self) -> str:
        shards = f", shards of {self.shards}" if self.kind == "hybrid" else ""
        return f"{self.kind}{shards}{', recomputing' if self.checkpointing else ''}"


class Exchange(NamedTuple):
    """Collectives of one kind within one group of processes, in a step."""

    kind: str  # "allgather", "reducescatter" or "allreduce"
    group_size: int  # processes that take part
    num_nodes: int  # machines that they are on
    sent_bytes: int  # by each process, as in a ring
    calls: int  # how many

    def seconds(self, cluster: Cluster) -> float:
        """Time of ring collectives. Each ring leaves a machine by another device's link."""
        if self.num_nodes == 1:
            return self.sent_bytes / cluster.node_bandwidth
        links = self.group_size / self.num_nodes * cluster.link_bandwidth
        hops = (self.num_nodes - 1) * (2 if self.kind == "allreduce" else 1)
        latency = self.calls * hops * cluster.link_latency
        return self.sent_bytes / min(links, cluster.node_bandwidth) + latency


@final
@dataclass(frozen=True)
class PlannedLayout:
    """What a layout needs of each process in a step; bytes unless said."""

    layout: LayoutSettings  # which
    parameters: int  # what is trained, as it lies between steps, and copies of it in bfloat16
    gradients: int  # at the end of the step
    optimizer: int  # its moments
    activations: int  # what a batch's forward pass leaves for the backward pass, with what is gathered then
    peaks: dict[str, int]  # most bytes held in each part of the step
    moved: int  # read and written by operations that are no matrix products
    exchanges: tuple[Exchange, ...]  # between the processes
    flops: int  # of the matrix products
    compute_seconds: float  # products at the devices' rate, and everything else at that of their memory
    exchange_seconds: float  # collectives, if nothing is computed meanwhile
    # What the first device holds while it validates, without activations: what is there after a step, and of
    # a translator in shards the whole model, if the validation text is translated.
    validating: int
    fits: bool  # whether the peak and `validating` are within the share `USABLE` of a device's memory

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    @property
    def peak_in(self) -> str:
        return max(self.peaks, key=self.peaks.__getitem__)

    @property
    def sent(self) -> int:
        return sum(one.sent_bytes for one in self.exchanges)

    @property
    def seconds(self) -> float:
        """Time of a step: in shards, the exchange overlaps with the computation."""
        if self.layout.kind in ("fsdp", "hybrid"):
            return max(self.compute_seconds, self.exchange_seconds)
        return self.compute_seconds + self.exchange_seconds

    @property
    def needed(self) -> int:
        """Most bytes held, in a step or a validation."""
        return max(self.peak, self.validating)

    def figures(self) -> dict[str, Any]:
        """As JSON has it; bytes, operations and seconds of a process and a step."""
        return {
            **self.layout._asdict(),
            "parameter_bytes": self.parameters,
            "gradient_bytes": self.gradients,
            "optimizer_bytes": self.optimizer,
            "activation_bytes": self.activations,
            "peak_bytes": self.peak,
            "peak_in": self.peak_in,
            "validating_bytes": self.validating,
            "fits": self.fits,
            "flops": self.flops,
            "moved_bytes": self.moved,
            "sent_bytes": self.sent,
            "exchanges": [one._asdict() for one in self.exchanges],
            "compute_seconds": self.compute_seconds,
            "exchange_seconds": self.exchange_seconds,
            "step_seconds": self.seconds,
        }
