"""`triptych plan`."""

import json
from typing import Annotated, NamedTuple

import typer
from rich.status import Status
from rich.text import Text

import triptych
from triptych import recipes
from triptych.cli.groups import grouped
from triptych.cli.tables import print_whole
from triptych.cli.terminal import Terminal
from triptych.planning import Cluster, advice, plan_table, read_quantity, setting
from triptych.training import read_recipe

RecipeArgument = Annotated[
    str, typer.Argument(help="A recipe: a TOML file or the name of a built-in recipe. Its text is not read.")
]
DevicesOption = Annotated[int, typer.Option("--devices", help="Number of devices.")]
DeviceMemoryOption = Annotated[
    str, typer.Option("--device-memory", help="Memory of a device, such as 80GB or 40GiB.")
]
NodeSizeOption = Annotated[int, typer.Option("--node-size", help="Devices of a machine.")]
DeviceFlopsOption = Annotated[
    str, typer.Option("--device-flops", help="Operations a second that matrix products reach on a device.")
]
DeviceBandwidthOption = Annotated[
    str, typer.Option("--device-bandwidth", help="Bytes a second between a device and its memory.")
]
NodeBandwidthOption = Annotated[
    str, typer.Option("--node-bandwidth", help="Bytes a second that a device sends within its machine.")
]
LinkBandwidthOption = Annotated[
    str, typer.Option("--link-bandwidth", help="Bytes a second that a device sends to other machines.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a recipe key: section.key=value. May be repeated."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


class _Devices(NamedTuple):
    """What a run is planned for."""

    devices: DevicesOption
    device_memory: DeviceMemoryOption
    node_size: NodeSizeOption = 8
    device_flops: DeviceFlopsOption = "400T"
    device_bandwidth: DeviceBandwidthOption = "3TB"
    node_bandwidth: NodeBandwidthOption = "300GB"
    link_bandwidth: LinkBandwidthOption = "40GB"

    def cluster(self) -> Cluster:
        """The library's record."""
        return Cluster(
            devices=self.devices,
            device_memory=int(read_quantity(self.device_memory, "--device-memory")),
            node_size=self.node_size,
            device_flops=read_quantity(self.device_flops, "--device-flops"),
            device_bandwidth=read_quantity(self.device_bandwidth, "--device-bandwidth"),
            node_bandwidth=read_quantity(self.node_bandwidth, "--node-bandwidth"),
            link_bandwidth=read_quantity(self.link_bandwidth, "--link-bandwidth"),
        )


@grouped
def plan(
    recipe: RecipeArgument, devices: _Devices, *, overrides: SetOption = None, as_json: JsonOption = False
) -> None:
    """Predict memory and time of training on given devices.

    One training step of one process is simulated for each kind of parallelism, on tensors without values. No
    such device is needed.
    """
    cluster = devices.cluster()
    read = read_recipe(recipes.find(recipe), overrides or [])
    errors = Terminal(stderr=True)
    with Status("", console=errors) as status:
        planned = triptych.plan(read, cluster, tell=lambda name: status.update(Text(f"simulating {name}")))
    if as_json:
        print(json.dumps(planned.figures()))
        return
    console = Terminal()
    for line in setting(planned):
        console.print(line, soft_wrap=True)
    table = plan_table(planned)
    print_whole(table, console)
    console.print(table.caption, soft_wrap=True)
    console.print(advice(planned), soft_wrap=True)
