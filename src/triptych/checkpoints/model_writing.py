"""A model that was read from a checkpoint, written back in the format of that checkpoint.

Every number that reading gave can be traced back: `LayerMap` is invertible, and what reading computes besides
(gains that are stored relative to 1, gains that the next map takes up) is undone here. Tensors whose numbers
did not change stay as they are stored, to the bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from triptych.algebra.forms import are_finite
from triptych.algebra.weights import AttentionWeights
from triptych.attention import MultiHeadAttention
from triptych.checkpoints.checkpoint import Checkpoint, open_checkpoint
from triptych.checkpoints.family import family_of
from triptych.checkpoints.layer import Site
from triptych.checkpoints.layer_map import LayerMap, layer_map
from triptych.checkpoints.model_map import ModelMap, encoder_decoder_map, model_map
from triptych.checkpoints.models import read_attention
from triptych.checkpoints.place import Place
from triptych.checkpoints.positions import table_names
from triptych.checkpoints.tensor_maps import Shape
from triptych.errors import DataError, UsageError
from triptych.models.blocks import Block
from triptych.models.encoder_decoder import EncoderDecoder
from triptych.models.language_model import LanguageModel
from triptych.storage.copying import CopiedCheckpoint, FolderCopy
from triptych.storage.settings import Settings
from triptych.storage.tensors import InMemory, of_one

ReadModel = LanguageModel | EncoderDecoder
_Stored = Iterator[tuple[str, Tensor]]
# Gains of norms between maps: reading multiplies the second map with them.
_TAKEN_UP = {"q_gain": "q_up", "kv_gain": "kv_up"}


def write_read_model(model: ReadModel, source: Path | str, target: Path) -> CopiedCheckpoint:
    """Write a model in the format of the checkpoint that it was read from."""
    source = Path(source)
    checkpoint = open_checkpoint(source, mapped=True)
    if not isinstance(checkpoint, Checkpoint):
        raise UsageError(f"{source} is a run of triptych, and no checkpoint of another library")
    changed = dict(changed_tensors(model, checkpoint))
    with FolderCopy(source, target) as copy:
        copy.write_shards(changed.get)
        copy.write_beside({})
        return copy.finish()


def changed_tensors(model: ReadModel, checkpoint: Checkpoint) -> _Stored:
    """Stored tensors whose values differ in a model, by name, in their stored dtype."""
    found = _Parts.of(model, checkpoint)
    written: dict[str, Tensor] = {}
    for name, tensor in found.changed(checkpoint):
        if name not in written:
            written[name] = tensor
            for same in (name, *(copy for copy, of in found.copies.items() if of == name)):
                stored = _as_stored(checkpoint, same, tensor)
                if not torch.equal(stored, checkpoint.tensors.read(same)):
                    yield same, stored
        elif not torch.equal(written[name], tensor):
            raise DataError(
                f"{checkpoint.name}: layers share {name}, and its numbers differ between them now"
            )


def new_tensors(
    model: ReadModel,
    layers: Sequence[AttentionWeights],
    settings: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    given: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The tensors of a model in a new file of a family, which has tensors of these shapes."""
    name, family = "the new checkpoint", family_of(settings["model_type"])
    assert family is not None, "it is one of ours"
    zero = torch.zeros((), dtype=next(model.parameters()).dtype)
    empty = of_one(InMemory(name, {stored: zero.expand(shape) for stored, shape in shapes.items()}))
    checkpoint = Checkpoint(name, family, Settings(settings, "config.json"), empty)
    parts, found = _Parts.of(model, checkpoint), dict[str, Tensor]()
    now = {**dict(model.named_parameters(remove_duplicate=False)), **given}
    for ours, stored in parts.beside.entries.items():
        if now.keys() >= {*ours}:
            found |= stored.write([now[part].detach().cpu() for part in ours])
    for (site, _), weights in zip(parts.layers, layers, strict=True):
        place = checkpoint.place(site)
        found |= layer_map(place, empty).write(_numbers(place, weights))
    missing = [stored for stored in shapes if stored not in found]
    assert all(stored.endswith("bias") for stored in missing), missing
    return found | {stored: empty.read(stored).clone() for stored in missing}


def why_not_written(checkpoint: Checkpoint) -> str:
    """Why a model of this checkpoint cannot be trained further and written back; "" if it can."""
    for name in checkpoint.tensors.infos:
        if how := checkpoint.tensors.packed_as(name):
            return f"tensor {name} is stored as {how}, which cannot take other numbers"
    for site in checkpoint.sites:
        if checkpoint.place(site).position.kind == "disentangled":
            return f"its tables of positions ({site.module}) are products of several tensors"
    return ""


def tie_shared(model: LanguageModel, checkpoint: Checkpoint) -> None:
    """Let layers that share a stored table of distances have one parameter between them."""
    tables: dict[tuple[str, ...], nn.Parameter] = {}
    for site, layer in _Parts.of(model, checkpoint).layers:
        own = dict(layer.named_parameters(recurse=False)).get("bias_table")
        if own is not None:
            names = tuple(table_names(checkpoint.place(site), checkpoint.tensors))
            layer.bias_table = tables.setdefault(names, own)


@final
@dataclass(frozen=True)
class _Parts:
    """A model, and where its parts lie in a checkpoint."""

    model: nn.Module
    beside: LayerMap  # where all but attention lies
    copies: Mapping[str, str]  # stored tensors that are the same as others, and those
    layers: Sequence[tuple[Site, MultiHeadAttention]]  # the attention layers with their sites

    @classmethod
    def of(cls, model: ReadModel, checkpoint: Checkpoint) -> "_Parts":
        if isinstance(model, LanguageModel):
            found: ModelMap[Any] = model_map(checkpoint)
            layers = [block.self_attention for block in _blocks(model.blocks)]
        else:
            found, decoder = encoder_decoder_map(checkpoint), _blocks(model.decoder)
            layers = [block.self_attention for block in (*_blocks(model.encoder), *decoder)]
            layers += [block.cross_attention for block in decoder]
        return cls(model, found.tensors, found.copies, [*zip(found.sites, layers, strict=True)])

    def changed(self, checkpoint: Checkpoint) -> _Stored:
        """The stored tensors whose numbers are others now; one that layers share may come several times."""
        dtype = next(self.model.parameters()).dtype
        now = {
            **dict(self.model.named_buffers()),
            **dict(self.model.named_parameters(remove_duplicate=False)),
        }

        def take(name: str, shape: Shape | None) -> Tensor:
            return checkpoint.tensors.read(name).to(dtype)

        for parts, stored in self.beside.entries.items():
            new = [now[part].detach().cpu() for part in parts]
            if not all(map(torch.equal, stored.read(take), new)):
                yield from stored.write(new)
        for site, layer in self.layers:
            yield from _changed_in_layer(checkpoint, site, read_attention(checkpoint, site, dtype), layer)


def _blocks(blocks: nn.ModuleList) -> list[Block]:
    return [block for block in blocks if isinstance(block, Block)]


def _changed_in_layer(
    checkpoint: Checkpoint, site: Site, before: MultiHeadAttention, after: MultiHeadAttention
) -> _Stored:
    place, stored = checkpoint.place(site), layer_map(checkpoint.place(site), checkpoint.tensors)
    scale = before.semantics.scale
    old, new = (_numbers(place, layer.weights().with_scale(scale)) for layer in (before, after))
    different = {part for part, numbers in new.items() if not torch.equal(old[part], numbers)}
    different |= {gain for gain, taker in _TAKEN_UP.items() if taker in different and gain in new}
    for parts, named in stored.entries.items():
        if different & {*parts}:
            yield from named.write([new[part] for part in parts])
    if different & {"bias_keys", "bias_queries"}:
        raise DataError(
            f"{checkpoint.name}: tables of positions of {site.module} changed, which are products of several "
            "stored tensors: they cannot be written"
        )
    if "bias_table" in new:  # though it did not change: other layers may have it too
        yield from _table(checkpoint, place, new["bias_table"], changed="bias_table" in different)


def _numbers(place: Place, weights: AttentionWeights) -> dict[str, Tensor]:
    """All of a layer's numbers, by the names of its `LayerMap`, or else by names of ours."""
    found = _of_latent(place, weights) if place.spec.latent else _of_maps(weights)
    found["o"] = weights.o[-1].weight
    if weights.o_bias is not None:
        found["o.bias"] = weights.o_bias
    norm = place.head_norm
    for name, numbers in weights.semantics.learned().items():
        match name.rpartition("_"):
            case (("q_norm" | "k_norm") as side, _, "weight") if norm is not None:
                found[side] = numbers - norm.offset if norm.offset else numbers
            case (("q_norm" | "k_norm") as side, _, "bias"):
                found[f"{side}.bias"] = numbers
            case _:
                found[name] = numbers
    return {part: numbers.detach().cpu() for part, numbers in found.items()}


def _of_maps(weights: AttentionWeights) -> dict[str, Tensor]:
    found = {}
    for side, chain in (("q", weights.q), ("k", weights.k), ("v", weights.v)):
        link = chain[0]  # after which normalised values pass a fixed map
        found[side] = link.weight
        if link.bias is not None:
            found[f"{side}.bias"] = link.bias
    return found


def _of_latent(place: Place, weights: AttentionWeights) -> dict[str, Tensor]:
    latent = place.spec.latent
    assert latent is not None
    rank, turned = place.count(latent.rank), place.count(latent.turned)
    (down, k_up), (_, v_up) = weights.k, weights.v
    plain = k_up.d_out - turned
    up = torch.cat([k_up.weight[:, :rank, :plain], v_up.weight[:, :rank]], dim=-1)
    found = {"kv_up": up.mT.flatten(0, 1), "kv_gain": torch.ones_like(up[0, :, 0])}
    links = {"kv_down": down, "q_up": weights.q[-1]}
    if len(weights.q) > 1:
        links["q_down"] = weights.q[0]
        found["q_gain"] = torch.ones_like(weights.q[-1].weight[0, :, 0])
    for part, link in links.items():
        found[part] = link.weight.mT.flatten(0, 1)
        if link.bias is not None:
            found[f"{part}.bias"] = link.bias.flatten()
    return found


def _table(checkpoint: Checkpoint, place: Place, table: Tensor, *, changed: bool) -> _Stored:
    """The stored table of distances; rows that are not read stay as they are."""
    names = table_names(place, checkpoint.tensors)
    if len(names) > 1:
        if changed:
            raise DataError(
                f"{checkpoint.name}: the sum of {' and '.join(names)} changed: how much each did is not known"
            )
        return
    stored = checkpoint.tensors.read(names[0]).to(table.dtype, copy=True)
    stored[: len(table)] = table
    yield names[0], stored


def _as_stored(checkpoint: Checkpoint, name: str, tensor: Tensor) -> Tensor:
    """A tensor in the dtype that the checkpoint stores it in."""
    dtype = checkpoint.tensors.infos[name].dtype
    if how := checkpoint.tensors.packed_as(name):
        raise DataError(
            f"{checkpoint.name}: tensor {name} is stored as {how}, which cannot take other numbers"
        )
    stored = tensor.to(dtype).contiguous()
    if not are_finite(stored):
        raise DataError(f"{checkpoint.name}: numbers for {name} do not fit {dtype}".replace("torch.", ""))
    return stored
