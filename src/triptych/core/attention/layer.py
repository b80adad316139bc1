"""The attention layer: the maps around the steps of attention."""

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from triptych.core.algebra.cost import Route
from triptych.core.algebra.positions import RotaryEmbedding
from triptych.core.algebra.semantics import HeadGate, HeadNorm, Kind, Semantics
from triptych.core.algebra.weights import AttentionWeights, HeadForms, standard_scale
from triptych.core.attention.layer_cache import AttentionCache
from triptych.core.attention.operation import (
    Explanation,
    compute_attention,
    explain_inputs,
)
from triptych.core.attention.position_modules import (
    AttentionPositions,
    PositionIds,
    TokenPositions,
)
from triptych.core.attention.projections import fit_parameterisation
from triptych.core.attention.projections.abstract import Parameterisation
from triptych.core.attention.projections.composed import (
    AsWritten,
    ScaledOutside,
    ScalePlace,
)
from triptych.core.attention.projections.table import Factored, Grouped
from triptych.core.attention.queries_keys import QueriesAndKeys
from triptych.core.attention.requirements import (
    check_can_be_held,
    check_qk_norm,
    check_rotation,
    check_sizes,
    scores_class,
)
from triptych.core.attention.routes import Inputs, Path
from triptych.core.attention.shapes import shapes_only
from triptych.core.attention.steps import (
    GATE,
    KERNEL_STEPS,
    LOCATE,
    ROTATE,
    Step,
    Tap,
    both,
    compares_positions,
    for_heads,
    is_causal,
    prepare,
    steps_on,
    visible_keys,
    walk,
    watch_with,
)
from triptych.core.attention.torch_layers import torch_layer_of, weights_of_torch
from triptych.literals import Activation
from triptych.printable import shown_fields

ACTIVATIONS: tuple[Activation, ...] = ("q", "k", "v", "scores", "weights", "z")


class Kept(NamedTuple):
    """Keys and values of a call in cached form (`Projections.project_kv`), and the positions of tokens."""

    token_positions: TokenPositions
    entries: tuple[Tensor, ...]

    def __repr__(self) -> str:
        return shown_fields(type(self).__name__, self._asdict())

    def of_row(self, row: int, query_len: int, key_len: int) -> "Kept":
        """Select one row of the batch, with its first `query_len` queries and `key_len` keys."""
        one = slice(row, row + 1)
        keys = self.token_positions.keys
        given = self.token_positions.given and self.token_positions.given.of_row(
            row, query_len
        )
        keys = keys[one, :key_len] if keys is not None and keys.ndim == 2 else keys
        token_positions = self.token_positions._replace(given=given, keys=keys)
        return Kept(
            token_positions, tuple(entry[one, :, :key_len] for entry in self.entries)
        )


@final
@dataclass(frozen=True, eq=False)
class LayerSteps:
    """All intermediate values of one call, in the order of computation; keys and values per query head."""

    q: Float[
        Tensor, "batch heads query_len d_k"
    ]  # queries after norms, rotation and temperature
    k: Float[Tensor, "batch heads key_len d_k"]  # keys after norms and rotation
    v: Float[Tensor, "batch heads key_len d_v"]
    # `q kᵀ`, or the result of `Semantics.scores`
    products: Float[Tensor, "batch heads query_len key_len"]
    scaled: Float[Tensor, "batch heads query_len key_len"]  # products times the scale
    biased: Float[
        Tensor, "batch heads query_len key_len"
    ]  # scaled products plus position bias
    # input of the softmax, after the soft cap and before any mask
    scores: Float[Tensor, "batch heads query_len key_len"]
    # True where a query may attend: mask, causality, window and chunk
    visible: Bool[Tensor, "#batch #heads #query_len key_len"]
    weights: Float[Tensor, "batch heads query_len key_len"]
    # factor of the mixed values of each head; None without a gate
    gate: Float[Tensor, "batch heads query_len channels"] | None
    # input of W_O: weights times values, times the gate
    z: Float[Tensor, "batch heads query_len d_v"]
    output: Float[Tensor, "batch query_len d_model"]
    kept: Kept  # keys and values of the call in cached form

    def of_query(self, row: int) -> "LayerSteps":
        """Select one query; keys, values and their cached form stay whole."""
        own = slice(row, row + 1)
        names = (
            "q",
            "products",
            "scaled",
            "biased",
            "scores",
            "visible",
            "weights",
            "gate",
            "z",
        )
        values = {name: getattr(self, name) for name in names}
        found: dict[str, Any] = {
            name: None if value is None else value[:, :, own]
            for name, value in values.items()
        }
        return replace(self, **found, output=self.output[:, own])

    def __repr__(self) -> str:
        return shown_fields(
            type(self).__name__,
            {one.name: getattr(self, one.name) for one in fields(self)},
        )


_FROM_THE_START = TokenPositions(0)
# Epsilon of QK-norm, the value of most families.
_EPS = 1e-6
# Fields of `Semantics` that leave the absorbed route exact: they change neither keys nor values after their
# maps, and a value added to all scores of a query changes no weight.
_ABSORBED = frozenset(
    {
        "scale",
        "kind",
        "q_norm",
        "rotary",
        "temperature",
        "bias",
        "window",
        "chunk",
        "dropout",
        "gate",
    }
)


class LayerOutput(NamedTuple):
    """Output of `MultiHeadAttention`."""

    output: Float[Tensor, "batch query_len d_model"]
    weights: (
        Float[Tensor, "batch num_heads query_len key_len"] | None
    )  # None unless wanted
    kept: Kept | None = None  # keys and values in cached form, for KV-sharing layers

    def __repr__(self) -> str:
        return shown_fields(type(self).__name__, self._asdict())


@final
class MultiHeadAttention(nn.Module):
    """Multi-head attention over any parameterisation of its heads.

    Queries are projected from `x`. Keys and values are projected from `x` (self-attention), from `memory`
    (cross-attention), or from two sequences of equal length (keys from `memory`, values from
    `value_memory`).

    Attributes:
        tap: hook on the activations of `steps`, which then replaces the kernels; None for an unchanged layer.
        borrows: True for a KV-sharing layer (`borrow`).
        before_output: identity on the input of W_O, `[batch, heads, query_len, d_v]`, for hooks.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        projections: Parameterisation | None = None,
        dropout: float = 0.0,
        positions: AttentionPositions | None = None,
        qk_norm: bool = False,
        output_gate: bool = False,
        scores: str = "dot",
        scale: ScalePlace = "inside",
    ) -> None:
        """Make a layer.

        Args:
            d_model: width of input and output.
            num_heads: number of query heads.
            projections: parameterisation of the heads; `Factored()` if None.
            dropout: probability that an attention weight is dropped in training.
            positions: position encoding inside the layer (`RotaryPositions`, `AlibiPositions`), for
                self-attention only; None if the input encodes positions, or without positions.
            qk_norm: apply an RMSNorm to queries and keys of each head before rotation, with a weight per
                channel.
            output_gate: multiply the output of each head by a gate, the sigmoid of a learned map of the
                token. All gates begin at 1/2.
            scores: comparison of queries and keys: "dot", "cosine", "additive" or `FILE.py:CLASS`.
            scale: "inside" the softmax, or "outside": `softmax(Q Kᵀ) V / √d_k`.

        Raises:
            ValueError: sizes do not fit, or the parameterisation does not support the positions, norms or
                scores; the message names sizes or reason.

        Source: qk_norm: Henry et al. 2020, arXiv 2010.04245; Dehghani et al. 2023, arXiv 2302.05442.
        output_gate: Qiu et al. 2025, arXiv 2505.06708.
        """
        super().__init__()
        self.d_model = d_model
        self.dropout = dropout
        self.tap: Tap | None = None
        self.borrows = False
        self.before_output = nn.Identity()
        self.parameterisation = projections or Factored()
        if scale == "outside":
            self.parameterisation = ScaledOutside(self.parameterisation)
        if positions is not None:
            check_sizes(d_model, num_heads, self.parameterisation, positions, scores)
        self.projections = self.parameterisation.build(d_model, num_heads)
        self._learned: tuple[str, ...] = ()
        self._semantics = Semantics(scale=standard_scale(self.projections.d_k))
        if positions is not None:
            self._semantics = positions.added_to(
                self._semantics, self._key_width, num_heads
            )
        if qk_norm:
            check_qk_norm(self.parameterisation)
            q_norm, k_norm = (
                HeadNorm(_EPS, torch.ones(self._key_width)) for _ in range(2)
            )
            self._semantics = replace(self._semantics, q_norm=q_norm, k_norm=k_norm)
        if scores == "cosine":
            check_qk_norm(self.parameterisation)
            of_head = HeadNorm(_EPS, torch.ones(num_heads, 1))  # one gain per head
            self._semantics = replace(
                self._semantics, q_norm=of_head, k_norm=HeadNorm(_EPS)
            )
        elif scores != "dot":
            drawn = scores_class(scores).drawn(num_heads, self._key_width)
            self._semantics = replace(self._semantics, scores=drawn, scale=1.0)
        gate = self.parameterisation.gate(d_model, num_heads)
        if output_gate:
            if gate is not None:
                raise ValueError(
                    f"{self.parameterisation.name} has gates already: leave output_gate out"
                )
            gate = HeadGate(torch.zeros(num_heads, d_model), torch.zeros(num_heads))
        self._semantics = replace(self._semantics, gate=gate)
        self._hold(self._semantics)

    @classmethod
    def from_weights(
        cls,
        weights: AttentionWeights,
        dropout: float | None = None,
        *,
        named: bool = False,
        own: Parameterisation | None = None,
        adopted: bool = False,
    ) -> "MultiHeadAttention":
        """Build a layer from weights, in the parameterisation of the same structure.

        Norms of queries and keys, tables of positions, sinks and gates become parameters of the layer.

        Args:
            weights: maps and semantics of the layer. If queries enter only their product with the keys, the
                query map absorbs the ratio of the scale to the usual scale of the parameterisation;
                otherwise the scale stays unchanged.
            dropout: dropout of attention weights in training; the dropout of `weights` if None.
            named: accept only parameterisations that recipes can name, not `AsWritten`.
            own: parameterisation to try first, such as a class in a user's file.
            adopted: leave the scale unchanged, and use the tensors of `weights` themselves, not a copy, where
                the structure allows it.

        Raises:
            ValueError: the parameterisation does not support rotary positions or the rotated channels do not
                fit, the weights contain the norm before the layer, or `named` is True and no
                parameterisation of a recipe has the structure.
        """
        check_can_be_held(weights)
        semantics = weights.semantics
        dropout = semantics.dropout if dropout is None else dropout
        weights, parameterisation = fit_parameterisation(weights, named=named, own=own)
        if adopted and isinstance(parameterisation, Factored | Grouped):
            with shapes_only():
                layer = cls(
                    weights.d_model, weights.num_heads, parameterisation, dropout
                )
            layer.projections.adopt(weights)
            layer._hold(
                replace(semantics, dropout=0.0), next(layer.projections.parameters())
            )
            check_rotation(parameterisation, layer.semantics.rotary, layer._key_width)
            return layer
        with torch.random.fork_rng(
            devices=[]
        ):  # initial values are drawn only to be overwritten
            layer = cls(weights.d_model, weights.num_heads, parameterisation, dropout)
        layer = layer.to(dtype=weights.dtype, device=weights.device)
        usual = layer.semantics.scale
        takes_up = named or (
            not (adopted or isinstance(parameterisation, AsWritten))
            and weights.takes_up_scale
        )
        if takes_up and semantics.scores is None:
            weights = weights.with_scale(usual)
        layer.projections.load(
            replace(weights, semantics=replace(semantics, scale=usual))
        )
        layer._hold(
            replace(weights.semantics, dropout=0.0),
            next(layer.projections.parameters()),
        )
        check_rotation(parameterisation, layer.semantics.rotary, layer._key_width)
        return layer

    @classmethod
    def from_torch(cls, layer: nn.MultiheadAttention) -> "MultiHeadAttention":
        """Build a layer equivalent to torch's layer; parameters are copied.

            ours = MultiHeadAttention.from_torch(theirs)
            ours(x, memory=y, mask=~attn_mask).output  # theirs(x, y, y, attn_mask=attn_mask)[0]

        The first dimension is the batch, as with torch's `batch_first`. Masks are True where a query may
        attend, and torch's where it may not.

        Args:
            layer: layer of torch, with any `kdim`, `vdim`, biases and dropout.

        Raises:
            ValueError: the layer has additional keys (`add_bias_kv`, `add_zero_attn`).
        """
        found = cls.from_weights(weights_of_torch(layer))
        return found.train(layer.training)

    def to_torch(self, *, batch_first: bool = True) -> nn.MultiheadAttention:
        """Build a layer of torch with the same output; parameters are copied.

        Consecutive maps become one map, and shared keys or values are repeated for each head. The mask of
        torch's layer is an argument of each call, also if this layer is causal by default.

        Args:
            batch_first: layout of the inputs of torch's layer.

        Raises:
            ValueError: the heads have another width than d_model / num_heads, or torch's layer does not
                support positions, norms, gates or scores of this layer; the message names them.
        """
        weights = self.weights()
        semantics = replace(weights.semantics, dropout=self.dropout)
        found = torch_layer_of(
            replace(weights, semantics=semantics), batch_first=batch_first
        )
        return found.train(self.training)

    @classmethod
    def with_semantics(
        cls,
        d_model: int,
        num_heads: int,
        projections: Parameterisation,
        semantics: Semantics,
        dropout: float = 0.0,
        scale: ScalePlace = "inside",
    ) -> "MultiHeadAttention":
        """Build a layer with fresh maps and given semantics; learned tensors have the given values."""
        layer = cls(d_model, num_heads, projections, dropout, scale=scale)
        layer._hold(semantics)
        check_rotation(layer.parameterisation, layer.semantics.rotary, layer._key_width)
        return layer

    @property
    def semantics(self) -> Semantics:
        """Semantics of the layer (everything besides the maps), with the learned tensors of the layer."""
        if not self._learned:
            return self._semantics
        return self._semantics.with_learned(
            {name: getattr(self, name) for name in self._learned}
        )

    def _hold(self, semantics: Semantics, like: Tensor | None = None) -> None:
        """Set the semantics: register learned tensors as parameters, precompute flags for `forward`."""
        learned = semantics.learned()
        for name in {*self._learned} - {
            *learned
        }:  # parameters of the previous semantics
            delattr(self, name)
        for name, tensor in learned.items():
            own = tensor if like is None else like
            held = torch.empty_like(tensor, dtype=own.dtype, device=own.device).copy_(
                tensor.detach()
            )
            self.register_parameter(name, nn.Parameter(held))
        self._learned = tuple(learned)
        self._semantics = semantics.with_learned(
            {
                name: tensor.new_empty([0] * tensor.ndim)
                for name, tensor in learned.items()
            }
        )
        # Flags that every call reads.
        semantics = self._semantics
        projections = self.projections
        self._on_queries = steps_on("q", semantics)
        self._on_keys = steps_on("k", semantics)
        self._on_values = steps_on("v", semantics)
        # Keys are cached rotated, if they are cached as keys, or if the rotation passes the key map.
        self._rotate_latents: RotaryEmbedding | None = None
        if (
            semantics.rotary is not None
            and self._on_keys == (ROTATE,)
            and not projections.caches_keys
        ):
            self._rotate_latents = projections.rotate_cached_keys(semantics.rotary)
        rotates_late = semantics.rotary is not None and not projections.caches_keys
        rotates_late = rotates_late and self._rotate_latents is None
        # Past the rotary limit, new keys are rotated by other frequencies. Old keys keep their rotation, so
        # the cache stores rotated keys as well.
        self._keeps_keys = (
            rotates_late
            and semantics.rotary is not None
            and semantics.rotary.long is not None
        )
        self._compares_positions = compares_positions(semantics)
        # Later queries need the positions of cached keys.
        self._caches_positions = self._compares_positions or (
            rotates_late and not self._keeps_keys
        )
        # The absorbed route would be wrong: keys or values change after their map, scores need the keys
        # themselves, or the key bias (which the absorbed route drops) changes the weights.
        self._needs_expanded = rotates_late or bool(semantics.beyond(_ABSORBED))
        self._needs_expanded |= (
            semantics.bias is not None and semantics.bias.reads_content
        )

    @property
    def _key_width(self) -> int:
        k = self.projections.weights().k
        return k[-1].d_out if k else self.d_model

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        return self.projections.num_heads

    def weights(self, kind: Kind | None = None) -> AttentionWeights:
        """Return maps and semantics of the layer, detached but not copied.

        Args:
            kind: origin of queries and keys, which only the caller knows; if None, the kind of the weights
                that the layer was built from, "self" by default.
        """
        found = self.projections.weights().mapped(torch.Tensor.detach)
        semantics = self.semantics
        dropout = self.dropout if self.training else 0.0
        learned = {
            name: tensor.detach() for name, tensor in semantics.learned().items()
        }
        semantics = replace(
            semantics.with_learned(learned),
            kind=kind or semantics.kind,
            dropout=dropout,
        )
        return replace(found, semantics=semantics)

    def borrow(self, lender: "MultiHeadAttention") -> None:
        """Make this a KV-sharing layer with the key maps, value maps and key norm of an equal layer."""
        self.borrows = True
        self.projections.share_keys_and_values(lender.projections)
        for name in ("k_norm_weight", "k_norm_bias"):
            if name in self._learned:
                setattr(self, name, getattr(lender, name))

    @property
    def heads(self) -> tuple[HeadForms, ...]:
        """The two forms of every head: `layer.heads[3].qk.dense()` is W_QK of the fourth head."""
        return self.weights().heads

    def forward(
        self,
        x: Float[Tensor, "batch query_len d_model"],
        *,
        memory: Float[Tensor, "batch key_len d_memory"] | None = None,
        value_memory: Float[Tensor, "batch key_len d_values"] | None = None,
        mask: Bool[Tensor, "..."] | None = None,
        causal: bool | None = None,
        cache: AttentionCache | None = None,
        need_weights: bool = False,
        positions: PositionIds | None = None,
        lent: Kept | None = None,
        path: Path = "auto",
    ) -> LayerOutput:
        """Attend.

        Args:
            x: source of the queries.
            memory: source of keys and values; `x` if None.
            value_memory: source of the values; the source of the keys if None.
            mask: boolean, True = may attend, broadcasts to `[batch, num_heads, query_len, key_len]`.
            causal: mask all keys after the position of a query; if None, True if the layer was built from
                causal weights.
            cache: in self-attention, the tokens before `x`; the layer appends the tokens of `x`, and queries
                attend to all cached tokens. With a `memory`, the first call fills the cache, and later calls
                read the cache instead of the memory.
            need_weights: return the weights too; affects only speed.
            positions: positions of the tokens of `x`; the positions after the cached tokens if None.
                Causality follows the order of tokens, not their positions.
            lent: for a KV-sharing layer, `kept` of the layer that shares keys and values, from the same call
                of the model.
            path: see `operation.attention`; "reference" also forces the expanded route.

        Raises:
            ValueError: an input has the wrong width, a parameterisation with shared maps of keys and values
                gets two memories, a layer that compares positions gets a memory, a layer of cross-attention
                gets no memory, or some of the cached tokens have given positions and some do not.
        """
        self._check_inputs(x, memory, value_memory)
        semantics = self.semantics
        causal = is_causal(semantics, causal)
        # project; keys and values in cached form
        q, token_positions, cached = self._project(
            semantics, x, memory, value_memory, cache, positions, lent
        )
        # norm, clip, rotate, gain, temper
        q = prepare(q, "q", semantics, token_positions, self._on_queries)
        # Kernels do not expose the activations for a tap, so the watched steps compute the call instead.
        if self.tap is not None:
            first = _first_query(q, cached, memory)
            steps = self._watched(
                semantics,
                x,
                q,
                token_positions,
                cached,
                mask,
                causal,
                first,
                self.tap,
                None,
            )
            return LayerOutput(
                steps.output, steps.weights if need_weights else None, steps.kept
            )
        # The same for keys and values; then locate.
        dropout = self.dropout if self.training else 0.0
        inputs, route = self._inputs(
            semantics, q, token_positions, cached, mask, causal, dropout, path
        )
        # products, scale, bias, cap, softmax, mix (a kernel)
        attended = compute_attention(inputs, need_weights, path)
        mixed = self.projections.values(attended.output, route)
        # gate
        factors = GATE.run(x, semantics)
        z = self.before_output(mixed if factors is None else mixed * factors)
        # output
        output = self.projections.output(z)
        return LayerOutput(output, attended.weights, Kept(token_positions, cached))

    def steps(
        self,
        x: Float[Tensor, "batch query_len d_model"],
        *,
        memory: Float[Tensor, "batch key_len d_memory"] | None = None,
        mask: Bool[Tensor, "..."] | None = None,
        causal: bool | None = None,
        cache: AttentionCache | None = None,
        positions: PositionIds | None = None,
        lent: Kept | None = None,
        row: int | None = None,
    ) -> LayerSteps:
        """Compute the call step by step and return all intermediate values; arguments as in `forward`.

        A tap changes each value before the next value is computed. `row` returns the values of one query;
        without a tap, only this query is computed.
        """
        self._check_inputs(x, memory, None)
        semantics = self.semantics
        causal = is_causal(semantics, causal)
        q, token_positions, cached = self._project(
            semantics, x, memory, None, cache, positions, lent
        )
        q = prepare(q, "q", semantics, token_positions, self._on_queries)
        first = _first_query(q, cached, memory)
        tap = self.tap or _untouched
        return self._watched(
            semantics, x, q, token_positions, cached, mask, causal, first, tap, row
        )

    def _watched(
        self,
        semantics: Semantics,
        x: Tensor,
        q: Tensor,
        token_positions: TokenPositions,
        cached: tuple[Tensor, ...],
        mask: Tensor | None,
        causal: bool,
        first: int | None,
        tap: Tap,
        row: int | None,
    ) -> LayerSteps:
        """Walk the steps from prepared queries to the output, and select one query unless `row` is None."""
        k, v = self._keys_values(semantics, token_positions, cached)
        q = tap("q", q, first)
        k = tap("k", for_heads(k, self.num_heads), first)
        v = tap("v", for_heads(v, self.num_heads), first)
        queries, keys = _query_and_key_positions(token_positions, q, k)
        visible = visible_keys(mask, causal, q.shape[2], k.shape[2], q.device)
        # A tap may read and change any query, so the row is selected at the end.
        if row is not None and tap is _untouched:
            own = slice(row, row + 1)
            q = q[:, :, own]
            x = x[:, own]
            queries = queries[..., own]
            visible = visible[:, :, own]
            row = None
        near, bias = LOCATE.run(q, k, semantics, queries, keys)
        visible = visible if near is None else visible & near
        given = Inputs(
            q,
            k,
            v,
            visible,
            bias,
            False,
            semantics,
            self.dropout if self.training else 0.0,
        )
        found = dict[str, Tensor]()
        watched = watch_with(tap, first)

        def watch(step: Step, value: Tensor) -> Tensor:
            found[step.name] = watched(step, value)
            return found[step.name]

        mixed = walk(KERNEL_STEPS, q, given, watch)
        factors = GATE.run(x, semantics)
        gated = mixed if factors is None else mixed * factors
        z = self.before_output(watched(GATE, gated))
        steps = LayerSteps(
            q=q,
            k=k,
            v=v,
            products=found["products"],
            scaled=found["scale"],
            biased=found["bias"],
            scores=found["cap"],
            visible=visible,
            weights=found["softmax"],
            gate=factors,
            z=z,
            output=self.projections.output(z),
            kept=Kept(token_positions, cached),
        )
        return steps if row is None else steps.of_query(row)

    def queries_and_keys(
        self,
        x: Float[Tensor, "batch query_len d_model"],
        *,
        memory: Float[Tensor, "batch key_len d_memory"] | None = None,
        mask: Bool[Tensor, "..."] | None = None,
        causal: bool | None = None,
        positions: PositionIds | None = None,
        lent: Kept | None = None,
    ) -> QueriesAndKeys:
        """Compute queries and keys of a call, for weights without outputs; arguments as in `forward`.

        A tap of the layer changes queries and keys, and later the scores and weights.
        """
        self._check_inputs(x, memory, None)
        semantics = self.semantics
        q, token_positions, cached = self._project(
            semantics, x, memory, None, None, positions, lent
        )
        q = prepare(q, "q", semantics, token_positions, self._on_queries)
        k, _ = self._keys_values(semantics, token_positions, cached)
        first = _first_query(q, cached, memory)
        watch = None
        if self.tap is not None:
            q = self.tap("q", q, first)
            k = self.tap("k", for_heads(k, self.num_heads), first)
            watch = watch_with(self.tap, first)
        # Half precision would round the weights.
        wide = torch.promote_types(q.dtype, torch.float32)
        where = _query_and_key_positions(token_positions, q, k)
        causal = is_causal(semantics, causal)
        return QueriesAndKeys(
            q.to(wide), k.to(wide), semantics, *where, mask, causal, watch
        )

    def explain(
        self,
        query_len: int,
        key_len: int,
        *,
        batch: int = 1,
        mask: Bool[Tensor, "..."] | None = None,
        causal: bool | None = None,
        need_weights: bool = False,
        path: Path = "auto",
    ) -> tuple[Route, Explanation]:
        """Return the route and the implementation that `forward` would choose, by the code of `forward`.

        Args:
            query_len: number of queries; in self-attention, the last of the key positions.
            key_len: number of keys, including cached keys.
            batch: number of sequences.
            mask: see `forward`.
            causal: see `forward`.
            need_weights: return the weights too.
            path: "auto", "reference" or "fast".

        Returns:
            The route of the parameterisation, and the explanation of the operation.
        """
        semantics = self.semantics
        causal = is_causal(semantics, causal)
        dropout = self.dropout if self.training else 0.0
        # The choice depends on sizes, dtypes and gradients, not on values: zeros suffice.
        y = self._zeros(batch, key_len, self.projections.memory_width)
        q = self.projections.queries(self._zeros(batch, query_len, self.d_model))
        token_positions = TokenPositions(max(0, key_len - query_len))
        q = prepare(q, "q", semantics, token_positions, self._on_queries)
        cached = self._to_cache(
            semantics, self.projections.project_kv(y, y), _FROM_THE_START
        )
        inputs, route = self._inputs(
            semantics, q, token_positions, cached, mask, causal, dropout, path
        )
        return route, explain_inputs(inputs, need_weights, path)

    def _zeros(self, batch: int, length: int, width: int) -> Tensor:
        """Return zeros as an input, with a gradient if the parameters of the layer have a gradient."""
        own = next(self.projections.parameters())
        shape = batch, length, width
        return torch.zeros(
            shape, dtype=own.dtype, device=own.device, requires_grad=own.requires_grad
        )

    def _check_inputs(
        self, x: Tensor, memory: Tensor | None, value_memory: Tensor | None
    ) -> None:
        projections = self.projections
        values_from = memory if value_memory is None else value_memory
        for given, width, name in (
            (x, self.d_model, "d_model"),
            (memory, projections.memory_width, "memory width"),
            (values_from, projections.value_width, "value memory width"),
        ):
            if given is not None and given.shape[-1] != width:
                name = "d_model" if width == self.d_model else name
                raise ValueError(
                    f"an input is {given.shape[-1]} wide, and the layer's {name} {width}"
                )
        if memory is None and self._semantics.kind == "cross":
            raise ValueError(
                "the layer is made of the weights of a cross-attention: give it a memory"
            )
        if value_memory is not None and self.projections.no_two_memories:
            raise ValueError(
                f"value_memory was given, but {self.projections.no_two_memories}: leave it out"
            )
        semantics = self._semantics
        if memory is not None and (
            semantics.rotary is not None or self._compares_positions
        ):
            what = (
                "a window compares"
                if semantics.is_local
                else f"{semantics.positions} positions compare"
            )
            raise ValueError(
                f"{what} places in one sequence, and memory is another: build cross-attention without them"
            )

    def _project(
        self,
        semantics: Semantics,
        x: Tensor,
        memory: Tensor | None,
        value_memory: Tensor | None,
        cache: AttentionCache | None,
        positions: PositionIds | None,
        lent: Kept | None,
    ) -> tuple[Tensor, TokenPositions, tuple[Tensor, ...]]:
        """Project; return queries, positions, and all keys and values, cached and new, in cached form."""
        # KV-sharing layers use the keys and values of another layer of the same call.
        if lent is not None:
            return self.projections.queries(x), *lent
        # A filled cache replaces the memory.
        if memory is not None and cache is not None and cache.length:
            return self.projections.queries(x), _FROM_THE_START, cache.entries
        if memory is None and value_memory is None:
            q, added = self.projections.project_one_sequence(x)
        else:
            keys_from = x if memory is None else memory
            added = self.projections.project_kv(
                keys_from, keys_from if value_memory is None else value_memory
            )
            q = self.projections.queries(x)
        token_positions = (
            _FROM_THE_START
            if memory is not None
            else TokenPositions.after(cache, positions)
        )
        added = self._to_cache(semantics, added, token_positions)
        if cache is None:
            return q, token_positions, added
        if memory is not None or not self._caches_positions:
            return q, token_positions, cache.append(added)
        return q, *token_positions.add(cache, added)

    def _to_cache(
        self,
        semantics: Semantics,
        added: tuple[Tensor, ...],
        token_positions: TokenPositions,
    ) -> tuple[Tensor, ...]:
        """Walk the steps before the cache, on projected keys and values of new tokens."""
        if self.projections.caches_keys:
            k, v = added
            k = prepare(k, "k", semantics, token_positions, self._on_keys)
            return k, prepare(v, "v", semantics, token_positions, self._on_values)
        if self._rotate_latents is not None:
            (latents,) = added
            return (token_positions.rotate(latents, self._rotate_latents),)
        if self._keeps_keys:
            k, _ = self.projections.keys_values(added)
            return *added, prepare(k, "k", semantics, token_positions, self._on_keys)
        return added

    def _keys_values(
        self,
        semantics: Semantics,
        token_positions: TokenPositions,
        cached: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values from their cached form: walk the steps after the cache."""
        k, v = self.projections.keys_values(cached)
        if self.projections.caches_keys:
            return k, v
        v = prepare(v, "v", semantics, token_positions, self._on_values)
        if self._keeps_keys:
            return cached[1], v
        if self._on_keys and self._rotate_latents is None:
            k = prepare(k, "k", semantics, token_positions.of_keys(k), self._on_keys)
        return k, v

    def _inputs(
        self,
        semantics: Semantics,
        q: Tensor,
        token_positions: TokenPositions,
        cached: tuple[Tensor, ...],
        mask: Tensor | None,
        causal: bool,
        dropout: float,
        path: Path,
    ) -> tuple[Inputs, Route]:
        """Return the inputs of the operation, and the route that `Projections.values` has to finish."""
        key_len = cached[0].shape[2]
        route = self.projections.route(q.shape[2], key_len)
        # If there are more queries than keys, a causal mask leaves the first queries without keys.
        sums_to_one = (
            mask is None and dropout == 0.0 and not (causal and q.shape[2] > key_len)
        )
        # Weights with the sum 1 leave a bias of the values unchanged.
        is_exact = sums_to_one or self.projections.is_absorbed_exact_below_one
        if path == "reference" or self._needs_expanded or not is_exact:
            route = "expanded"
        if route == "absorbed":
            q, k, v = self.projections.absorbed(q, cached)
        else:
            k, v = self._keys_values(semantics, token_positions, cached)
        bias = None
        if self._compares_positions:
            near, bias = LOCATE.run(
                q, k, semantics, *_query_and_key_positions(token_positions, q, k)
            )
            mask = both(mask, near)
        return Inputs(q, k, v, mask, bias, causal, semantics, dropout), route


def _first_query(
    q: Tensor, cached: tuple[Tensor, ...], memory: Tensor | None
) -> int | None:
    """Return the position of the first query among the keys; None for a memory, another sequence."""
    return None if memory is not None else cached[0].shape[2] - q.shape[2]


def _untouched(name: str, value: Tensor, first: int | None) -> Tensor:
    return value


def _query_and_key_positions(
    token_positions: TokenPositions, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor]:
    if token_positions.given is not None:
        return token_positions.query_positions(q), token_positions.key_positions(k)
    key_len = k.shape[2]
    return torch.arange(
        key_len - q.shape[2], key_len, device=q.device
    ), token_positions.key_positions(k)
