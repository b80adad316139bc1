"""The kinds of parallelism on given devices: what each needs, which fit, and which to take."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

from triptych.errors import UsageError
from triptych.planning.cluster import Cluster
from triptych.planning.simulation import Simulated, simulated_processes
from triptych.planning.standing_in import batches_of, filled
from triptych.planning.steps import (
    Step,
    count_cache,
    count_flops,
    count_parameters,
    layers_to_track,
    num_layers,
    simulate_step,
)
from triptych.planning.tracking import Exchange
from triptych.training import AnyRecipe, LanguageRecipe, Recipe
from triptych.training.parallel.choosing import require_kind
from triptych.training.parallel.spreading import are_copies

# Of a device's memory; the rest is for what an allocator cannot use, and for the libraries' own buffers.
USABLE = 0.9
# A simpler layout is taken in the place of one that is faster by less.
_WORTH = 1.02
# Weights are trained and written in float32.
_BYTES_OF_WEIGHT = 4


class LayoutSettings(NamedTuple):
    """What a recipe says of how a model lies on devices.

    Attributes:
        kind: as `training.parallel`.
        shards: processes that share one copy of the model.
        checkpointing: as `training.activation_checkpointing`.
    """

    kind: Literal["none", "ddp", "fsdp", "hybrid"]
    shards: int
    checkpointing: bool

    @property
    def settings(self) -> dict[str, str | int | bool]:
        """The keys of a recipe that say so."""
        found: dict[str, str | int | bool] = {"training.parallel": self.kind}
        if self.kind == "hybrid":
            found["training.shard_size"] = self.shards
        return {**found, "training.activation_checkpointing": self.checkpointing}

    def applied(self, recipe: AnyRecipe) -> AnyRecipe:
        """A recipe that says so."""
        values = {key.removeprefix("training."): value for key, value in self.settings.items()}
        return recipe.model_copy(update={"training": recipe.training.model_copy(update=values)})


@final
@dataclass(frozen=True)
class PlannedLayout:
    """What a layout needs of each process in a step.

    Attributes:
        layout: which.
        step: bytes held, moved and sent.
        flops: of the matrix products.
        compute_seconds: products at the devices' rate, and everything else at that of their memory.
        exchange_seconds: collectives, if nothing is computed meanwhile.
        validating: bytes that the first device holds while it validates, without activations: what is there
            after a step, and of a translator in shards the whole model, if the validation text is translated.
        fits: whether the peak and `validating` are within the share `USABLE` of a device's memory.
    """

    layout: LayoutSettings
    step: Step
    flops: int
    compute_seconds: float
    exchange_seconds: float
    validating: int
    fits: bool

    @property
    def seconds(self) -> float:
        """Of a step whose exchange goes on behind the computation."""
        return max(self.compute_seconds, self.exchange_seconds)

    @property
    def needed(self) -> int:
        """Bytes of a device, in a step or a validation."""
        return max(self.step.peak, self.validating)

    def figures(self) -> dict[str, Any]:
        """As JSON has it; bytes, operations and seconds of a process and a step."""
        step = self.step
        return {
            **self.layout._asdict(),
            "parameter_bytes": step.parameters,
            "gradient_bytes": step.gradients,
            "optimizer_bytes": step.optimizer,
            "activation_bytes": step.activations,
            "peak_bytes": step.peak,
            "peak_in": step.peak_in,
            "validating_bytes": self.validating,
            "fits": self.fits,
            "flops": self.flops,
            "moved_bytes": step.moved,
            "sent_bytes": sum(step.sent.values()),
            "exchanges": [
                {**key._asdict(), "sent_bytes": sent, "calls": step.calls[key]}
                for key, sent in step.sent.items()
            ],
            "compute_seconds": self.compute_seconds,
            "exchange_seconds": self.exchange_seconds,
            "step_seconds": self.seconds,
        }


@final
@dataclass(frozen=True)
class Plan:
    """A recipe on devices that need not be here.

    Attributes:
        recipe: with what training would choose.
        cluster: the devices.
        num_parameters: of the model.
        target_tokens: that a step learns from, all devices together.
        cache: bytes of keys and values of one text while the model writes.
        layouts: simplest first.
        best: the one to take; None if none fits.
        notes: what was chosen for the recipe, and what is wrong with its batches.
    """

    recipe: AnyRecipe
    cluster: Cluster
    num_parameters: int
    target_tokens: int
    cache: int
    layouts: tuple[PlannedLayout, ...]
    best: PlannedLayout | None
    notes: tuple[str, ...]

    @property
    def whole_model(self) -> int:
        """Bytes of the weights, which the first process has in the memory of its host to write them."""
        return _BYTES_OF_WEIGHT * self.num_parameters

    def figures(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "recipe": self.recipe.name,
            "cluster": vars(self.cluster),
            "parameters": self.num_parameters,
            "host_bytes": self.whole_model,
            "target_tokens": self.target_tokens,
            "cache_bytes": self.cache,
            "layouts": [one.figures() for one in self.layouts],
            "best": None if self.best is None else self.best.layout.settings,
            "notes": list(self.notes),
        }


def plan(recipe: AnyRecipe, cluster: Cluster, tell: Callable[[str], None] | None = None) -> Plan:
    """Say what a recipe needs on devices that need not be here, and how to lay it on them.

    The training code goes through one step of the first process on tensors without values, next to processes
    that are simulated. Text is not read.

    Args:
        recipe: what is trained.
        cluster: the devices.
        tell: is called with the layout that is tracked next.

    Raises:
        UsageError: a recipe that goes on with a checkpoint, or a launcher that has started several processes.
    """
    recipe, chosen = filled(recipe)
    notes = [f"left out of the recipe, planned as for a long text: {', '.join(chosen)}"] if chosen else []
    batches = batches_of(recipe)
    num_rows = len(batches.plan(0)[0])
    if num_rows < cluster.devices:
        key = "batch_size" if isinstance(recipe, LanguageRecipe) else "batch_tokens"
        notes.append(
            f"a batch has {num_rows:,} rows for {cluster.devices:,} devices: "
            f"{cluster.devices - num_rows:,} of them learn nothing; raise training.{key}"
        )
    num_parameters = count_parameters(recipe)
    with simulated_processes(cluster.devices):
        found: list[PlannedLayout] = []
        flops: dict[bool, int] = {}
        for layout in _layouts(recipe, cluster):
            if tell is not None:
                tell(name_of(layout))
            laid = layout.applied(recipe)
            if layout.checkpointing not in flops:
                flops[layout.checkpointing] = _flops(laid, cluster)
            step = _step(laid, layout, cluster)
            validating = step.parameters + step.gradients + step.optimizer
            if _translates_whole(laid):
                validating += _BYTES_OF_WEIGHT * num_parameters
            found.append(_planned(layout, step, flops[layout.checkpointing], validating, cluster))
    tokens = batches.collate(batches.plan(0)[0]).num_target_tokens * recipe.training.accumulate_batches
    return Plan(
        recipe=recipe,
        cluster=cluster,
        num_parameters=num_parameters,
        target_tokens=tokens,
        cache=count_cache(recipe),
        layouts=tuple(found),
        best=_best(found),
        notes=tuple(notes),
    )


def name_of(layout: LayoutSettings) -> str:
    """A layout in words."""
    shards = f", shards of {layout.shards}" if layout.kind == "hybrid" else ""
    return f"{layout.kind}{shards}{', recomputing' if layout.checkpointing else ''}"


def _layouts(recipe: AnyRecipe, cluster: Cluster) -> Iterator[LayoutSettings]:
    """Simplest first; those that the recipe's optimizer cannot do are left out."""
    world = Simulated(cluster.devices, cluster.num_nodes)
    for checkpointing in (False, True):
        if cluster.devices == 1:
            yield LayoutSettings("none", 1, checkpointing)
            continue
        for layout in (
            LayoutSettings("ddp", 1, checkpointing),
            *(LayoutSettings("hybrid", shards, checkpointing) for shards in _shard_sizes(cluster)),
            LayoutSettings("fsdp", cluster.devices, checkpointing),
        ):
            try:
                require_kind(layout.applied(recipe).training, world)
            except UsageError:
                continue
            yield layout


def _shard_sizes(cluster: Cluster) -> list[int]:
    """A machine, and machines doubled as often as they divide all; in one machine, its halves."""
    size = cluster.devices_of_node
    sizes: list[int] = []
    if cluster.num_nodes == 1:
        while size % 2 == 0 and size > 2:
            size //= 2
            sizes.insert(0, size)
        return sizes
    while 1 < size < cluster.devices and cluster.devices % size == 0:
        sizes.append(size)
        size *= 2
    return sizes


def _step(recipe: AnyRecipe, layout: LayoutSettings, cluster: Cluster) -> Step:
    kind = None if layout.kind == "none" else layout.kind
    few = layers_to_track(recipe)
    step = simulate_step(recipe, cluster, kind, few)
    if few is None:
        return step
    return step.of_layers(num_layers(recipe), few, simulate_step(recipe, cluster, kind, few + 1))


def _flops(recipe: AnyRecipe, cluster: Cluster) -> int:
    few = layers_to_track(recipe)
    flops = count_flops(recipe, cluster.devices, few)
    if few is None:
        return flops
    more = count_flops(recipe, cluster.devices, few + 1)
    return flops + (num_layers(recipe) - few) * (more - flops)


def _translates_whole(recipe: AnyRecipe) -> bool:
    """Whether a validation puts the whole model together on the first device, beside its shards."""
    if not isinstance(recipe, Recipe) or not recipe.validation.bleu:
        return False
    kind = recipe.training.parallel
    return kind is not None and kind != "none" and not are_copies(kind, recipe.training.precision)


def _planned(
    layout: LayoutSettings, step: Step, flops: int, validating: int, cluster: Cluster
) -> PlannedLayout:
    return PlannedLayout(
        layout=layout,
        step=step,
        flops=flops,
        compute_seconds=flops / cluster.device_flops + step.moved / cluster.device_bandwidth,
        exchange_seconds=sum(
            exchange_seconds(exchange, sent, step.calls[exchange], cluster)
            for exchange, sent in step.sent.items()
        ),
        validating=validating,
        fits=max(step.peak, validating) <= USABLE * cluster.device_memory,
    )


def exchange_seconds(exchange: Exchange, sent: int, calls: int, cluster: Cluster) -> float:
    """Seconds of collectives by rings, of which each leaves a machine by another device's link."""
    if exchange.num_nodes == 1:
        return sent / cluster.node_bandwidth
    links = exchange.group_size / exchange.num_nodes * cluster.link_bandwidth
    hops = (exchange.num_nodes - 1) * (2 if exchange.kind == "allreduce" else 1)
    return sent / min(links, cluster.node_bandwidth) + calls * hops * cluster.link_latency


def _best(layouts: list[PlannedLayout]) -> PlannedLayout | None:
    fitting = [one for one in layouts if one.fits]
    if not fitting:
        return None
    fastest = min(one.seconds for one in fitting)
    return next(one for one in fitting if one.seconds <= _WORTH * fastest)
