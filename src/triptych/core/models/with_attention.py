"""Models with rewritten attention layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from triptych import user_code
from triptych.core.algebra.weights import AttentionWeights
from triptych.core.attention.layer import MultiHeadAttention
from triptych.core.attention.requirements import check_can_be_held
from triptych.core.models.encoder_decoder import AnyModel, EncoderDecoder
from triptych.core.models.language_model import LanguageModel
from triptych.core.models.model_records import ModelRecord, describe_model
from triptych.core.models.sites import AttentionSite, attention_sites, blocks_of
from triptych.errors import UsageError

ModelT = TypeVar(
    "ModelT", EncoderDecoder, LanguageModel, EncoderDecoder | LanguageModel
)


def with_attention(model: ModelT, changed: Mapping[str, AttentionWeights]) -> ModelT:
    """Build a model with changed weights at some sites and copied weights elsewhere.

    A changed layer has the semantics of its weights. Weights without positions keep the positions of the
    site.

    Raises ValueError for an unknown site, and for weights that a layer of the model cannot have.
    """
    sites = {site.name: site for site in attention_sites(model)}
    if unknown := [name for name in changed if name not in sites]:
        raise ValueError(
            f"there is no attention site {unknown[0]}: there are {', '.join(sites)}"
        )
    layers: dict[
        int, MultiHeadAttention
    ] = {}  # new layers, by the identity of the replaced layer
    for name, weights in changed.items():
        read = weights.d_model
        has = sites[name].layer.d_model
        if read != has:
            raise ValueError(
                f"the weights for {name} read {read} channels, the model has {has}"
            )
        require_held(model, name, weights)
        layer = _rewritten_layer(sites[name], weights)
        # Uses of a repeated block may be separate modules with the same parameters.
        own = set(sites[name].layer.parameters())
        for other in sites.values():
            if set(other.layer.parameters()) == own:
                layers[id(other.layer)] = layer
    # The model is described as data with the new layers, built from it, and filled with the old tensors.
    with torch.random.fork_rng(
        devices=[]
    ):  # initial values are drawn only to be overwritten
        new = ModelRecord.read(describe_model(model, layers)).build()
    assert isinstance(new, type(model))
    some = next(model.parameters())
    new = new.to(device=some.device, dtype=some.dtype).train(model.training)
    _copy_tensors(model, new, layers)
    return new


def _rewritten_layer(
    site: AttentionSite, weights: AttentionWeights
) -> MultiHeadAttention:
    """Build a layer from changed weights; the norms stay in the model."""
    before = site.layer.parameterisation
    held = site.layer.semantics
    weights = weights.without_norms()
    semantics = replace(weights.semantics, kind=held.kind)
    if semantics.positions == "none":
        semantics = replace(semantics, rotary=held.rotary, bias=held.bias)
    own = before if user_code.is_in_file(before.name) else None
    try:
        return MultiHeadAttention.from_weights(
            replace(weights, semantics=semantics), site.layer.dropout, own=own
        )
    except ValueError as error:
        if own is None:
            raise
        raise UsageError(
            f"{site.name}: {own.name} does not write what was made of it, and {error}"
        ) from None


def require_held(model: AnyModel, name: str, weights: AttentionWeights) -> None:
    """Check that a layer of a model can have changed weights; ValueError gives the reason.

    Heads of differential attention stay in pairs.
    """
    stack, number = name.split(".")
    if blocks_of(model, stack)[int(number)].keys is not None:
        raise ValueError(
            f"{name} shares its keys and values with other layers, which would change as well"
        )
    check_can_be_held(weights.without_norms())
    gate = weights.semantics.gate
    if (
        gate is not None
        and gate.whole
        and gate.whole != (True, False) * (len(gate.whole) // 2)
    ):
        raise ValueError(
            f"heads stand in pairs at {name}, and half of a pair is left: leave out both or none"
        )


def _copy_tensors(
    model: nn.Module, new: nn.Module, layers: Mapping[int, MultiHeadAttention]
) -> None:
    """Copy all tensors into a new model; the new layers supply the tensors of replaced layers."""
    tensors = model.state_dict()
    trained = {
        name: parameter.requires_grad for name, parameter in model.named_parameters()
    }
    for path, module in model.named_modules(remove_duplicate=False):
        if (layer := layers.get(id(module))) is None:
            continue
        below = f"{path}."
        tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if not name.startswith(below)
        }
        tensors |= {below + name: tensor for name, tensor in layer.state_dict().items()}
        # A new map may be made of several: it is trained if any of the old maps was trained.
        is_trained = any(parameter.requires_grad for parameter in module.parameters())
        trained |= {below + name: is_trained for name, _ in layer.named_parameters()}
    new.load_state_dict(tensors)
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(trained[name])
