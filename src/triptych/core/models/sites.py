"""The attention layers of a model by name, and models with rewritten layers."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal, NamedTuple, TypeVar, cast

import torch
from torch import nn

from triptych import user_code
from triptych.core.algebra.semantics import Semantics, same_norm_structure
from triptych.core.algebra.weights import AttentionWeights, Norm
from triptych.core.attention import MultiHeadAttention
from triptych.core.attention.projections import fit_parameterisation
from triptych.core.models.blocks import Block, OffsetNorm, Residual
from triptych.core.models.configuration import LanguageModelConfig, ModelConfig
from triptych.core.models.encoder_decoder import AnyModel, EncoderDecoder
from triptych.core.models.language_model import LanguageModel
from triptych.core.models.site_configuration import AttentionConfig
from triptych.errors import UsageError

ModelT = TypeVar("ModelT", EncoderDecoder, LanguageModel, EncoderDecoder | LanguageModel)


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
    return list(cast(Iterable[Block], model.stacks["encoder" if stack == "encoder" else "decoder"].blocks))


def attention_sites(model: AnyModel) -> list[AttentionSite]:
    """List every attention layer: encoder first, self-attention before cross-attention in a decoder block."""
    sites: list[AttentionSite] = []
    for stack in model.stacks:
        for i, block in enumerate(blocks_of(model, stack)):
            sites.append(AttentionSite(stack, i, block.self_attention, block.self_residual))
            if block.has_cross:
                sites.append(AttentionSite("cross", i, block.cross_attention, block.cross_residual))
    return sites


def require_lengths(model: AnyModel, lengths: Mapping[str, tuple[int | None, int]]) -> None:
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
            norm = _norm_of(site.residual.norm)
            if isinstance(model, EncoderDecoder) and site.kind == "cross":
                memory_norm = _norm_of(model.encoder.final_norm)
        place: Literal["pre", "post"] = "pre" if site.residual.pre else "post"
        found[site.name] = replace(weights, norm=norm, memory_norm=memory_norm, norm_place=place)
    return found


def input_norms(model: AnyModel) -> dict[str, tuple[Norm | None, Norm | None]]:
    """Return, by site, the last norm on the input of the layer and the last norm on its memory.

    The norm before a layer belongs to the previous sub-layer in a post-norm model.
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
                found[f"cross.{i}"] = (own if block.cross_residual.pre else last, memory)
                last = own
            last = _norm_of(block.feed_forward_residual.norm)
        final = _norm_of(stack.final_norm)
        memory = last if final is None else final
    return found


def with_attention(model: ModelT, changed: Mapping[str, AttentionWeights]) -> ModelT:
    """Build a model with changed weights at some sites and copied weights elsewhere."""
    if model.config is None:
        raise ValueError("the model is of another library's checkpoint: no recipe describes it")
    sites = {site.name: site for site in attention_sites(model)}
    if unknown := [name for name in changed if name not in sites]:
        raise ValueError(f"there is no attention site {unknown[0]}: there are {', '.join(sites)}")
    for name, weights in changed.items():
        read = weights.d_model
        has = model.config.d_model
        if read != has:
            raise ValueError(f"the weights for {name} read {read} channels, the model has {has}")
        require_no_more(name, weights, sites[name].layer.semantics)
    # The configuration must describe the new layers, so it is read off the layers.
    layers = {
        name: _rewritten_layer(site, changed[name]) if name in changed else site.layer
        for name, site in sites.items()
    }
    configs = {name: AttentionConfig.of(layer) for name, layer in layers.items()}
    new = _assembled(model, _configured(model.config, configs), layers)
    for site in attention_sites(new):
        if site.name in changed:
            _require_positions(site, changed[site.name].semantics)
    return new


def _rewritten_layer(site: AttentionSite, weights: AttentionWeights) -> MultiHeadAttention:
    """Build a layer from changed weights; the norms stay in the model."""
    before = site.layer.parameterisation
    weights = weights.without_norms()
    own = before if user_code.is_in_file(before.name) else None
    try:
        return MultiHeadAttention.from_weights(weights, site.layer.dropout, named=True, own=own)
    except ValueError as error:
        if own is None:
            raise
        raise UsageError(f"{site.name}: {own.name} does not write what was made of it, and {error}") from None


def require_no_more(name: str, weights: AttentionWeights, own: Semantics) -> None:
    """Check that the configuration of a model can express the semantics of the weights.

    QK-norm and gates are allowed if the layer of the model has them with the same structure, gates of pairs
    if the parameterisation has them.
    """
    # The query map absorbs the scale; `_require_positions` checks rotary positions.
    given = weights.semantics
    held = {"scale", "kind", "dropout", "rotary"}
    if given.bias is None or not given.bias.learned:
        held.add("bias")
    if same_norm_structure(given.q_norm, own.q_norm) and same_norm_structure(given.k_norm, own.k_norm):
        held |= {"q_norm", "k_norm"}
    if (
        given.gate is not None
        and own.gate is not None
        and given.gate.tensors().keys() == own.gate.tensors().keys()
        and given.gate.weight.shape[1:] == own.gate.weight.shape[1:]
        and bool(given.gate.whole) == bool(own.gate.whole)
        and (not own.gate.whole or _has_pairs(name, weights))
    ):
        held.add("gate")
    if type(given.scores) is type(own.scores):
        held.add("scores")
    found = given.beyond(held)
    if found:
        raise ValueError(
            f"the weights for {name} are of a layer with {', '.join(found)}, which the configuration of a "
            "model cannot say"
        )


def _has_pairs(name: str, weights: AttentionWeights) -> bool:
    """Return True if heads form the pairs of a parameterisation; a pair that lost one head is refused."""
    gate = weights.semantics.gate
    assert gate is not None
    if gate.whole != (True, False) * (len(gate.whole) // 2):
        raise ValueError(
            f"heads stand in pairs at {name}, and half of a pair is left: leave out both or none"
        )
    _, found = fit_parameterisation(weights.without_norms(), named=True)
    return found.gate(weights.d_model, weights.num_heads) is not None


def _require_positions(site: AttentionSite, given: Semantics) -> None:
    """Check that the position encoding of weights, if any, equals the model's at a site."""
    held = site.layer.semantics
    same = given.positions in ("none", held.positions)
    if given.rotary is not None and held.rotary is not None:
        same = given.rotary.pairs == held.rotary.pairs
        same = same and torch.equal(given.rotary.frequencies, held.rotary.frequencies)
        same = same and given.rotary.factor == held.rotary.factor and given.rotary.long is held.rotary.long
    if not same:
        raise ValueError(
            f"the weights for {site.name} are of a layer with {given.positions} positions, which are not "
            f"the model's ({held.positions})"
        )


def _assembled(
    model: ModelT, config: ModelConfig | LanguageModelConfig, layers: Mapping[str, MultiHeadAttention]
) -> ModelT:
    """Build a model from a configuration, attention layers, and all other parameters of a model."""
    some = next(model.parameters())
    with torch.random.fork_rng(devices=[]):  # initial values are drawn only to be overwritten
        new = _fresh(model, config)
    new = new.to(device=some.device, dtype=some.dtype).train(model.training)
    in_layers = {id(parameter) for site in attention_sites(new) for parameter in site.layer.parameters()}
    old = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if id(parameter) not in in_layers:
                parameter.copy_(old[name])
                parameter.requires_grad_(old[name].requires_grad)
        for site, before in zip(attention_sites(new), attention_sites(model), strict=True):
            site.layer.load_state_dict(layers[site.name].state_dict())
            site.layer.requires_grad_(any(p.requires_grad for p in before.layer.parameters()))
    return new


def _fresh(model: ModelT, config: ModelConfig | LanguageModelConfig) -> ModelT:
    """Build a model from a configuration with fresh weights, with the vocabulary of a given model."""
    if isinstance(model, LanguageModel):
        assert isinstance(config, LanguageModelConfig)
        return LanguageModel.of(config, model.architecture.kind, model.vocab_size)
    assert isinstance(config, ModelConfig)
    return EncoderDecoder.of(config, model.src_vocab_size, model.tgt_vocab_size, model.pad_id)


def _configured(
    config: ModelConfig | LanguageModelConfig, sites: Mapping[str, AttentionConfig]
) -> ModelConfig | LanguageModelConfig:
    """Return the configuration with these sites: the most frequent for the stack, exceptions by layer."""
    # Configurations are compared as JSON.
    of_stack: dict[str, dict[int, AttentionConfig]] = {}
    for name, site in sites.items():
        stack, index = name.split(".")
        of_stack.setdefault(stack, {})[int(index)] = site
    record = config.model_dump()
    for stack, layers in of_stack.items():
        dumps = {i: site.model_dump_json() for i, site in layers.items()}
        most = Counter(dumps.values()).most_common(1)[0][0]
        half = "encoder" if stack == "encoder" else "decoder"
        own = record[half] if isinstance(config, ModelConfig) else record
        kind = "cross_attention" if stack == "cross" else "attention"
        own[kind] = AttentionConfig.model_validate_json(most)
        own[f"{kind}_in_layer"] = {i: site for i, site in layers.items() if dumps[i] != most}
    return type(config).model_validate(record)


def _norm_of(norm: nn.Module) -> Norm | None:
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
