"""Keys and values through a latent, converted from stored maps to chains and back.

A latent y W^D is normalised and then mapped to keys and values of all heads. The same map also makes a
rotary key, shared by all heads without a further map.

Source: DeepSeek-AI 2024, arXiv 2405.04434.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from triptych.core.algebra.semantics import HeadNorm
from triptych.core.algebra.weights import AttentionWeights, Chain, Link
from triptych.core.checkpoints.stored_layers import MapSizes, Place


def read_latent(
    place: Place, parts: Mapping[str, Tensor]
) -> tuple[Chain, Chain, Chain, Chain]:
    """Build the chains of q, k, v and o from the tensors of a layer's `LayerMap`."""
    latent = place.spec.latent
    sizes = place.sizes
    assert latent is not None
    assert sizes.rank is not None
    eps = place.number(latent.eps)
    turned = place.count(latent.turned)

    # Stored maps `[copies · width, d_in]` become links `[copies, d_in, width]`.
    def link(part: str) -> Link:
        copies = 1 if part.endswith("down") else sizes.heads
        weight = parts[part]
        bias = parts.get(f"{part}.bias")
        return Link(
            weight.view(copies, -1, weight.shape[1]).mT,
            None if bias is None else bias.view(copies, -1),
        )

    q: Chain = (link("q_up"),)
    if "q_down" in parts:
        q = replace(link("q_down"), norm=HeadNorm(eps, parts["q_gain"])), *q
    down = replace(
        link("kv_down"), norm=HeadNorm(eps, parts["kv_gain"], channels=sizes.rank)
    )
    k_up, v_up = link("kv_up").weight.split(
        [sizes.width - turned, sizes.value_width], dim=-1
    )  # type: ignore[no-untyped-call]
    return (
        q,
        (down, Link(_pass_rotated(k_up, turned))),
        (down, Link(_skip_rotated(v_up, turned))),
        (Link(parts["o"]),),
    )


# Extends maps by rows of zeros: the rotated channels after the latent's are not read.
def _skip_rotated(up: Tensor, turned: int) -> Tensor:
    return torch.nn.functional.pad(up, (0, 0, 0, turned))


def _pass_rotated(up: Tensor, turned: int) -> Tensor:
    """Extend maps `[heads, rank, plain]` by an identity for the rotated channels, after the latent's."""
    passed = torch.eye(
        up.shape[1] + turned, turned, dtype=up.dtype, device=up.device
    ).roll(up.shape[1], 0)
    return torch.cat(
        [_skip_rotated(up, turned), passed.expand(len(up), -1, -1)], dim=-1
    )


def is_latent(weights: AttentionWeights) -> bool:
    """Return True if one latent and one rotary key give keys and values, in the form of `read_latent`."""
    k = weights.k
    v = weights.v
    q = weights.q
    if len(k) != 2 or len(v) != 2 or len(q) not in (1, 2) or len(weights.o) != 1:
        return False
    down = k[0]
    norm = k[0].norm
    if norm is None or norm.channels is None or norm.centred or k[0].copies != 1:
        return False
    alike = down is v[0] or all(
        map(torch.equal, _link_tensors(down), _link_tensors(v[0]))
    )
    # A file can only express maps of the forms of `_pass_rotated` and `_skip_rotated`.
    return (
        alike
        and v[0].norm is not None
        and v[0].norm.structure == norm.structure
        and torch.equal(
            k[1].weight, _pass_rotated(_ups(weights)[0], down.d_out - norm.channels)
        )
        and not bool(v[1].weight[:, norm.channels :].any())
        and (len(q) == 1 or (q[0].norm is not None and q[0].copies == 1))
    )


def _link_tensors(link: Link) -> list[Tensor]:
    norm = {} if link.norm is None else link.norm.tensors()
    return [link.weight, *([] if link.bias is None else [link.bias]), *norm.values()]


def latent_ranks(weights: AttentionWeights) -> tuple[int | None, int | None]:
    """Return the widths of the latents of keys and values, and of queries; None for a missing latent."""
    norm = weights.k[0].norm if len(weights.k) > 1 else None
    if norm is None or norm.channels is None:
        return None, None
    return norm.channels, weights.q[0].d_out if len(weights.q) > 1 else None


def _ups(weights: AttentionWeights) -> tuple[Tensor, Tensor]:
    """Return the maps from the latent to unrotated keys and to values, `[heads, rank, width]`."""
    rank, _ = latent_ranks(weights)
    assert rank is not None
    turned = weights.k[0].d_out - rank
    heads = weights.num_heads
    k_up, v_up = (chain[1].repeat(heads).weight for chain in (weights.k, weights.v))
    return k_up[:, :rank, : k_up.shape[-1] - turned], v_up[:, :rank]


def latent_parts(weights: AttentionWeights) -> dict[str, Tensor]:
    """Return the tensors of a `LayerMap`, without the output map, from chains built by `read_latent`."""
    # The format concatenates keys and values of every head in one map up.
    links = {"kv_down": weights.k[0], "q_up": weights.q[-1].repeat(weights.num_heads)}
    if len(weights.q) > 1:
        links["q_down"] = weights.q[0]
    found = {"kv_up": torch.cat(_ups(weights), dim=-1).mT.flatten(0, 1)}
    for part, link in links.items():
        found[part] = link.weight.mT.flatten(0, 1)
        if link.bias is not None:
            found[f"{part}.bias"] = link.bias.flatten()
        if (norm := link.norm) is not None:
            ones = link.weight.new_ones(norm.channels or link.d_out)
            found[part.replace("down", "gain")] = (
                ones if norm.weight is None else norm.weight
            )
    biases = [chain[1].bias for chain in (weights.k, weights.v)]
    if given := [bias for bias in biases if bias is not None]:
        found["kv_up.bias"] = torch.cat([bias.flatten() for bias in given])
    return found


def widened_latent(weights: AttentionWeights, sizes: MapSizes) -> AttentionWeights:
    """Pad a layer to larger sizes with zeros, keeping its function.

    The mean of a norm is then over more channels. To cancel that, the latent is multiplied by √(new / old
    width), and the maps that read it are divided by it.
    """
    pad = torch.nn.functional.pad
    down, (q_up, k_up, v_up) = (
        weights.k[0],
        (chain[-1] for chain in (weights.q, weights.k, weights.v)),
    )
    rank, q_rank = latent_ranks(weights)
    assert rank is not None
    assert sizes.rank is not None
    turned = down.d_out - rank
    # Rotated channels come last and keep their number: pad the unrotated channels before them.
    plain = k_up.d_out - turned
    more = sizes.width - k_up.d_out
    wider = sizes.value_width - v_up.d_out
    down, (k, v) = _of_rank(down, sizes.rank, turned, *_ups(weights))
    q_weight = torch.cat(
        [pad(q_up.weight[..., :plain], (0, more)), q_up.weight[..., plain:]], dim=-1
    )
    q: Chain = (replace(q_up, weight=q_weight),)
    if q_rank is not None and sizes.q_rank is not None:
        q_down, (q_weight,) = _of_rank(weights.q[0], sizes.q_rank, 0, q_weight)
        q = (q_down, replace(q_up, weight=q_weight))
    k = pad(k, (0, more))
    v = pad(v, (0, wider))
    o = Link(pad(weights.o[0].weight, (0, 0, 0, wider)))
    keys = (down, Link(_pass_rotated(k, turned)))
    values = (down, Link(_skip_rotated(v, turned)))
    return replace(weights, q=q, k=keys, v=values, o=(o,))


def _of_rank(
    down: Link, rank: int, turned: int, *ups: Tensor
) -> tuple[Link, list[Tensor]]:
    """Pad a latent to `rank` channels: return the map to it, and the maps from it."""
    norm = down.norm
    had = down.d_out - turned
    assert norm is not None
    if rank == had:
        return down, [*ups]
    pad = torch.nn.functional.pad
    grown = (
        rank / had
    ) ** 0.5  # the root mean square shrinks by this factor with the zeros

    def wider(part: Tensor) -> Tensor:
        return torch.cat(
            [pad(part[..., :had] * grown, (0, rank - had)), part[..., had:]], dim=-1
        )

    gain = None if norm.weight is None else pad(norm.weight, (0, rank - had), value=1.0)
    norm = replace(norm, weight=gain, channels=None if norm.channels is None else rank)
    bias = None if down.bias is None else wider(down.bias)
    return Link(wider(down.weight), bias, norm), [
        pad(up / grown, (0, 0, 0, rank - had)) for up in ups
    ]
