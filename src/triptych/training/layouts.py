"""Clusters of devices, layouts of a model on them, and the cost of a training step."""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

from triptych.errors import UsageError

# Share of a device's memory that a plan may use: allocators fragment memory, and libraries have buffers.
USABLE = 0.9
Quantity = int | float  # bytes or operations; on the command line with a unit


@final
@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal machines. Rates are measured in practice, not taken from a data sheet.

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
        UsageError: The devices do not divide into machines of one size, or a figure is not positive.
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
                raise UsageError(
                    f"--{name.replace('_', '-')} is {value}: it must be more than 0"
                )
        if self.devices > self.node_size and self.devices % self.node_size:
            raise UsageError(
                f"--devices {self.devices} are not a multiple of --node-size {self.node_size}: machines have "
                "one size"
            )

    @property
    def num_nodes(self) -> int:
        return max(self.devices // self.node_size, 1)


class LayoutSettings(NamedTuple):
    """Layout of a model on devices, as in a recipe."""

    kind: Literal["none", "ddp", "fsdp", "hybrid"]  # `training.parallel`
    shards: int  # number of processes per copy of the model
    checkpointing: bool  # `training.activation_checkpointing`

    @property
    def settings(self) -> dict[str, str | int | bool]:
        """Keys of a recipe with this layout."""
        found: dict[str, str | int | bool] = {"training.parallel": self.kind}
        if self.kind == "hybrid":
            found["training.shard_size"] = self.shards
        return {**found, "training.activation_checkpointing": self.checkpointing}

    def __str__(self) -> str:
        shards = f", shards of {self.shards}" if self.kind == "hybrid" else ""
        return f"{self.kind}{shards}{', recomputing' if self.checkpointing else ''}"


class Exchange(NamedTuple):
    """Collectives of one kind within one group of processes in a training step."""

    kind: str  # "allgather", "reducescatter" or "allreduce"
    group_size: int  # number of processes
    num_nodes: int  # number of machines of the group
    sent_bytes: int  # bytes sent by each process in a ring
    calls: int  # number of calls

    def seconds(self, cluster: Cluster) -> float:
        """Return the time of ring collectives; each ring uses another device's link between machines."""
        if self.num_nodes == 1:
            return self.sent_bytes / cluster.node_bandwidth
        links = self.group_size / self.num_nodes * cluster.link_bandwidth
        hops = (self.num_nodes - 1) * (2 if self.kind == "allreduce" else 1)
        latency = self.calls * hops * cluster.link_latency
        return self.sent_bytes / min(links, cluster.node_bandwidth) + latency


@final
@dataclass(frozen=True)
class PlannedLayout:
    """Predicted cost of a layout for each process and step; sizes in bytes."""

    layout: LayoutSettings
    parameters: int  # parameters, with the blocks' bfloat16 copy if present
    gradients: int  # gradients at the end of the step
    optimizer: int  # moments of the optimizer
    activations: int  # activations kept for the backward pass, and parameters gathered for the whole step
    peaks: dict[str, int]  # peak memory in each part of the step
    moved: int  # bytes read and written by operations other than matrix products
    exchanges: tuple[Exchange, ...]  # collectives
    flops: int  # operations of the matrix products
    compute_seconds: float  # matrix products at the devices' rate, other operations at memory bandwidth
    exchange_seconds: float  # collectives without overlap
    # Memory of the first device during a validation, without activations: the memory after a step, and the
    # whole model if a translator in shards translates the validation text.
    validating: int
    fits: bool  # True if the peak and `validating` are within the share `USABLE` of a device's memory

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
        """Time of a step; collectives of shards overlap with computation."""
        if self.layout.kind in ("fsdp", "hybrid"):
            return max(self.compute_seconds, self.exchange_seconds)
        return self.compute_seconds + self.exchange_seconds

    @property
    def needed(self) -> int:
        """Peak memory of a step or a validation."""
        return max(self.peak, self.validating)

    def figures(self) -> dict[str, Any]:
        """Return the fields for JSON: bytes, operations and seconds per process and step."""
        # `layout` is flattened into its three fields.
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
