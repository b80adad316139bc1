"""`triptych plan`."""

from collections.abc import Sequence
from typing import Annotated, Any

from rich.status import Status
from rich.text import Text

import triptych
from triptych.cli.signatures import Options
from triptych.cli.terminal import Terminal, print_json, print_whole
from triptych.planning import Cluster, advice, plan_table, read_quantity, setting
from triptych.training import read_recipe


def plan(
    recipe: str,
    *,
    devices: Annotated[Options, "Devices", Cluster, "devices node_size"],
    device_memory: str,
    device_flops: str | None = None,
    device_bandwidth: str | None = None,
    node_bandwidth: str | None = None,
    link_bandwidth: str | None = None,
    overrides: Sequence[str] = (),
    as_json: bool = False,
) -> None:
    """Predict memory and time of training on given devices.

    One training step of one process is simulated for each kind of parallelism, on tensors without values. No
    such device is needed.

    Devices:
        device_memory: Memory of a device, such as 80GB or 40GiB.
        device_flops: Operations a second that matrix products reach on a device. Default: 400T.
        device_bandwidth: Bytes a second between a device and its memory. Default: 3TB.
        node_bandwidth: Bytes a second that a device sends within its machine. Default: 300GB.
        link_bandwidth: Bytes a second that a device sends to other machines. Default: 40GB.

    Options:
        recipe: A recipe: a TOML file or the name of a built-in recipe. Its text is not read.
        overrides: Override a recipe key: section.key=value. May be repeated.

    Examples:
        triptych plan demo --devices 8 --device-memory 80GB
        triptych plan shakespeare-char --devices 2 --device-memory 24GiB --json
    """
    rates = {
        "device_flops": device_flops,
        "device_bandwidth": device_bandwidth,
        "node_bandwidth": node_bandwidth,
        "link_bandwidth": link_bandwidth,
    }
    given: dict[str, Any] = {
        name: read_quantity(text, f"--{name.replace('_', '-')}")
        for name, text in rates.items()
        if text is not None
    }
    memory = int(read_quantity(device_memory, "--device-memory"))
    cluster = Cluster(device_memory=memory, **devices, **given)
    read = read_recipe(recipe, overrides)
    errors = Terminal(stderr=True)
    with Status("", console=errors) as status:
        planned = triptych.plan(read, cluster, tell=lambda name: status.update(Text(f"simulating {name}")))
    if as_json:
        print_json(planned.figures())
        return
    console = Terminal()
    for line in setting(planned):
        console.print(line, soft_wrap=True)
    table = plan_table(planned)
    print_whole(table, console)
    console.print(table.caption, soft_wrap=True)
    console.print(advice(planned), soft_wrap=True)
