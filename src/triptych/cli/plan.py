"""`triptych plan`."""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any

import triptych
from triptych.cli.signatures import Options
from triptych.cli.terminal import Terminal, print_json, print_whole
from triptych.errors import UsageError
from triptych.reports import Table
from triptych.training import read_recipe
from triptych.training.planning import USABLE, Cluster, PlannedLayout, TrainingPlan
from triptych.training.progress import duration


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

    Formulas give the memory and the time of a training step for each kind of parallelism. The devices are
    not needed.

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
    planned = triptych.plan(read_recipe(recipe, overrides), cluster)
    if as_json:
        print_json(planned.figures())
        return
    console = Terminal()
    for line in _setting(planned):
        console.print(line, soft_wrap=True)
    table = _table(planned)
    print_whole(table, console)
    console.print(table.caption, soft_wrap=True)
    console.print(_advice(planned), soft_wrap=True)


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


def _setting(plan: TrainingPlan) -> list[str]:
    """What is planned, and for what."""
    cluster, recipe = plan.cluster, plan.recipe
    machines = "in one machine" if cluster.num_nodes == 1 else f"in {cluster.num_nodes:,} machines"
    lines = [
        f"{recipe.name}: {plan.num_parameters:,} parameters, {recipe.training.precision}, "
        f"{plan.target_tokens:,} target tokens a step",
        f"{cluster.devices:,} devices of {_bytes(cluster.device_memory)} {machines}; "
        f"{cluster.device_flops / 1e12:,.0f} TFLOP/s, memory {_bytes(cluster.device_bandwidth)}/s, within "
        f"a machine {_bytes(cluster.node_bandwidth)}/s, between machines "
        f"{_bytes(cluster.link_bandwidth)}/s a device",
    ]
    if plan.cache:
        lines.append(f"keys and values of one text while the model writes: {_bytes(plan.cache)}")
    whole = _bytes(plan.whole_model)
    lines.append(f"the whole model in the host's memory of the first process, to be written: {whole}")
    return [*lines, *plan.notes]


def _table(plan: TrainingPlan) -> Table:
    """A row for each layout: bytes of each device, and seconds of a step."""
    columns = (
        *("parallel", "recomputing", "parameters", "gradients", "optimizer", "activations", "peak", "fits"),
        *("sent", "compute s", "exchange s", "step s"),
    )
    return Table(
        title="",
        columns=columns,
        rows=tuple(_row(one, one is plan.best) for one in plan.layouts),
        caption="Of each device, in a step. → is the layout to take. activations: what the forward pass "
        "leaves, with the parameters that are gathered then. A layout fits if its peak, and what the first "
        f"device holds while it translates the validation text, are at most {USABLE:.0%} of the memory. "
        "step: computing, with the exchange behind it.",
        numeric=tuple(range(2, len(columns))),
    )


def _row(one: PlannedLayout, is_best: bool) -> tuple[str, ...]:
    layout = one.layout
    name = f"hybrid, {layout.shards}" if layout.kind == "hybrid" else layout.kind
    return (
        f"→ {name}" if is_best else f"  {name}",
        "yes" if layout.checkpointing else "no",
        *map(_bytes, (one.parameters, one.gradients, one.optimizer, one.activations, one.peak)),
        "yes" if one.fits else "no",
        _bytes(one.sent),
        *(f"{seconds:.3g}" for seconds in (one.compute_seconds, one.exchange_seconds, one.seconds)),
    )


def _advice(plan: TrainingPlan) -> str:
    """Which layout to take, and why."""
    best, memory = plan.best, _bytes(plan.cluster.device_memory)
    if best is None:
        least = min(plan.layouts, key=lambda one: one.needed)
        return (
            f"None fits: {least.layout} needs least, {_bytes(least.needed)} of {memory}. Use more devices, "
            "smaller batches with more training.accumulate_batches, or tensor parallelism "
            "(docs/how-to/several-processes.md)."
        )
    options = " ".join(f"--set {key}={str(value).lower()}" for key, value in best.layout.settings.items())
    steps = plan.recipe.training.max_steps
    took = (
        f"Take {options}: {_bytes(best.peak)} of {memory} at the peak ({best.peak_in}), {best.seconds:.3g} s "
        f"a step, {plan.target_tokens / best.seconds:,.0f} tokens/s, {duration(best.seconds * steps)} for "
        f"{steps:,} steps."
    )
    reasons = []
    if too_large := [one for one in plan.layouts[: plan.layouts.index(best)] if not one.fits]:
        reasons.append(f"{too_large[0].layout} needs {_bytes(too_large[0].needed)}")
    if slower := [one for one in plan.layouts if one.fits and one is not best]:
        next_best = min(slower, key=lambda one: one.seconds)
        reasons.append(f"{next_best.layout} takes {next_best.seconds:.3g} s a step")
    why = "; ".join(reasons)
    if not why:
        return took if len(plan.layouts) == 1 else f"{took} Nothing else fits."
    return f"{took} {why[0].upper()}{why[1:]}."


def _bytes(size: int | float) -> str:
    """A number of bytes with three digits and a unit."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}" if size < 1000 * unit else f"{size / unit:,.0f} {name}"
    return f"{size:.0f} B"
