"""Models with rewritten attention layers."""

from collections.abc import Mapping
from typing import TypeVar

import torch

from triptych import user_code
from triptych.core.algebra.semantics import Semantics, same_norm_structure
from triptych.core.algebra.weights import AttentionWeights
from triptych.core.attention.layer import MultiHeadAttention
from triptych.core.attention.projections import fit_parameterisation
from triptych.core.models.configuration import LanguageModelConfig, ModelConfig
from triptych.core.models.encoder_decoder import EncoderDecoder
from triptych.core.models.language_model import LanguageModel
from triptych.core.models.model_configs import configured, find_config
from triptych.core.models.site_configuration import AttentionConfig
from triptych.core.models.sites import AttentionSite, attention_sites
from triptych.errors import UsageError

ModelT = TypeVar("ModelT", EncoderDecoder, LanguageModel, EncoderDecoder | LanguageModel)


def with_attention(model: ModelT, changed: Mapping[str, AttentionWeights]) -> ModelT:
    """Build a model with changed weights at some sites, by their names, and copied weights elsewhere."""
    config = find_config(model)
    sites = {site.name: site for site in attention_sites(model)}
    if unknown := [name for name in changed if name not in sites]:
        raise ValueError(f"there is no attention site {unknown[0]}: there are {', '.join(sites)}")
    for name, weights in changed.items():
        read = weights.d_model
        has = config.d_model
        if read != has:
            raise ValueError(f"the weights for {name} read {read} channels, the model has {has}")
        require_no_more(name, weights, sites[name].layer.semantics)
    # The configuration must describe the new layers, so it is read off the layers.
    layers = {
        name: _rewritten_layer(site, changed[name]) if name in changed else site.layer
        for name, site in sites.items()
    }
    configs = {name: AttentionConfig.of(layer) for name, layer in layers.items()}
    new = _assembled(model, configured(config, configs), layers)
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
    """Raise ValueError unless the configuration of a model can express the semantics of the weights.

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
    new.recipe_limit = model.recipe_limit  # stays None for a model without a recipe
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
