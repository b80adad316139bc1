"""A plan in words and as a table."""

from triptych.planning.plans import USABLE, Plan, PlannedLayout, name_of
from triptych.reports import Table

_LAYOUT = ("parallel", "recomputing")
_BYTES = ("parameters", "gradients", "optimizer", "activations", "peak", "fits", "sent")
_SECONDS = ("compute s", "exchange s", "step s")
# Largest first.
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_DAY, _HOUR = 86400.0, 3600.0


def setting(plan: Plan) -> list[str]:
    """What is planned, and for what."""
    cluster, recipe = plan.cluster, plan.recipe
    machines = "in one machine" if cluster.num_nodes == 1 else f"in {cluster.num_nodes:,} machines"
    lines = [
        f"{recipe.name}: {plan.num_parameters:,} parameters, {recipe.training.precision}, "
        f"{plan.target_tokens:,} target tokens a step",
        f"{cluster.devices:,} devices of {num_bytes(cluster.device_memory)} {machines}; "
        f"{cluster.device_flops / 1e12:,.0f} TFLOP/s, memory {num_bytes(cluster.device_bandwidth)}/s, within "
        f"a machine {num_bytes(cluster.node_bandwidth)}/s, between machines "
        f"{num_bytes(cluster.link_bandwidth)}/s a device",
    ]
    if plan.cache:
        lines.append(f"keys and values of one text while the model writes: {num_bytes(plan.cache)}")
    whole = num_bytes(plan.whole_model)
    lines.append(f"the whole model in the host's memory of the first process, to be written: {whole}")
    return [*lines, *plan.notes]


def plan_table(plan: Plan) -> Table:
    """A row for each layout: bytes of each device, and seconds of a step."""
    rows = tuple(_row(one, one is plan.best) for one in plan.layouts)
    numeric = tuple(range(len(_LAYOUT), len(_LAYOUT) + len(_BYTES + _SECONDS)))
    return Table(
        title="",
        columns=(*_LAYOUT, *_BYTES, *_SECONDS),
        rows=rows,
        caption="Of each device, in a step. → is the layout to take. activations: what the forward pass "
        "leaves, with the parameters that are gathered then. A layout fits if its peak, and what the first "
        f"device holds while it translates the validation text, are at most {USABLE:.0%} of the memory. "
        "step: computing, with the exchange behind it.",
        numeric=numeric,
    )


def _row(one: PlannedLayout, is_best: bool) -> tuple[str, ...]:
    step, layout = one.step, one.layout
    name = f"hybrid, {layout.shards}" if layout.kind == "hybrid" else layout.kind
    sizes = (step.parameters, step.gradients, step.optimizer, step.activations, step.peak)
    return (
        f"→ {name}" if is_best else f"  {name}",
        "yes" if layout.checkpointing else "no",
        *map(num_bytes, sizes),
        "yes" if one.fits else "no",
        num_bytes(sum(step.sent.values())),
        *(f"{seconds:.3g}" for seconds in (one.compute_seconds, one.exchange_seconds, one.seconds)),
    )


def advice(plan: Plan) -> str:
    """Which layout to take, and why."""
    cluster = plan.cluster
    if plan.best is None:
        least = min(plan.layouts, key=lambda one: one.needed)
        return (
            f"None fits: {name_of(least.layout)} needs least, {num_bytes(least.needed)} of "
            f"{num_bytes(cluster.device_memory)}. Use more devices, smaller batches with more "
            "training.accumulate_batches, or tensor parallelism (docs/distributed.md)."
        )
    best = plan.best
    options = " ".join(f"--set {key}={_toml(value)}" for key, value in best.layout.settings.items())
    took = (
        f"Take {options}: {num_bytes(best.step.peak)} of {num_bytes(cluster.device_memory)} at the peak "
        f"({best.step.peak_in}), {best.seconds:.3g} s a step, "
        f"{plan.target_tokens / best.seconds:,.0f} tokens/s, "
        f"{_duration(best.seconds * plan.recipe.training.max_steps)} for "
        f"{plan.recipe.training.max_steps:,} steps."
    )
    return f"{took} {_why(plan, best)}"


def _why(plan: Plan, best: PlannedLayout) -> str:
    simpler = plan.layouts[: plan.layouts.index(best)]
    too_large = [one for one in simpler if not one.fits]
    slower = [one for one in plan.layouts if one.fits and one is not best]
    reasons = []
    if too_large:
        first = too_large[0]
        reasons.append(f"{name_of(first.layout)} needs {num_bytes(first.needed)}")
    if slower:
        next_best = min(slower, key=lambda one: one.seconds)
        reasons.append(f"{name_of(next_best.layout)} takes {next_best.seconds:.3g} s a step")
    if not reasons:
        return "Nothing else fits." if len(plan.layouts) > 1 else ""
    return f"{'; '.join(reasons)[0].upper()}{'; '.join(reasons)[1:]}."


def num_bytes(size: int | float) -> str:
    """A number of bytes with three digits and a unit."""
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.3g} {name}" if size < 1000 * unit else f"{size / unit:,.0f} {name}"
    return f"{size:.0f} B"


def _duration(seconds: float) -> str:
    for unit, name in ((_DAY, "days"), (_HOUR, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.0f} {name}"
    return f"{seconds:.0f} seconds"


def _toml(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
