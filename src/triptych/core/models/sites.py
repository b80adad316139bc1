"""The attention layers of a model by name."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal, NamedTuple, TypeVar, cast

from torch import nn

from triptych.core.algebra.weights import AttentionWeights, Norm
from triptych.core.attention.layer import MultiHeadAttention
from triptych.core.models.blocks import Block, OffsetNorm, Residual
from triptych.core.models.encoder_decoder import AnyModel, EncoderDecoder
from triptych.core.models.language_model import LanguageModel

ModelT = TypeVar(
    "ModelT", EncoderDecoder, LanguageModel, EncoderDecoder | LanguageModel
)


class AttentionSite(NamedTuple):
    """An attention layer of a model; every use of a repeated block is a site."""

    stack: Literal["encoder", "decoder", "cross"]
    block: int  # block number within its stack, in order of use
    layer: MultiHeadAttention
    residual: Residual  # residual frame around the layer, with the norm

    @property
    def name(self) -> str:
        """Name of the site, such as `encoder.0`."""
        return f"{self.stack}.{self.block}"

    @property
    def kind(self) -> Literal["self", "causal", "cross"]:
        """Origin of queries and keys, as in `Semantics.kind`."""
        kinds: dict[str, Literal["self", "causal", "cross"]]
        kinds = {"encoder": "self", "decoder": "causal", "cross": "cross"}
        return kinds[self.stack]


def blocks_of(model: AnyModel, stack: str) -> list[Block]:
    """Return the blocks of a stack; "cross" stands for the decoder."""
    return list(
        cast(
            Iterable[Block],
            model.stacks["encoder" if stack == "encoder" else "decoder"].blocks,
        )
    )


def attention_sites(model: AnyModel) -> list[AttentionSite]:
    """List every attention layer: encoder first, self-attention before cross-attention in a decoder block."""
    sites: list[AttentionSite] = []
    for stack in model.stacks:
        for i, block in enumerate(blocks_of(model, stack)):
            sites.append(
                AttentionSite(stack, i, block.self_attention, block.self_residual)
            )
            if block.has_cross:
                sites.append(
                    AttentionSite(
                        "cross", i, block.cross_attention, block.cross_residual
                    )
                )
    return sites


def require_lengths(
    model: AnyModel, lengths: Mapping[str, tuple[int | None, int]]
) -> None:
    """Check that the taps of the layers fit the length of a text.

    `lengths` contains, by stack, the number of queries (None if unknown) and the number of keys.
    """
    for site in attention_sites(model):
        require = getattr(site.layer.tap, "require_lengths", None)
        if require is not None and site.stack in lengths:
            require(*lengths[site.stack])


def attention_weights(model: AnyModel) -> dict[str, AttentionWeights]:
    """Return the weights of every attention layer by site, with the norms before the layers."""
    found: dict[str, AttentionWeights] = {}
    for site in attention_sites(model):
        weights = site.layer.weights(site.kind)
        norm = memory_norm = None
        if site.residual.pre:
            norm = (
                None
                if _is_read_elsewhere(model, site)
                else _norm_of(site.residual.norm)
            )
            if isinstance(model, EncoderDecoder) and site.kind == "cross":
                memory_norm = _norm_of(model.encoder.final_norm)
        place: Literal["pre", "post"] = "pre" if site.residual.pre else "post"
        found[site.name] = replace(
            weights, norm=norm, memory_norm=memory_norm, norm_place=place
        )
    return found


def _is_read_elsewhere(model: AnyModel, site: AttentionSite) -> bool:
    """Return True if more than the attention reads the output of the norm before it."""
    block = blocks_of(model, site.stack)[site.block]
    return site.residual.from_norm or block.shares_norm or block.streams is not None


def input_norms(model: AnyModel) -> dict[str, tuple[Norm | None, Norm | None]]:
    """Return, by site, the norm whose output the layer reads, and that of the memory.

    In a post-norm model the former is the norm of the previous sub-layer.
    """
    # `last` is the norm at the end of the stream so far.
    found: dict[str, tuple[Norm | None, Norm | None]] = {}
    memory: Norm | None = None
    for name, stack in model.stacks.items():
        last = _norm_of(stack.embeddings.norm)
        for i, block in enumerate(blocks_of(model, name)):
            own = _norm_of(block.self_residual.norm)
            found[f"{name}.{i}"] = (own if block.self_residual.pre else last, None)
            last = own
            if block.has_cross:
                own = _norm_of(block.cross_residual.norm)
                found[f"cross.{i}"] = (
                    own if block.cross_residual.pre else last,
                    memory,
                )
                last = own
            last = _norm_of(block.feed_forward_residual.norm)
        final = _norm_of(stack.final_norm)
        memory = last if final is None else final
    return found


def _norm_of(norm: nn.Module) -> Norm | None:
    if getattr(norm, "weight", None) is None:
        return None
    match norm:
        case nn.LayerNorm() | OffsetNorm():
            offset = norm.offset if isinstance(norm, OffsetNorm) else 0.0
            shift = None if norm.bias is None else norm.bias.detach()
            is_layer_norm = isinstance(norm, nn.LayerNorm) or norm.kind == "layer"
            return Norm(norm.weight.detach(), shift, offset, centred=is_layer_norm)
        case nn.RMSNorm():
            return Norm(norm.weight.detach())
        case _:
            return None
