"""The devices that a run is planned for."""

import math
import re
from dataclasses import dataclass
from typing import final

from triptych.errors import UsageError

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([kmgtp]?)(i?)b?(?:/s)?\s*", re.IGNORECASE)


def read_quantity(text: str, option: str) -> float:
    """A number of bytes or operations: `80GB`, `40GiB`, `3.35TB/s`, `400T`, `4e14`."""
    found = _QUANTITY.fullmatch(text)
    if found is None or (found[3] and not found[2]):
        raise UsageError(f"{option} is {text!r}: write a number and a unit, such as 80GB, 40GiB or 400T")
    size = float(found[1]) * float((1024 if found[3] else 1000) ** _POWERS[found[2].lower()])
    if not 0 < size < math.inf:
        raise UsageError(f"{option} is {text!r}: it must be more than 0")
    return size


# A simulated process takes some 10 kB.
_MOST_DEVICES = 100_000


@final
@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal machines. The rates are those that are reached, not those of a data sheet.

    Attributes:
        devices: number of devices, with a process on each.
        device_memory: bytes of a device.
        node_size: devices of a machine.
        device_flops: floating-point operations a second of a device's matrix products; the default is about
            40 % of an H100's 989e12 in bfloat16.
        device_bandwidth: bytes a second between a device and its memory.
        node_bandwidth: bytes a second that a device sends within its machine.
        link_bandwidth: bytes a second that a device sends to other machines.
        link_latency: seconds until a message reaches another machine.

    Raises:
        UsageError: devices that do not make machines of one size, or a figure that is not positive.
    """

    devices: int
    device_memory: int
    node_size: int = 8
    device_flops: float = 4e14
    device_bandwidth: float = 3e12
    node_bandwidth: float = 3e11
    link_bandwidth: float = 4e10
    link_latency: float = 5e-6

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                raise UsageError(f"--{name.replace('_', '-')} is {value}: it must be more than 0")
        if self.devices > _MOST_DEVICES:
            raise UsageError(f"--devices is {self.devices}: {_MOST_DEVICES:,} can be simulated")
        if self.devices > self.node_size and self.devices % self.node_size:
            raise UsageError(
                f"--devices {self.devices} are not a multiple of --node-size {self.node_size}: machines have "
                "one size"
            )

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return max(self.devices // self.node_size, 1)

    @property
    def devices_of_node(self) -> int:
        """Devices of each machine that are used."""
        return min(self.devices, self.node_size)
