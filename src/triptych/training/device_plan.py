"""Memory, time and communication of a training step on devices that need not be here, by formulas.

All bytes are of one device. P are the parameters, of which a device has a share of 1/s; e is 4 bytes in
float32 and 2 in bfloat16.

    parameters    4 P/s, and a copy of the blocks in bfloat16 where whole models compute in it
    gradients     4 P/s
    optimizer     8 P/s; Muon keeps 4 bytes less of each parameter of its matrices
    activations   what each layer keeps for its gradients (`Step._layer`), or its input alone with activation
                  checkpointing; the gradients of the loss, which are computed with it; parameters that are
                  gathered
    peak          the most of three moments: when the loss is computed (two chunks of logits), in the backward
                  pass, and when the optimizer steps

Attention and dropout are counted as on a CPU. `tests/training/test_planning.py` compares the peaks with what
torch's allocator gives out in real processes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, final

import torch
from torch import nn

from triptych.core.algebra.cost import cached_numbers, pass_cost
from triptych.core.attention import MultiHeadAttention
from triptych.core.attention.routes import Inputs, make_plan
from triptych.core.attention.shapes import shapes_only
from triptych.core.models import EncoderDecoder, LanguageModel
from triptych.core.models.blocks import Block, Residual
from triptych.core.models.feed_forward import FeedForward
from triptych.core.models.sites import blocks_of
from triptych.core.models.storage import OwnModel
from triptych.errors import UsageError
from triptych.training.choices import choices, fit_language_training, fit_tokenizer, fit_training
from triptych.training.computing import require_kind
from triptych.training.layouts import USABLE, Cluster, Exchange, LayoutSettings, PlannedLayout
from triptych.training.losses import chunk_tokens
from triptych.training.optimizers import matrices
from triptych.training.recipe import AnyRecipe, ContinuedRecipe, LanguageRecipe, Recipe

# A simpler layout is preferred to one that is faster by less than this factor.
_WORTH = 1.02
# A text so long that training chooses its largest values for what a recipe leaves out.
_LONG_TEXT = 10**12
# Tokens of a sentence, its end included. A translator's batches have the same number of tokens for any value.
_SENTENCE = 32
# How often operations other than matrix products read or write each byte that the layers keep (forwards and
# backwards), each byte of the logits, and each byte of a device's parameters in float32; in several processes
# also each byte of all parameters, which are gathered and summed. Fitted to steps of 48 sizes
# (docs/contributing/log/).
_PASSES_FORWARD = 12
_PASSES_BACKWARD = 18
_PASSES_OF_LOGITS = 27
_PASSES_OF_PARAMETERS = 36
_PASSES_OF_EXCHANGE = 30


@final
@dataclass(frozen=True)
class TrainingPlan:
    """A recipe on devices that need not be here."""

    recipe: AnyRecipe  # with what training would choose
    cluster: Cluster  # the devices
    num_parameters: int  # of the model
    target_tokens: int  # that a step learns from, all devices together
    cache: int  # bytes of keys and values of one text while the model writes
    layouts: tuple[PlannedLayout, ...]  # simplest first
    best: PlannedLayout | None  # the one to take; None if none fits
    notes: tuple[str, ...]  # what was chosen for the recipe, and what is wrong with its batches

    @property
    def whole_model(self) -> int:
        """Bytes of the weights, which the first process has in the memory of its host to write them."""
        return 4 * self.num_parameters

    def figures(self) -> dict[str, Any]:
        """As JSON has it."""
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
    """Predict what a recipe needs on devices that need not be here, and choose its layout.

    Text is not read.

    Args:
        recipe: what is trained.
        cluster: the devices.

    Returns:
        Memory, time and communication of each layout, and the one to take.

    Raises:
        UsageError: a recipe that goes on with a checkpoint.
    """
    recipe, chosen = filled(recipe)
    notes = [f"left out of the recipe, planned as for a long text: {', '.join(chosen)}"] if chosen else []
    step = Step(recipe, cluster.devices)
    if step.num_rows < cluster.devices:
        key = "batch_size" if isinstance(recipe, LanguageRecipe) else "batch_tokens"
        notes.append(
            f"a batch has {step.num_rows:,} rows for {cluster.devices:,} devices: "
            f"{cluster.devices - step.num_rows:,} of them learn nothing; raise training.{key}"
        )
    found = [step.planned(layout, cluster) for layout in _layouts(recipe, cluster)]
    fitting = [one for one in found if one.fits]
    fastest = min((one.seconds for one in fitting), default=0.0)
    return TrainingPlan(
        recipe=recipe,
        cluster=cluster,
        num_parameters=step.num_parameters,
        target_tokens=step.num_rows * step.targets_of_row * recipe.training.accumulate_batches,
        cache=step.cache,
        layouts=tuple(found),
        best=next((one for one in fitting if one.seconds <= _WORTH * fastest), None),
        notes=tuple(notes),
    )


def filled(recipe: AnyRecipe) -> tuple[AnyRecipe, list[str]]:
    """The recipe with what training would choose for a long text, and what was chosen."""
    device = "cpu" if recipe.training.device == "cpu" else "cuda"
    match recipe:
        case ContinuedRecipe():
            raise UsageError(
                "plan makes the model of a recipe, and model.checkpoint names one that exists: write its "
                "sizes under [model] in its place"
            )
        case LanguageRecipe():
            of_text = fit_tokenizer(recipe, _LONG_TEXT, device)
            whole: AnyRecipe = fit_language_training(of_text, _LONG_TEXT, device)
        case Recipe():
            if recipe.training.teacher is not None:
                raise UsageError(
                    "plan counts no teacher: leave out training.teacher, and add its memory and time"
                )
            of_pairs = fit_tokenizer(recipe, _LONG_TEXT, device)
            whole = fit_training(
                of_pairs, _LONG_TEXT, device, lambda recipe: _LONG_TEXT // recipe.training.batch_tokens
            )
    return whole, choices(recipe, whole)


def _layouts(recipe: AnyRecipe, cluster: Cluster) -> Iterator[LayoutSettings]:
    """Simplest first; those that the recipe's optimizer cannot do are left out."""
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
                require_kind(recipe.training.model_copy(update={"parallel": layout.kind}), cluster.devices)
            except UsageError:
                continue
            yield layout


def _shard_sizes(cluster: Cluster) -> list[int]:
    """A machine, and machines doubled as often as they divide all; in one machine, its halves."""
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
    """A block on the tokens of one device."""

    parameters: int  # how many
    kept: int  # bytes kept for its gradients
    at_work: int  # bytes of its largest gradients, while they are computed
    flops: int  # forwards
    again_flops: int  # when it is recomputed, which ends before its last map
    backward_flops: int  # backwards
    cached: int  # numbers cached of one text while the model writes


@final
class Step:
    """A training step on a number of devices: what all layouts have in common."""

    def __init__(self, recipe: AnyRecipe, devices: int) -> None:
        self.recipe = recipe
        self.devices = devices
        config = recipe.training
        self.bytes = 2 if config.precision == "bf16" else 4
        passes = 1
        with shapes_only():
            if isinstance(recipe, Recipe):
                of_batch = recipe.training.batch_tokens
                self.length = min(_SENTENCE, of_batch, recipe.data.max_sentence_tokens + 1)
                self.num_rows = max(of_batch // self.length, 1)
                self.targets_of_row = self.length
                passes = 2 if recipe.training.rdrop else 1
                size = recipe.tokenizer.vocab_size
                model: OwnModel = EncoderDecoder.of(recipe.model, size, size)
                times = 1
            else:
                assert isinstance(recipe, LanguageRecipe), "filled() refuses others"
                self.length = recipe.model.context
                self.num_rows = recipe.training.batch_size
                share = recipe.masking.share if recipe.kind == "encoder" else 1.0
                self.targets_of_row = max(round(share * self.length), 1)
                # Equal layers are counted once.
                times = 1 if recipe.model.attention_in_layer else recipe.model.num_layers
                one = recipe.model.model_copy(update={"num_layers": recipe.model.num_layers // times})
                model = LanguageModel.of(one, recipe.kind, recipe.tokenizer.vocab_size)
        self._rows = passes * -(-self.num_rows // devices)
        self.vocab_size = recipe.tokenizer.vocab_size
        self.d_model = recipe.model.d_model
        self.tokens = self._rows * self.length
        self.targets = self._rows * self.targets_of_row
        blocks = (block for stack in model.stacks for block in blocks_of(model, stack))
        self.layers = [self._layer(block) for block in blocks] * times
        self.in_blocks = sum(layer.parameters for layer in self.layers)
        self.outside = _num_parameters(model.parameters()) - self.in_blocks // times
        self.num_parameters = self.in_blocks + self.outside
        muon = config.optimizer == "muon"
        self._in_muon = times * _num_parameters(w for w in matrices(model) if w.ndim == 2) if muon else 0
        writes = isinstance(recipe, Recipe) or recipe.kind == "decoder"
        self.cache = 4 * sum(layer.cached for layer in self.layers) if writes else 0
        self._stream = self.tokens * self.d_model * self.bytes
        self._kept_before, self._kept_after = self._kept_outside(model)

    def _layer(self, block: Block) -> _Layer:
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
            # The blocks of a translator's encoder cache nothing.
            if block.has_cross or isinstance(self.recipe, LanguageRecipe):
                cached += self.length * cached_numbers(attention.weights())
        # relu keeps its result, which the outer map reads; others keep what they read as well.
        inner = 4 if config.gated else 1 if config.activation == "relu" else 2
        if config.dropout:
            inner += 2 if config.activation == "relu" else 1
        kept += (self.d_model + inner * config.d_ff) * tokens * e
        maps = 3 if config.gated else 2
        flops += 2 * maps * tokens * self.d_model * config.d_ff
        backward += 4 * maps * tokens * self.d_model * config.d_ff
        kept += sum(self._frame(module) for module in block.modules() if isinstance(module, Residual))
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
        """Bytes kept by a residual frame: the stream that is normalised, and what dropout keeps."""
        dropped = self.tokens * self.d_model * self.bytes if frame.dropout.p else 0
        return self._norm(frame.norm) + dropped

    def _norm(self, norm: nn.Module) -> int:
        if isinstance(norm, nn.Identity):
            return 0
        numbers = self.tokens * self.d_model
        # On a CPU, RMSNorm keeps what it reads and the normalised, both in float32.
        return 8 * numbers if isinstance(norm, nn.RMSNorm) else numbers * self.bytes

    def _attention(self, layer: MultiHeadAttention, is_cross: bool) -> tuple[int, int, int]:
        """Bytes kept, operations forwards, and those that the kernel does again for the gradients."""
        weights = layer.weights()
        e = self.bytes
        semantics = weights.semantics
        length = self.length
        cost = pass_cost(weights, length, memory_len=length if is_cross else None)
        heads = weights.num_heads
        d_k, d_v = (chain[-1].d_out if chain else self.d_model for chain in (weights.q, weights.v))
        kv_heads = max((link.copies for link in weights.k), default=1)
        # The encoder's output is one for all layers.
        numbers = cost.kept_numbers - (length * self.d_model if is_cross else 0)
        if semantics.qk_norm:  # two float32 copies of queries and keys
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
            # With a bias, the kernel for CPUs keeps it for each row. Without, the output lies by heads, and
            # the map after it keeps a copy.
            numbers += length * heads * d_v if semantics.bias is None else cost.pair_numbers
        return self._rows * numbers * e, self._rows * cost.flops, again

    def _kept_outside(self, model: OwnModel) -> tuple[int, int]:
        """Bytes kept before the blocks, until the backward pass ends, and after them, which it uses first."""
        stacks = [*model.stacks.values()]
        norms = [norm for stack in stacks for norm in (stack.final_norm, stack.embeddings.norm)]
        # An encoder-decoder keeps the memory too.
        kept = len(stacks) - 1 + sum(stack.embeddings.dropout.p > 0 for stack in stacks)
        before = kept * self._stream
        # The gradients of the loss are computed with it.
        of_loss = self.targets * self.d_model * self.bytes + 4 * self.vocab_size * self.d_model
        return before, of_loss + sum(map(self._norm, norms))

    def planned(self, layout: LayoutSettings, cluster: Cluster) -> PlannedLayout:
        """What a layout needs of each process."""
        config = self.recipe.training
        e = self.bytes
        shards = layout.shards
        gathers = layout.kind in ("fsdp", "hybrid")
        own = -(-self.num_parameters // shards)
        parameters = gradients = 4 * own
        if e == 2 and not gathers:
            parameters += 2 * self.in_blocks
        optimizer = 8 * own - 4 * (self._in_muon // shards)
        # FSDP gathers what is outside the blocks for the whole step, and a block while it is used.
        root = 4 * self.outside if gathers else 0
        block = e * max(layer.parameters for layer in self.layers) if gathers else 0
        saved = [self._stream if layout.checkpointing else layer.kept for layer in self.layers]
        activations = sum(saved) + self._kept_before + self._kept_after + root
        held = parameters + optimizer
        ahead = 0  # of gradients, there before the backward pass
        if config.accumulate_batches > 1:
            ahead = 4 * self.num_parameters  # whole, until they are summed
        # The gradient of the output table is whole until the end. What is in shards is summed block by block.
        backward = 0
        left = sum(saved) + self._kept_before
        done = 4 * self.vocab_size * self.d_model + root
        for layer, own_saved in zip(reversed(self.layers), reversed(saved), strict=True):
            made = root if ahead else done + (0 if gathers else 4 * layer.parameters)
            again = layer.kept - own_saved
            # In shards: the block, the next one and the block's whole gradients.
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
        moved += 0 if layout.kind == "none" else 4 * _PASSES_OF_EXCHANGE * self.num_parameters
        exchanges = tuple(self._exchanges(layout, cluster))
        validating = parameters + gradients + optimizer
        if isinstance(self.recipe, Recipe) and self.recipe.validation.bleu and gathers:
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
            compute_seconds=flops / cluster.device_flops + moved / cluster.device_bandwidth,
            exchange_seconds=sum((one.seconds(cluster) for one in exchanges), 0.0),
            validating=validating,
            fits=max(*peaks.values(), validating) <= USABLE * cluster.device_memory,
        )

    def _logits(self) -> int:
        """Bytes of the logits that are there at a time, and of their probabilities."""
        rows = min(chunk_tokens(self.vocab_size), self.targets)
        if isinstance(self.recipe, Recipe) and self.recipe.training.rdrop:
            return 11 * 4 * rows * self.vocab_size  # both passes, their logarithms and gradients in float32
        return 2 * self.bytes * rows * self.vocab_size

    def _exchanges(self, layout: LayoutSettings, cluster: Cluster) -> Iterator[Exchange]:
        shards = layout.shards
        copies = self.devices // layout.shards
        size = 4 * self.num_parameters
        groups = len(self.layers) + 1
        if shards > 1:
            nodes = max(shards // cluster.node_size, 1)
            times = self.recipe.training.accumulate_batches
            gathered = (4 * self.outside + 2 * self.bytes * self.in_blocks) * times
            share = (shards - 1) / shards
            yield Exchange("allgather", shards, nodes, round(share * gathered), (2 * groups - 1) * times)
            yield Exchange("reducescatter", shards, nodes, round(share * size), groups)
        if copies > 1:
            nodes = cluster.num_nodes if shards <= cluster.node_size else copies
            sent = round(2 * (copies - 1) / copies * size / shards)
            yield Exchange("allreduce", copies, nodes, sent, groups)


def _num_parameters(parameters: Iterator[nn.Parameter] | Sequence[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
