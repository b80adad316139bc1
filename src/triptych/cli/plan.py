"""`triptych plan`."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.status import Status

import triptych
from triptych import recipes
from triptych.planning import Cluster, advice, plan_table, read_quantity, setting
from triptych.reports import render_table
from triptych.training import read_recipe


def plan(
    recipe: Annotated[
        str,
        typer.Argument(help="A recipe: a TOML file or the name of a built-in recipe. Its text is not read."),
    ],
    devices: Annotated[int, typer.Option("--devices", help="Number of devices.")],
    device_memory: Annotated[
        str, typer.Option("--device-memory", help="Memory of a device, such as 80GB or 40GiB.")
    ],
    node_size: Annotated[int, typer.Option("--node-size", help="Devices of a machine.")] = 8,
    device_flops: Annotated[
        str,
        typer.Option("--device-flops", help="Operations a second that matrix products reach on a device."),
    ] = "400T",
    device_bandwidth: Annotated[
        str, typer.Option("--device-bandwidth", help="Bytes a second between a device and its memory.")
    ] = "3TB",
    node_bandwidth: Annotated[
        str, typer.Option("--node-bandwidth", help="Bytes a second that a device sends within its machine.")
    ] = "300GB",
    link_bandwidth: Annotated[
        str, typer.Option("--link-bandwidth", help="Bytes a second that a device sends to other machines.")
    ] = "40GB",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a recipe key: section.key=value. May be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Predict memory and time of training on given devices.

    One training step of one process is simulated for each kind of parallelism, on tensors without values. No
    such device is needed.
    """
    cluster = Cluster(
        devices=devices,
        device_memory=int(read_quantity(device_memory, "--device-memory")),
        node_size=node_size,
        device_flops=read_quantity(device_flops, "--device-flops"),
        device_bandwidth=read_quantity(device_bandwidth, "--device-bandwidth"),
        node_bandwidth=read_quantity(node_bandwidth, "--node-bandwidth"),
        link_bandwidth=read_quantity(link_bandwidth, "--link-bandwidth"),
    )
    read = read_recipe(recipes.find(recipe), overrides or [])
    errors = Console(stderr=True, highlight=False, markup=False)
    with Status("", console=errors) as status:
        planned = triptych.plan(read, cluster, tell=lambda name: status.update(f"simulating {name}"))
    if as_json:
        print(json.dumps(planned.figures()))
        return
    console = Console(highlight=False, markup=False)
    for line in setting(planned):
        console.print(line, soft_wrap=True)
    table = plan_table(planned)
    rendered = render_table(table)
    console.width = max(
        console.width, console.measure(rendered, options=console.options.update(max_width=1000)).maximum
    )
    console.print(rendered)
    console.print(table.caption, soft_wrap=True)
    console.print(advice(planned), soft_wrap=True)
