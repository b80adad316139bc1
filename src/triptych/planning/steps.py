"""One training step of a process, simulated: the training code itself, on tensors without values."""

import gc
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from triptych.algebra.cost import cached_numbers
from triptych.models.blocks import Block, recompute_activations
from triptych.planning.cluster import Cluster
from triptych.planning.simulation import Answers, Simulated, Valueless, sum_in_place
from triptych.planning.standing_in import batches_of, objective_of, without_values
from triptych.planning.tracking import Exchange, Held, Stretch, Timeline
from triptych.text import Batch
from triptych.training import AnyRecipe, LanguageRecipe, TextRecipe
from triptych.training.objectives import Objective
from triptych.training.optimizers import Optimizer
from triptych.training.parallel import Computing, Kind, OneProcess, rows_of_rank
from triptych.training.parallel.spreading import lay, make_mesh
from triptych.training.peak import count_operations

# A model of equal layers is tracked with so many and with one more; see `Step.of_layers`.
FEWEST_LAYERS = 4


@final
@dataclass(frozen=True)
class Step:
    """What a step takes of one process, in bytes.

    Attributes:
        parameters: what is trained, as it lies between steps, and copies of it in another precision.
        gradients: at the end of the step.
        optimizer: its moments.
        activations: what a batch's forward pass leaves for the backward pass, with what is gathered then.
        stretches: most bytes held, in the order in which the step goes.
        moved: read and written by operations that are no matrix products.
        sent: to other processes, by exchange.
        calls: collectives, by exchange.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    stretches: tuple[Stretch, ...]
    moved: int
    sent: dict[Exchange, int]
    calls: dict[Exchange, int]

    @property
    def peak(self) -> int:
        """Most bytes held at any time."""
        return max(peak for stretch in self.stretches for peak in stretch.peaks)

    @property
    def peak_in(self) -> str:
        """The part of the step in which they are."""
        return max(self.stretches, key=lambda stretch: max(stretch.peaks)).name

    def of_layers(self, num_layers: int, few: int, more: "Step") -> "Step":
        """The step of a model of more layers, all equal.

        Everything grows by the same bytes with each layer. So does the peak of each segment, counted from the
        start of a pass or from its end; those between lie on a straight line between them.
        """
        further = num_layers - few

        def along(own: int, other: int) -> int:
            return own + further * (other - own)

        stretches = []
        for own, other in zip(self.stretches, more.stretches, strict=True):
            half, count = (len(own.peaks) + 1) // 2, len(own.peaks)
            firsts = zip(own.peaks[:half], other.peaks[:half], strict=True)
            lasts = zip(own.peaks[half:], other.peaks[len(other.peaks) - (count - half) :], strict=True)
            stretches.append(Stretch(own.name, [along(*pair) for pair in (*firsts, *lasts)]))
        names = ("parameters", "gradients", "optimizer", "activations", "moved")
        return replace(
            self,
            **{name: along(getattr(self, name), getattr(more, name)) for name in names},
            stretches=tuple(stretches),
            sent={key: along(self.sent.get(key, 0), sent) for key, sent in more.sent.items()},
            calls={key: along(self.calls.get(key, 0), calls) for key, calls in more.calls.items()},
        )


def num_layers(recipe: AnyRecipe) -> int:
    """Layers of a language model."""
    assert isinstance(recipe, LanguageRecipe), "another recipe is tracked whole"
    return recipe.model.num_layers


def layers_to_track(recipe: AnyRecipe) -> int | None:
    """With how many layers a step is tracked, and again with one more; None for all of the recipe's."""
    if not isinstance(recipe, LanguageRecipe) or recipe.model.attention_in_layer:
        return None
    return FEWEST_LAYERS if recipe.model.num_layers > FEWEST_LAYERS + 1 else None


def simulate_step(recipe: AnyRecipe, cluster: Cluster, kind: Kind | None, layers: int | None = None) -> Step:
    """Track one update of the first process, from the recipe's model to the step of its optimizer."""
    config, world = recipe.training, Simulated(cluster.devices, cluster.num_nodes)
    mesh = None if kind is None else make_mesh(kind, config.precision, "cpu", world, config.shard_size)

    def lay_out(objective: Objective[Any, Any]) -> Computing:
        if kind is None:
            return OneProcess(objective, config.precision)
        return lay(objective, mesh, config.precision, world, sum_in_place)

    with _without_values(recipe, cluster.devices) as batch, ExitStack() as entered:
        tracker = Held()
        with tracker:
            objective = objective_of(recipe, layers)
            blocks = list(objective.blocks(objective.model))
            if config.activation_checkpointing:
                recompute_activations(blocks)
            computing = lay_out(objective)
            computing.set_mode(training=True)
            optimizer = Optimizer(config, objective.model)
            optimizer.load(optimizer.empty_tensors())
        gc.collect()  # the whole model, of which shards have been made
        entered.enter_context(tracker)
        timeline = entered.enter_context(Timeline(tracker, cluster.node_size))
        weights = [*objective.model.parameters(), *_more(computing.model.parameters(), objective.model)]
        parameters = _bytes_of(weights)
        moments = _bytes_of(value for _, value in optimizer.tensors())
        entered.enter_context(timeline.of_blocks(list(objective.blocks(computing.model))))
        _update(recipe, computing, optimizer, timeline, batch)
        held = timeline.held_after_forward or 0
        return Step(
            parameters=parameters,
            gradients=_bytes_of(w.grad for w in weights if w.grad is not None),
            optimizer=moments,
            activations=held - parameters - moments,
            stretches=tuple(timeline.stretches),
            moved=timeline.moved,
            sent=timeline.sent,
            calls=timeline.calls,
        )


def _update(
    recipe: AnyRecipe,
    computing: Computing,
    optimizer: Optimizer,
    timeline: Timeline,
    batch: Callable[[], Any],
) -> None:
    config = recipe.training
    timeline.begin("begin")
    optimizer.zero_grad()
    computing.begin_update(config.max_steps)
    total = config.accumulate_batches
    # All batches but the last do the same.
    for times, last in ((total - 1, False), (1, True)):
        if times:
            made = batch()
            with timeline.repeated(times):
                computing.learn(made, config.max_steps, total * made.num_target_tokens, last=last)
    limit = config.clip_norm or math.inf
    with timeline.not_looking():
        # DTensor works out the shapes of whole tensors the first time, on tensors in this mode, too.
        computing.clip(limit)
        optimizer.step(1e-3)
    timeline.begin("clip")
    computing.clip(limit)
    timeline.begin("optimizer")
    optimizer.step(1e-3)
    computing.follow()


@contextmanager
def _without_values(recipe: AnyRecipe, num_processes: int) -> Iterator[Callable[[], Any]]:
    """The mode in which nothing has values; gives what makes the first process's part of a batch."""
    batches = batches_of(recipe)
    indices = batches.plan(0)[0]
    part = batches.collate(rows_of_rank(indices, 0, num_processes)[0])
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng([]),
        Valueless(),
        Answers(part.num_target_tokens),
    ):
        # A copy of a tensor looks where the values are, and finds none.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield lambda: without_values(part)


def count_flops(recipe: AnyRecipe, num_processes: int, layers: int | None = None) -> int:
    """Operations of the matrix products in one process's part of a step; see `count_operations`."""
    with _without_values(recipe, num_processes) as batch:
        objective = objective_of(recipe, layers)
        if recipe.training.activation_checkpointing:
            recompute_activations(objective.blocks(objective.model))
        computing = OneProcess(objective, recipe.training.precision)
        computing.set_mode(training=True)
        made = batch()

        def work() -> None:
            computing.learn(made, recipe.training.max_steps, made.num_target_tokens, last=True)

        of_batch = count_operations(work)
    return of_batch * recipe.training.accumulate_batches


def count_parameters(recipe: AnyRecipe) -> int:
    """Numbers that are trained."""
    with Valueless():
        return sum(weight.numel() for weight in objective_of(recipe).model.parameters())


def count_cache(recipe: AnyRecipe) -> int:
    """Bytes kept of one text while it is continued or translated, in float32; 0 for an encoder."""
    if isinstance(recipe, TextRecipe) and recipe.kind == "encoder":
        return 0
    with Valueless():
        objective = objective_of(recipe)
        batch = objective.train.collate(objective.train.plan(0)[0][:1])
        src, tgt = (batch.src, batch.tgt_in) if isinstance(batch, Batch) else (None, batch.ids)
        total = 0
        for block in objective.blocks(objective.model):
            assert isinstance(block, Block), type(block)
            if src is None or block.has_cross:  # no block of an encoder
                total += tgt.shape[1] * cached_numbers(block.self_attention.weights())
            if src is not None and block.has_cross:
                total += src.shape[1] * cached_numbers(block.cross_attention.weights())
    return 4 * total


def _bytes_of(tensors: Any) -> int:
    return sum(_local(one).numel() * one.element_size() for one in tensors)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _more(parameters: Any, model: torch.nn.Module) -> Sequence[Tensor]:
    """Those of another model that are not this one's."""
    own = set(map(id, model.parameters()))
    return [weight for weight in parameters if id(weight) not in own]
