"""Formulas for memory, time and communication of a training step on given devices.

All sizes are bytes per device. P is the number of parameters, s the number of shards; e is 4 bytes in float32
and 2 in bfloat16.

    parameters    4 P/s, and a bfloat16 copy of the blocks if whole models compute in bfloat16
    gradients     4 P/s
    optimizer     8 P/s; Muon stores 4 bytes less per parameter of its matrices
    activations   tensors saved for the backward pass by each layer (`Step._layer`), or only the layer's input
                  with activation checkpointing; gradients of the loss, computed in the forward pass;
                  gathered parameters
    peak          maximum of three moments: computing the loss (two chunks of logits), the backward pass, and
                  the step of the optimizer

Attention and dropout are counted for a CPU. `tests/training/test_planning.py` compares the peaks with
torch's allocator in real processes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, final

import torch
from torch import nn

from triptych.core.algebra.cost import cached_numbers, pass_cost
from triptych.core.attention import (
    Inputs,
    MultiHeadAttention,
    make_plan,
    shapes_only,
)
from triptych.core.models import (
    AnyModel,
    Block,
    FeedForward,
    Residual,
    blocks_of,
)
from triptych.errors import UsageError
from triptych.training.choices import choices
from triptych.training.computing import require_kind
from triptych.training.layouts import USABLE as USABLE
from triptych.training.layouts import Cluster as Cluster
from triptych.training.layouts import (
    Exchange,
    LayoutSettings,
)
from triptych.training.layouts import PlannedLayout as PlannedLayout
from triptych.training.losses import chunk_tokens
from triptych.training.optimizers import matrices
from triptych.training.recipe import AnyRecipe
from triptych.training.task_table import task_of

# A simpler layout is preferred unless another layout is faster by more than this factor.
_WORTH = 1.02
# Length of a text for which training chooses the largest values of missing keys.
_LONG_TEXT = 10**12
# Number of reads and writes of each byte by operations other than matrix products: the layers' saved
# tensors (forward, backward), the logits, a device's float32 parameters, and, with several processes, the
# gathering and summing of all float32 parameters. Fitted to steps of 48 sizes (docs/contributing/log/).
_PASSES_FORWARD = 12
_PASSES_BACKWARD = 18
_PASSES_OF_LOGITS = 27
_PASSES_OF_PARAMETERS = 36
_PASSES_OF_EXCHANGE = 30


@final
@dataclass(frozen=True)
class TrainingPlan:
    """Prediction for a recipe on a cluster."""

    recipe: AnyRecipe  # recipe with the choices of training for missing keys
    cluster: Cluster
    num_parameters: int  # number of the model's parameters
    target_tokens: int  # target tokens of a step, over all devices
    cache: int  # bytes of the key-value cache of one text during decoding
    layouts: tuple[PlannedLayout, ...]  # simplest first
    best: (
        PlannedLayout | None
    )  # recommended layout; None if every layout exceeds the memory
    notes: tuple[str, ...]  # choices for missing keys, and problems of the batches

    @property
    def whole_model(self) -> int:
        """Bytes of the whole weights in host memory while the first process writes them."""
        return 4 * self.num_parameters

    def figures(self) -> dict[str, Any]:
        """Return the plan for JSON."""
        return {
            "recipe": self.recipe.name,
            "cluster": asdict(self.cluster),
            "parameters": self.num_parameters,
            "host_bytes": self.whole_model,
            "target_tokens": self.target_tokens,
            "cache_bytes": self.cache,
            "layouts": [one.figures() for one in self.layouts],
            "best": None if self.best is None else self.best.layout.settings,
            "notes": list(self.notes),
        }


def plan(recipe: AnyRecipe, cluster: Cluster) -> TrainingPlan:
    """Predict the cost of training a recipe on given devices, and choose a layout.

    The text is not read, and the devices are not needed.

    Args:
        recipe: recipe of a translator or a language model.
        cluster: devices.

    Returns:
        Memory, time and communication of each layout, and the recommended layout.

    Raises:
        UsageError: The recipe starts from a checkpoint, or it has a teacher.
    """
    recipe, chosen = filled(recipe)
    task = task_of(recipe)
    notes = (
        [f"left out of the recipe, planned as for a long text: {', '.join(chosen)}"]
        if chosen
        else []
    )
    step = Step(recipe, cluster.devices)
    if step.num_rows < cluster.devices:
        notes.append(
            f"a batch has {step.num_rows:,} rows for {cluster.devices:,} devices: "
            f"{cluster.devices - step.num_rows:,} of them learn nothing; raise training.{task.batch_key}"
        )
    # `_layouts` yields simple layouts first: the first one near the fastest is the simplest.
    found = [step.planned(layout, cluster) for layout in _layouts(recipe, cluster)]
    fitting = [one for one in found if one.fits]
    fastest = min((one.seconds for one in fitting), default=0.0)
    return TrainingPlan(
        recipe=recipe,
        cluster=cluster,
        num_parameters=step.num_parameters,
        target_tokens=step.num_rows
        * step.targets_of_row
        * recipe.training.accumulate_batches,
        cache=step.cache,
        layouts=tuple(found),
        best=next((one for one in fitting if one.seconds <= _WORTH * fastest), None),
        notes=tuple(notes),
    )


def filled(recipe: AnyRecipe) -> tuple[AnyRecipe, list[str]]:
    """Return the recipe with training's choices for a long text, and the list of choices."""
    # The planned device is a GPU unless the recipe names a CPU.
    device = "cpu" if recipe.training.device == "cpu" else "cuda"
    whole = task_of(recipe).fitted_to(_LONG_TEXT, device)
    return whole, choices(recipe, whole)


def _layouts(recipe: AnyRecipe, cluster: Cluster) -> Iterator[LayoutSettings]:
    """Yield layouts, simplest first, without layouts that the recipe's optimizer cannot use."""
    for checkpointing in (False, True):
        if cluster.devices == 1:
            yield LayoutSettings("none", 1, checkpointing)
            continue
        for layout in (
            LayoutSettings("ddp", 1, checkpointing),
            *(
                LayoutSettings("hybrid", shards, checkpointing)
                for shards in _shard_sizes(cluster)
            ),
            LayoutSettings("fsdp", cluster.devices, checkpointing),
        ):
            try:
                # The run has the same check, so the plan never proposes a layout refused by the run.
                require_kind(
                    recipe.training.model_copy(update={"parallel": layout.kind}),
                    cluster.devices,
                )
            except UsageError:
                continue
            yield layout


def _shard_sizes(cluster: Cluster) -> list[int]:
    """Return the sizes of shard groups for hybrid parallelism, in ascending order."""
    # One machine: halves of it. Several machines: one machine, doubled while the size divides all devices.
    size = min(cluster.devices, cluster.node_size)
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


class _Layer(NamedTuple):
    """Cost of a block for the tokens of one device."""

    parameters: int  # number of parameters
    kept: int  # bytes of tensors saved for the backward pass
    at_work: (
        int  # bytes of the largest gradients of activations during the backward pass
    )
    flops: int  # operations of the forward pass
    again_flops: int  # operations of a recomputation up to the last map
    backward_flops: int  # operations of the backward pass
    cached: int  # values cached for one text during decoding


@final
class Step:
    """Training step on a number of devices, without a layout."""

    def __init__(self, recipe: AnyRecipe, devices: int) -> None:
        self.recipe = recipe
        self.devices = devices
        config = recipe.training
        self.bytes = 2 if config.precision == "bf16" else 4
        with shapes_only():
            shape = task_of(recipe).step_shape()
        model = shape.model
        times = shape.times
        self.length = shape.length
        self.num_rows = shape.num_rows
        self.targets_of_row = shape.targets_of_row
        self._num_passes = shape.passes
        self._gathers_to_validate = shape.gathers_to_validate
        self._rows = shape.passes * -(-self.num_rows // devices)
        *_, last = model.stacks.values()
        self.vocab_size = last.vocab_size
        self.d_model = last.architecture.d_model
        self.tokens = self._rows * self.length
        self.targets = self._rows * self.targets_of_row
        # Only the last stack, if it is a decoder, keeps a cache.
        layers = []
        for name, stack in model.stacks.items():
            writes = name == [*model.stacks][-1] and stack.causal
            layers += [self._layer(block, writes) for block in blocks_of(model, name)]
        self.layers = layers * times
        self.in_blocks = sum(layer.parameters for layer in self.layers)
        self.outside = _num_parameters(model.parameters()) - self.in_blocks // times
        self.num_parameters = self.in_blocks + self.outside
        muon = config.optimizer == "muon"
        self._in_muon = (
            times * _num_parameters(w for w in matrices(model) if w.ndim == 2)
            if muon
            else 0
        )
        self.cache = 4 * sum(layer.cached for layer in self.layers)
        self._stream = self.tokens * self.d_model * self.bytes
        self._kept_before, self._kept_after = self._kept_outside(model)

    def _layer(self, block: Block, keeps_cache: bool) -> _Layer:
        assert isinstance(block.feed_forward, FeedForward), "recipes have no experts"
        attentions = [(block.self_attention, False)]
        if block.has_cross:
            attentions.append((block.cross_attention, True))
        config = block.feed_forward.config
        tokens = self.tokens
        e = self.bytes
        kept = 0
        flops = 0
        backward = 0
        cached = 0
        for attention, is_cross in attentions:
            own_kept, own_flops, again = self._attention(attention, is_cross)
            kept = kept + own_kept
            flops = flops + own_flops
            backward = backward + 2 * own_flops + again
            if keeps_cache:
                cached += self.length * cached_numbers(attention.weights())
        # relu saves only its result, the input of the outer map. Other activations also save their input.
        inner = 4 if config.gated else 1 if config.activation == "relu" else 2
        if config.dropout:
            inner += 2 if config.activation == "relu" else 1
        kept += (self.d_model + inner * config.d_ff) * tokens * e
        maps = 3 if config.gated else 2
        flops += 2 * maps * tokens * self.d_model * config.d_ff
        backward += 4 * maps * tokens * self.d_model * config.d_ff
        kept += sum(
            self._frame(module)
            for module in block.modules()
            if isinstance(module, Residual)
        )
        return _Layer(
            parameters=_num_parameters(block.parameters()),
            kept=kept,
            at_work=(maps - 1) * tokens * config.d_ff * e,
            flops=flops,
            again_flops=flops - 2 * tokens * self.d_model * config.d_ff,
            backward_flops=backward,
            cached=cached,
        )

    def _frame(self, frame: Residual) -> int:
        """Return the bytes saved by a residual frame: the input of the norm, and dropout's tensor."""
        dropped = self.tokens * self.d_model * self.bytes if frame.dropout.p else 0
        return self._norm(frame.norm) + dropped

    def _norm(self, norm: nn.Module) -> int:
        if isinstance(norm, nn.Identity):
            return 0
        numbers = self.tokens * self.d_model
        # RMSNorm on a CPU saves its input and the normalised tensor, both in float32.
        return 8 * numbers if isinstance(norm, nn.RMSNorm) else numbers * self.bytes

    def _attention(
        self, layer: MultiHeadAttention, is_cross: bool
    ) -> tuple[int, int, int]:
        """Return bytes saved, operations of the forward pass, and operations that the backward repeats."""
        weights = layer.weights()
        e = self.bytes
        semantics = weights.semantics
        length = self.length
        cost = pass_cost(weights, length, memory_len=length if is_cross else None)
        heads = weights.num_heads
        d_k, d_v = (
            chain[-1].d_out if chain else self.d_model
            for chain in (weights.q, weights.v)
        )
        kv_heads = max((link.copies for link in weights.k), default=1)
        # All layers share the encoder's output: it is counted elsewhere.
        numbers = cost.kept_numbers - (length * self.d_model if is_cross else 0)
        if semantics.qk_norm:  # queries and keys twice in float32
            numbers += 2 * (4 // e) * length * d_k * (heads + kv_heads)
        if semantics.gate is not None:
            numbers += length * heads * d_v
        again = 0
        dtype = torch.bfloat16 if e == 2 else torch.float32
        one = torch.zeros((), dtype=dtype, requires_grad=True, device="cpu")
        q, k, v = (
            one.expand(self._rows, count, length, width)
            for count, width in ((heads, d_k), (kv_heads, d_k), (kv_heads, d_v))
        )
        given = Inputs(q, k, v, None, None, False, semantics, layer.dropout)
        if semantics.scores is not None:  # a vector for each pair of a query and a key
            numbers += cost.pair_numbers * d_k
        if make_plan(given, need_weights=False, path="auto").is_written_out:
            numbers += cost.pair_numbers * (3 if layer.dropout else 1)
        else:
            again = self._rows * 2 * cost.pair_numbers * d_k
            # With a bias, the CPU kernel saves the bias for each row. Without a bias, the output is laid out
            # by heads, and the next map saves a copy.
            numbers += (
                length * heads * d_v if semantics.bias is None else cost.pair_numbers
            )
        return self._rows * numbers * e, self._rows * cost.flops, again

    def _kept_outside(self, model: AnyModel) -> tuple[int, int]:
        """Return the bytes saved before the blocks and after them.

        Tensors before the blocks stay until the end of the backward pass; tensors after them are used first.
        """
        stacks = [*model.stacks.values()]
        of_norms = sum(
            self._norm(stack.final_norm) + self._norm(stack.embeddings.norm)
            for stack in stacks
        )
        # An encoder-decoder also saves the encoder's output.
        kept = len(stacks) - 1 + sum(stack.embeddings.dropout.p > 0 for stack in stacks)
        before = kept * self._stream
        # The forward pass of the loss already computes its gradients.
        of_loss = (
            self.targets * self.d_model * self.bytes
            + 4 * self.vocab_size * self.d_model
        )
        return before, of_loss + of_norms

    def planned(self, layout: LayoutSettings, cluster: Cluster) -> PlannedLayout:
        """Return the cost of a layout for each process."""
        config = self.recipe.training
        e = self.bytes
        shards = layout.shards
        gathers = layout.kind in ("fsdp", "hybrid")
        own = -(-self.num_parameters // shards)
        parameters = gradients = 4 * own
        if e == 2 and not gathers:
            parameters += 2 * self.in_blocks
        optimizer = 8 * own - 4 * (self._in_muon // shards)
        # FSDP gathers the parameters outside the blocks for the whole step, and a block only during its use.
        root = 4 * self.outside if gathers else 0
        block = e * max(layer.parameters for layer in self.layers) if gathers else 0
        saved = [
            self._stream if layout.checkpointing else layer.kept
            for layer in self.layers
        ]
        activations = sum(saved) + self._kept_before + self._kept_after + root
        held = parameters + optimizer
        ahead = 0  # bytes of gradients that exist before the backward pass
        if config.accumulate_batches > 1:
            ahead = 4 * self.num_parameters  # unsharded until the last batch
        # The gradient of the output table is unsharded until the end. Gradients of blocks in shards are
        # summed block by block.
        backward = 0
        left = sum(saved) + self._kept_before
        done = 4 * self.vocab_size * self.d_model + root
        for layer, own_saved in zip(
            reversed(self.layers), reversed(saved), strict=True
        ):
            made = root if ahead else done + (0 if gathers else 4 * layer.parameters)
            again = layer.kept - own_saved
            # In shards: the block, the next block, and the block's whole gradients.
            now = left + again + self._stream + layer.at_work + made + 3 * block
            backward = max(backward, now)
            left = left - own_saved
            done += 4 * layer.parameters // shards
        peaks = {
            "loss": held + ahead + activations + block + self._stream + self._logits(),
            "backward": held + ahead + backward,
            "optimizer": held + gradients,
        }
        flops = 6 * self.targets * self.d_model * self.vocab_size
        flops += sum(layer.flops + layer.backward_flops for layer in self.layers)
        passes = _PASSES_FORWARD + _PASSES_BACKWARD
        if layout.checkpointing:
            flops += sum(layer.again_flops for layer in self.layers)
            passes += _PASSES_FORWARD
        moved = passes * sum(layer.kept for layer in self.layers)
        moved += _PASSES_OF_LOGITS * e * self.targets * self.vocab_size
        flops, moved = (config.accumulate_batches * one for one in (flops, moved))
        moved += 4 * _PASSES_OF_PARAMETERS * own
        moved += (
            0
            if layout.kind == "none"
            else 4 * _PASSES_OF_EXCHANGE * self.num_parameters
        )
        exchanges = tuple(self._exchanges(layout, cluster))
        validating = parameters + gradients + optimizer
        if self._gathers_to_validate and gathers:
            validating += 4 * self.num_parameters
        return PlannedLayout(
            layout=layout,
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            activations=activations,
            peaks=peaks,
            moved=moved,
            exchanges=exchanges,
            flops=flops,
            compute_seconds=flops / cluster.device_flops
            + moved / cluster.device_bandwidth,
            exchange_seconds=sum((one.seconds(cluster) for one in exchanges), 0.0),
            validating=validating,
            fits=max(*peaks.values(), validating) <= USABLE * cluster.device_memory,
        )

    def _logits(self) -> int:
        """Return the bytes of one chunk of logits and of its probabilities."""
        rows = min(chunk_tokens(self.vocab_size), self.targets)
        if self._num_passes > 1:
            # Two passes, their logarithms and gradients in float32.
            return 11 * 4 * rows * self.vocab_size
        return 2 * self.bytes * rows * self.vocab_size

    def _exchanges(
        self, layout: LayoutSettings, cluster: Cluster
    ) -> Iterator[Exchange]:
        shards = layout.shards
        copies = self.devices // layout.shards
        size = 4 * self.num_parameters
        groups = len(self.layers) + 1
        if shards > 1:
            nodes = max(shards // cluster.node_size, 1)
            times = self.recipe.training.accumulate_batches
            # Blocks are gathered for the forward and for the backward pass, other parameters once.
            gathered = (4 * self.outside + 2 * self.bytes * self.in_blocks) * times
            share = (shards - 1) / shards
            yield Exchange(
                "allgather",
                shards,
                nodes,
                round(share * gathered),
                (2 * groups - 1) * times,
            )
            yield Exchange("reducescatter", shards, nodes, round(share * size), groups)
        if copies > 1:
            nodes = cluster.num_nodes if shards <= cluster.node_size else copies
            sent = round(2 * (copies - 1) / copies * size / shards)
            yield Exchange("allreduce", copies, nodes, sent, groups)


def _num_parameters(parameters: Iterator[nn.Parameter] | Sequence[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
