"""`triptych plan`."""

from collections.abc import Sequence
from typing import Annotated

import triptych
from triptych.cli.signatures import Options
from triptych.cli.terminal import Terminal, print_json, print_whole
from triptych.seeing.reports import Table
from triptych.training import read_recipe
from triptych.training.device_plan import (
    USABLE,
    Cluster,
    PlannedLayout,
    TrainingPlan,
)
from triptych.training.progress import duration


def plan(
    recipe: str,
    *,
    devices: Annotated[
        Options,
        "Devices",
        Cluster,
        "devices node_size device_memory device_flops device_bandwidth node_bandwidth link_bandwidth",
    ],
    overrides: Sequence[str] = (),
    as_json: bool = False,
) -> None:
    """Predict memory and time of training on given devices.

    Formulas give the memory and the time of a training step for each kind of parallelism. The devices are
    not needed.

    Options:
        recipe: A recipe: a TOML file or the name of a built-in recipe. Its text is not read.
        overrides: Override a recipe key: section.key=value. May be repeated.

    Examples:
        triptych plan demo --devices 8 --device-memory 80GB
        triptych plan shakespeare-char --devices 2 --device-memory 24GiB --json
    """
    planned = triptych.plan(read_recipe(recipe, overrides), Cluster(**devices))
    if as_json:
        print_json(planned.figures())
        return
    console = Terminal()
    for line in _setting(planned):
        console.print(line, soft_wrap=True)
    table = _layouts_table(planned)
    print_whole(table, console)
    console.print(table.caption, soft_wrap=True)
    console.print(_advice(planned), soft_wrap=True)


def _setting(plan: TrainingPlan) -> list[str]:
    """Describe the recipe, the cluster and the memory of a plan."""
    cluster = plan.cluster
    recipe = plan.recipe
    machines = (
        "in one machine"
        if cluster.num_nodes == 1
        else f"in {cluster.num_nodes:,} machines"
    )
    lines = [
        f"{recipe.name}: {plan.num_parameters:,} parameters, {recipe.training.precision}, "
        f"{plan.target_tokens:,} target tokens a step",
        f"{cluster.devices:,} devices of {_bytes(cluster.device_memory)} {machines}; "
        f"{cluster.device_flops / 1e12:,.0f} TFLOP/s, memory {_bytes(cluster.device_bandwidth)}/s, within "
        f"a machine {_bytes(cluster.node_bandwidth)}/s, between machines "
        f"{_bytes(cluster.link_bandwidth)}/s a device",
    ]
    if plan.cache:
        lines.append(
            f"keys and values of one text while the model writes: {_bytes(plan.cache)}"
        )
    whole = _bytes(plan.whole_model)
    lines.append(
        f"the whole model in the host's memory of the first process, to be written: {whole}"
    )
    return [*lines, *plan.notes]


def _layouts_table(plan: TrainingPlan) -> Table:
    """A row for each layout: bytes of each device, and seconds of a step."""
    columns = (
        *(
            "parallel",
            "recomputing",
            "parameters",
            "gradients",
            "optimizer",
            "activations",
            "peak",
            "fits",
        ),
        *("sent", "compute s", "exchange s", "step s"),
    )
    return Table(
        title="",
        columns=columns,
        rows=tuple(_layout_row(one, one is plan.best) for one in plan.layouts),
        caption="Of each device, in a step. → is the layout to take. activations: what the forward pass "
        "leaves, with the parameters that are gathered then. A layout fits if its peak, and what the first "
        f"device holds while it translates the validation text, are at most {USABLE:.0%} of the memory. "
        "step: computing and exchange, which overlap in shards.",
        numeric=tuple(range(2, len(columns))),
    )


def _layout_row(one: PlannedLayout, is_best: bool) -> tuple[str, ...]:
    layout = one.layout
    name = f"hybrid, {layout.shards}" if layout.kind == "hybrid" else layout.kind
    return (
        f"→ {name}" if is_best else f"  {name}",
        "yes" if layout.checkpointing else "no",
        *map(
            _bytes,
            (one.parameters, one.gradients, one.optimizer, one.activations, one.peak),
        ),
        "yes" if one.fits else "no",
        _bytes(one.sent),
        *(
            f"{seconds:.3g}"
            for seconds in (one.compute_seconds, one.exchange_seconds, one.seconds)
        ),
    )


def _advice(plan: TrainingPlan) -> str:
    """Which layout to take, and why."""
    best = plan.best
    memory = _bytes(plan.cluster.device_memory)
    if best is None:
        least = min(plan.layouts, key=lambda one: one.needed)
        return (
            f"None fits: {least.layout} needs least, {_bytes(least.needed)} of {memory}. Use more devices, "
            "smaller batches with more training.accumulate_batches, or tensor parallelism "
            "(docs/how-to/several-processes.md)."
        )
    options = " ".join(
        f"--set {key}={str(value).lower()}"
        for key, value in best.layout.settings.items()
    )
    steps = plan.recipe.training.max_steps
    took = (
        f"Take {options}: {_bytes(best.peak)} of {memory} at the peak ({best.peak_in}), {best.seconds:.3g} s "
        f"a step, {plan.target_tokens / best.seconds:,.0f} tokens/s, "
        f"{duration(best.seconds * steps)} for {steps:,} steps."
    )
    reasons = []
    if too_large := [
        one for one in plan.layouts[: plan.layouts.index(best)] if not one.fits
    ]:
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
            return (
                f"{size / unit:.3g} {name}"
                if size < 1000 * unit
                else f"{size / unit:,.0f} {name}"
            )
    return f"{size:.0f} B"
