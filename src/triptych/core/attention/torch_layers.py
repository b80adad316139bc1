"""Conversion between `nn.MultiheadAttention` of torch and `AttentionWeights`."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from triptych.core.algebra.semantics import Semantics
from triptych.core.algebra.weights import AttentionWeights, Link, standard_scale

# Fields of `Semantics` that torch's layer has too: the scale is absorbed, masks are given in each call.
_HELD = frozenset({"scale", "kind", "dropout"})
# Names of the maps in torch if keys or values have another width than queries.
_APART = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def weights_of_torch(layer: nn.MultiheadAttention) -> AttentionWeights:
    """Return maps and semantics of a layer of torch, detached but not copied."""
    if layer.bias_k is not None or layer.add_zero_attn:
        option = "add_zero_attn" if layer.bias_k is None else "add_bias_kv"
        raise ValueError(
            f"{option} adds a key and a value of no token: a layer of triptych attends to tokens alone"
        )
    state = {name: own.detach() for name, own in layer.state_dict().items()}
    heads = layer.num_heads
    whole, bias = state.get("in_proj_weight"), state.get("in_proj_bias")
    maps = [state[name] for name in _APART] if whole is None else whole.chunk(3)
    biases = [None] * 3 if bias is None else [*bias.view(3, heads, -1)]
    q, k, v = (
        (Link(_of_heads(rows, heads).mT, own),)
        for rows, own in zip(maps, biases, strict=True)
    )
    # The sequence of the queries has a single width.
    is_cross = {layer.kdim, layer.vdim} != {layer.embed_dim}
    semantics = Semantics(
        scale=standard_scale(layer.head_dim),
        kind="cross" if is_cross else "self",
        dropout=layer.dropout,
    )
    o = (Link(_of_heads(state["out_proj.weight"].T, heads)),)
    shift = state.get("out_proj.bias")
    return AttentionWeights(layer.embed_dim, heads, q, k, v, o, semantics, shift)


def torch_layer_of(
    weights: AttentionWeights, *, batch_first: bool
) -> nn.MultiheadAttention:
    """Build a layer of torch from weights; consecutive maps become one map."""
    if other := weights.semantics.beyond(_HELD):
        raise ValueError(f"nn.MultiheadAttention has no {', no '.join(other)}")
    if weights.norms_within:
        raise ValueError("nn.MultiheadAttention has no norms within its maps")
    d_model, heads = weights.d_model, weights.num_heads
    widths = weights.multiplied("q").d_out, weights.multiplied("v").d_out
    if {*widths} != {d_model / heads} or weights.multiplied("o").d_out != d_model:
        raise ValueError(
            f"nn.MultiheadAttention has heads of width d_model / num_heads = {d_model / heads:g}, and these "
            f"have keys of {widths[0]} and values of {widths[1]}"
        )
    # The query map absorbs another scale than that of torch.
    weights = weights.with_scale(standard_scale(widths[0]))
    maps = [weights.per_head(side).mT.flatten(0, 1) for side in ("q", "k", "v")]
    none = maps[0].new_zeros(d_model)
    biases = [weights.head_bias(side) for side in ("q", "k", "v")]
    shifts = [none if bias is None else bias.flatten() for bias in biases]
    out = {"weight": weights.W_O.flatten(0, 1).T, "bias": weights.o_bias}
    has_bias = any(bias is not None for bias in (*biases, out["bias"]))
    layer = nn.MultiheadAttention(
        d_model,
        heads,
        dropout=weights.semantics.dropout,
        bias=has_bias,
        kdim=maps[1].shape[1],
        vdim=maps[2].shape[1],
        batch_first=batch_first,
    ).to(maps[0])
    is_joined = {*_APART}.isdisjoint(layer.state_dict())
    given = {
        "in_proj_weight": torch.cat(maps if is_joined else maps[:1]),
        **dict(zip(_APART, maps, strict=True)),
        "in_proj_bias": torch.cat(shifts),
        "out_proj.weight": out["weight"],
        "out_proj.bias": none if out["bias"] is None else out["bias"],
    }
    layer.load_state_dict({name: given[name] for name in layer.state_dict()})
    return layer


def _of_heads(
    rows: Float[Tensor, "rows width"], heads: int
) -> Float[Tensor, "heads head_dim width"]:
    return rows.reshape(heads, -1, rows.shape[1])
