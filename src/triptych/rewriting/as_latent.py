"""Conversion of a layer of another family to DeepSeek's format: tensors and settings.

A rotary key of several heads repeats each frequency per head. `rope_type` "longrope" lists a factor per pair,
and thereby allows any frequencies.
"""

from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor

from triptych.core.algebra.positions import OtherFrequencies, RotaryEmbedding
from triptych.core.algebra.weights import AttentionWeights, standard_scale
from triptych.core.checkpoints.checkpoint import Checkpoint
from triptych.core.checkpoints.family import Family, family_of
from triptych.core.checkpoints.fitted_weights import reject, sizes_of
from triptych.core.checkpoints.latents import latent_parts
from triptych.core.checkpoints.layer_map import LayerMap, layer_map
from triptych.core.checkpoints.model_map import model_map
from triptych.core.checkpoints.stored_layers import (
    AttentionLayer,
    MapSizes,
    Place,
    Site,
)
from triptych.core.storage import (
    InMemory,
    Settings,
    of_one,
)
from triptych.errors import DataError

_TYPE = "deepseek_v3"


@final
@dataclass(frozen=True, eq=False)
class AsLatent:
    """A layer in DeepSeek's format."""

    weights: AttentionWeights  # scaled for the scale used by readers of the file
    stored: LayerMap  # locations of its parts
    parts: dict[str, Tensor]
    settings: dict[str, Any]
    replaced: dict[
        str, tuple[str, ...]
    ]  # removed tensors, with the names of their replacements


def as_latent(
    checkpoint: Checkpoint, before: AttentionLayer, after: AttentionWeights
) -> AsLatent:
    """Convert a layer of another family, with keys and values from a normalised latent."""
    place = checkpoint.place(before.site)
    family = family_of(_TYPE)
    assert family is not None
    # The small scale of the latent would underflow in float16.
    if before.weights.dtype == torch.float16:
        reject("the latent is too small for float16", "store it in bfloat16 or float32")
    sizes = sizes_of(after)
    rotary = after.semantics.rotary
    assert rotary is not None
    weights = after.to(torch.float64).with_scale(standard_scale(sizes.width))
    settings = _settings(place, sizes, rotary)
    site = before.site
    new = _latent_place(place, site, family, settings)
    stored, old = (
        layer_map(one, checkpoint.tensors, size)
        for one, size in ((new, sizes), (place, None))
    )
    parts = latent_parts(weights) | {"o": weights.o[0].weight}
    names = [*chain.from_iterable(named.names for named in stored.entries.values())]
    old_names = chain.from_iterable(named.names for named in old.entries.values())
    gone = [name for name in old_names if name not in names]
    come = tuple(name for name in names if name not in old.names)
    if site == checkpoint.sites[0]:
        written = dict(stored.write(parts))
        if other := [name for name in come if name not in written]:
            reject(
                f"the rest of the model cannot be read from {family.name}'s format: there is no {other[0]}"
            )
        _require_same_model(
            checkpoint,
            family,
            settings,
            {name: written[name] for name in come},
            {*gone},
        )
    replaced: dict[str, tuple[str, ...]] = {
        gone[0]: come,
        **dict.fromkeys(gone[1:], ()),
    }
    return AsLatent(weights, stored, parts, settings, replaced)


def _settings(place: Place, sizes: MapSizes, rotary: RotaryEmbedding) -> dict[str, Any]:
    record = place.settings
    turned = 2 * len(rotary.frequencies)
    longest = place.count("max_position_embeddings | 2048")
    long = (
        rotary.long.frequencies
        if isinstance(rotary.long, OtherFrequencies)
        else rotary.frequencies
    )
    limit = longest if rotary.limit is None else rotary.limit
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1.0,
        "factor": 1.0,
        "attention_factor": rotary.factor,
        "original_max_position_embeddings": limit,
        "short_factor": (1 / rotary.frequencies.double()).tolist(),
        "long_factor": (1 / long.double()).tolist(),
    }
    found = {
        "model_type": _TYPE,
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.heads,
        "head_dim": turned,
        "q_lora_rank": None,
        "kv_lora_rank": sizes.rank,
        "qk_nope_head_dim": sizes.width - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": sizes.value_width,
        "rope_parameters": rope,
        "rope_interleave": False,
        "max_position_embeddings": longest,
        "first_k_dense_replace": place.count(place.spec.layers),
        "num_nextn_predict_layers": 0,
        "attention_bias": False,
    }
    # Entries replaced by `rope_parameters`, or foreign to the new format, are removed.
    gone = {
        name: None
        for name in ("rope_scaling", "rope_theta", "layer_types")
        if record.value(name) is not None
    }
    return {**found, **gone}


def _latent_place(
    place: Place, site: Site, family: Family, settings: dict[str, Any]
) -> Place:
    spec = family.attention[0]
    if (
        place.prefix + spec.at.format(layer=place.layer, inner=place.inner)
        != site.module
    ):
        reject(f"the module {site.module} has another name in {family.name}'s models")
    return Place(
        site,
        spec,
        Settings({**place.settings.record, **settings}, "config.json"),
        place.prefix,
        place.layer,
        0,
    )


def _require_same_model(
    checkpoint: Checkpoint,
    family: Family,
    settings: dict[str, Any],
    come: dict[str, Tensor],
    gone: set[str],
) -> None:
    """Refuse a model with differences outside the attention when read in DeepSeek's format."""
    zero = torch.zeros(())
    first = checkpoint.sites[0].module
    shapes = {name: info.shape for name, info in checkpoint.tensors.infos.items()}
    for site in checkpoint.sites:
        for name in gone:
            shapes.pop(name.replace(first, site.module), None)
        shapes |= {
            name.replace(first, site.module): tuple(tensor.shape)
            for name, tensor in come.items()
        }
    # The map of the model needs only names and shapes.
    empty = InMemory(
        checkpoint.name, {name: zero.expand(shape) for name, shape in shapes.items()}
    )
    record = Settings(
        {**checkpoint.settings.record, **settings}, checkpoint.settings.where
    )
    try:
        one = model_map(checkpoint)
        other = model_map(Checkpoint(checkpoint.name, family, record, of_one(empty)))
    except DataError as error:
        reject(
            f"the rest of the model cannot be read from {family.name}'s format: {error}"
        )
    for field in fields(one.architecture):
        if getattr(one.architecture, field.name) != getattr(
            other.architecture, field.name
        ):
            reject(
                f"the {field.name} of the model are others in {family.name}'s format"
            )
    places = [
        {parts: named.names for parts, named in found.tensors.entries.items()}
        for found in (one, other)
    ]
    if places[0] != places[1]:
        reject(
            f"tensors outside of the attention have other names in {family.name}'s format"
        )
