"""Models as data: their architecture, and the parameterisation and semantics of every attention layer.

`describe_model` returns the record of `config.json`; `ModelRecord.build` builds a model from it, with fresh
weights.
Learned tensors are in the file of the weights: the record has their shapes. Constant tensors, such as rotary
frequencies, are in the record.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from itertools import chain
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    Union,
    cast,
    final,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor

from triptych.core.algebra import positions, semantics
from triptych.core.algebra.semantics import Scores, Semantics
from triptych.core.algebra.weights import SIDES, Side
from triptych.core.attention.layer import MultiHeadAttention
from triptych.core.attention.projections import parameterisation, parameterisation_class
from triptych.core.attention.projections.abstract import Parameterisation
from triptych.core.attention.projections.composed import AsWritten, ScaledOutside
from triptych.core.attention.projections.maps import FromHeads, HeadMap, LinkMap
from triptych.core.attention.requirements import scores_class
from triptych.core.models import architecture
from triptych.core.models.architecture import (
    EncoderDecoderArchitecture,
    LanguageModelArchitecture,
)
from triptych.core.models.blocks import Block
from triptych.core.models.encoder_decoder import AnyModel, EncoderDecoder
from triptych.core.models.language_model import LanguageModel

# Classes that a record may name, by name.
_CLASSES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        *vars(architecture).values(),
        *vars(semantics).values(),
        *vars(positions).values(),
    )
    if isinstance(cls, type)
    and is_dataclass(cls)
    and cls.__module__
    in (architecture.__name__, semantics.__name__, positions.__name__)
}
_CLASSES |= {cls.__name__: cls for cls in (LinkMap, FromHeads)}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64)
}
_LAYERS = {"encoder": ("self",), "decoder": ("self", "cross")}


def describe_model(
    model: AnyModel, instead: Mapping[int, MultiHeadAttention] | None = None
) -> dict[str, Any]:
    """Return a model as data: its architecture, attention layers and limits.

    `instead`: replacements of layers, by the identity (`id`) of the model's layers.
    """
    instead = instead or {}
    record: dict[str, Any] = {
        "architecture": encode(model.architecture),
        "limit": model.recipe_limit,
    }
    if isinstance(model, EncoderDecoder):
        record["pad_id"] = model.pad_id
    layers: dict[str, list[dict[str, Any]]] = {}
    for stack, half in model.stacks.items():
        for part in _LAYERS[stack]:
            name = f"{stack}.{part}" if isinstance(model, EncoderDecoder) else part
            found = [instead.get(id(layer), layer) for layer in _layers_of(half, part)]
            layers[name] = [describe_layer(layer) for layer in found]
    # Equal layers are written once: a list of different layers, and the number of each layer in it.
    kinds: list[dict[str, Any]] = []
    for layer in chain.from_iterable(layers.values()):
        if layer not in kinds:
            kinds.append(layer)
    record["layers"] = kinds
    record["attention"] = {
        part: [kinds.index(layer) for layer in own]
        for part, own in layers.items()
        if own
    }
    return record


def describe_layer(layer: MultiHeadAttention) -> dict[str, Any]:
    """Return the parameterisation, number of heads, dropout and semantics of a layer as data."""
    chosen = layer.parameterisation
    record: dict[str, Any] = {"num_heads": layer.num_heads, "dropout": layer.dropout}
    if isinstance(chosen, ScaledOutside):
        record["scale"] = "outside"
        chosen = chosen.inner
    if isinstance(chosen, AsWritten):
        record["projections"] = _describe_maps(chosen)
    else:
        record["projections"] = _describe_options(chosen)
    record["semantics"] = describe_semantics(layer)
    return record


def _describe_options(chosen: Parameterisation) -> dict[str, Any]:
    """Return a named parameterisation as data: its name and the options besides their defaults."""
    # A class of the user's has the name `FILE.py:CLASS`.
    if parameterisation_class(chosen.name) is not type(chosen):
        raise ValueError(
            f"{chosen.name} has changed since the layer was made: open the model again"
        )
    options = {field.name: getattr(chosen, field.name) for field in fields(chosen)}
    defaults = {field.name: field.default for field in fields(chosen)}
    return {
        "name": chosen.name,
        **{name: value for name, value in options.items() if value != defaults[name]},
    }


def _describe_maps(chosen: AsWritten) -> dict[str, Any]:
    """Return chains of maps as data: the maps by name, and the names of the maps of each chain."""
    return {
        "name": chosen.name,
        "width": chosen.width,
        "maps": {name: encode(one) for name, one in chosen.own_maps.items()},
        "chains": {side: [*names] for side, names in chosen.chains.items()},
    }


def _maps_as_written(record: Mapping[str, Any]) -> AsWritten:
    """Return the parameterisation of `_describe_maps`; ValueError or KeyError for a wrong record."""
    own_maps: dict[str, HeadMap] = {}
    for name, one in record["maps"].items():
        found = decode(one, f"maps.{name}")
        if not isinstance(found, LinkMap | FromHeads) or not name.isidentifier():
            raise ValueError(f"maps.{name} is no map")
        own_maps[name] = found
    chains: dict[Side, tuple[str, ...]] = {
        side: tuple(record["chains"][side]) for side in SIDES
    }
    if unknown := {*chain.from_iterable(chains.values())} - own_maps.keys():
        raise ValueError(f"chains name {sorted(unknown)[0]}, which is no map")
    return AsWritten(own_maps, chains, _whole(record["width"], "width"))


def describe_semantics(layer: MultiHeadAttention) -> dict[str, Any]:
    """Return the semantics of a layer as data, with the shapes of learned tensors."""
    held = layer.semantics
    shapes = {
        name: tensor.detach().to("meta") for name, tensor in held.learned().items()
    }
    return cast(dict[str, Any], encode(held.with_learned(shapes)))


@final
@dataclass(frozen=True)
class ModelRecord:
    """A model as data, from `config.json`."""

    architecture: LanguageModelArchitecture | EncoderDecoderArchitecture
    # records of layers by "self", or by "encoder.self", "decoder.self" and "decoder.cross"
    layers: Mapping[str, Sequence[Mapping[str, Any]]]
    limit: int | None  # longest text by the recipe; None without
    pad_id: int  # padding token of an encoder-decoder

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "ModelRecord":
        """Check a record; ValueError names the first wrong entry."""
        made = decode(record["architecture"], "architecture")
        if not isinstance(made, LanguageModelArchitecture | EncoderDecoderArchitecture):
            raise ValueError(f"architecture is of type {type(made).__name__}")
        kinds = record["layers"]
        layers = {
            part: [kinds[_whole(number, part)] for number in own]
            for part, own in record["attention"].items()
        }
        limit = record.get("limit")
        pad_id = _whole(record.get("pad_id", 0), "pad_id")
        if isinstance(made, EncoderDecoderArchitecture):
            src = made.encoder.embeddings.vocab_size
            tgt = made.decoder.embeddings.vocab_size
            if pad_id >= min(src, tgt):
                raise ValueError(
                    f"pad_id {pad_id} is outside the vocabularies of {src} and {tgt}"
                )
        return cls(
            made, layers, None if limit is None else _whole(limit, "limit"), pad_id
        )

    @property
    def num_layers(self) -> dict[str, int]:
        """The number of layers by the prefix of their tensors in files."""
        if isinstance(self.architecture, LanguageModelArchitecture):
            return {"blocks": len(self.architecture.blocks)}
        return {
            "encoder": len(self.architecture.encoder.blocks),
            "decoder": len(self.architecture.decoder.blocks),
        }

    def build(self) -> AnyModel:
        """Build the model with fresh weights."""
        made = self.architecture
        if isinstance(made, LanguageModelArchitecture):
            return LanguageModel(made, self._part("self", made.d_model), self.limit)
        width = made.decoder.d_model
        return EncoderDecoder(
            made,
            self._part("encoder.self", width),
            self._part("decoder.self", width),
            self._part("decoder.cross", width),
            self.pad_id,
            self.limit,
        )

    def _part(self, part: str, d_model: int) -> Iterator[MultiHeadAttention]:
        # A generator: a layer is drawn when its block is built.
        return (_build_layer(layer, d_model) for layer in self.layers[part])


def _build_layer(record: Mapping[str, Any], d_model: int) -> MultiHeadAttention:
    given = dict(record["projections"])
    chosen: Parameterisation
    if given["name"] == AsWritten.name:
        chosen = _maps_as_written(given)
    else:
        chosen = parameterisation(given.pop("name"), **given)
    scale: Literal["inside", "outside"] = (
        "outside" if record.get("scale") == "outside" else "inside"
    )
    held = decode(record["semantics"], "semantics")
    if not isinstance(held, Semantics):
        raise ValueError(f"semantics is of type {type(held).__name__}")
    dropout = record["dropout"]
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout!r}")
    return MultiHeadAttention.with_semantics(
        d_model,
        _whole(record["num_heads"], "num_heads"),
        chosen,
        held,
        dropout=dropout,
        scale=scale,
    )


def _layers_of(half: LanguageModel, part: str) -> Iterator[MultiHeadAttention]:
    """Yield the attention layers of the distinct blocks of a stack."""
    blocks = dict[int, Block]()
    for number, block in zip(half.architecture.uses, half.blocks, strict=True):
        blocks.setdefault(number, cast(Block, block))
    for number in range(len(half.architecture.blocks)):
        if part == "self":
            yield blocks[number].self_attention
        elif blocks[number].has_cross:
            yield blocks[number].cross_attention


def _whole(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is {value!r}: a whole number is needed")
    return value


# Records of dataclasses.


def encode(value: Any) -> Any:
    """Return a value as JSON data: dataclasses by their type and the fields besides their defaults."""
    if isinstance(value, Tensor):
        if value.is_meta:
            return {"shape": [*value.shape]}
        return {
            "values": value.tolist(),
            "dtype": str(value.dtype).removeprefix("torch."),
        }
    if isinstance(value, tuple):
        return [encode(part) for part in value]
    if isinstance(value, dict):
        return {name: encode(part) for name, part in value.items()}
    if not is_dataclass(value):
        return value
    name = type(value).__name__
    if isinstance(value, Scores):
        name = value.name
    elif _CLASSES.get(name) is not type(value):
        raise ValueError(f"a {name} cannot be written as data")
    given = {
        field.name: getattr(value, field.name) for field in fields(value) if field.init
    }
    defaults = {field.name: field.default for field in fields(value)}
    return {
        "type": name,
        **{
            own: encode(part)
            for own, part in given.items()
            if isinstance(part, Tensor)
            or defaults[own] is MISSING
            or part != defaults[own]
        },
    }


def decode(record: Any, where: str) -> Any:
    """Return the dataclass of a record; ValueError names a part of another type."""
    if not isinstance(record, dict):
        raise ValueError(f"{where} is {str(record)[:40]!r}: a record is needed")
    if "shape" in record:
        return torch.zeros([_whole(size, f"{where}.shape") for size in record["shape"]])
    if "values" in record:
        return torch.tensor(record["values"], dtype=_DTYPES[record["dtype"]])
    name = record["type"]
    cls = _class_of(name)
    hints = get_type_hints(cls)
    known = {field.name for field in fields(cls) if field.init}
    found = {}
    for own, part in record.items():
        if own == "type":
            continue
        if own not in known:
            raise ValueError(f"{where}: {name} has no {own}")
        found[own] = _decode_field(part, hints[own], f"{where}.{own}")
    return cls(**found)


def _class_of(name: object) -> type:
    if not isinstance(name, str):
        raise ValueError(f"type is {name!r}: a name is needed")
    if name in _CLASSES:
        return _CLASSES[name]
    return scores_class(name)


def _decode_field(part: Any, hint: Any, where: str) -> Any:
    if hint is torch.Size:
        return torch.Size(_whole(size, where) for size in part)
    if get_origin(hint) is dict:
        _, of_value = get_args(hint)
        return {
            name: _decode_field(own, of_value, f"{where}.{name}")
            for name, own in part.items()
        }
    if isinstance(part, list):
        inner = (
            [own for own in get_args(hint) if own is not Ellipsis]
            if get_origin(hint) is tuple
            else []
        )
        if not inner:
            raise ValueError(f"{where} is a list")
        return tuple(_decode_field(own, inner[0], where) for own in part)
    value = decode(part, where) if isinstance(part, dict) else part
    if not _is_of(value, hint):
        raise ValueError(f"{where} is {str(part)[:40]!r}")
    return value


def _is_of(value: object, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_is_of(value, one) for one in get_args(hint))
    if origin is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint in (int, bool, str, NoneType):
        return type(value) is hint
    if isinstance(hint, type) and is_dataclass(hint):
        return isinstance(value, hint)
    # Classes of tensors by shape, and abstract classes of dataclasses.
    return isinstance(value, Tensor) or is_dataclass(value)
