"""Conversion of models to GGUF, the format of llama.cpp: one file with weights, settings and tokenizer.

The file is described first, and the description is read like a GGUF file: a model of which llama.cpp would
compute something else is refused before anything is written. Tensors are written one at a time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from triptych.converting import target_formats as formats
from triptych.converting.gguf_fit import (
    any_map,
    differences,
    fit_to,
    windows_only,
    written_part,
)
from triptych.converting.gguf_tokens import CHARSMAP, write_tokens
from triptych.converting.output_checks import ConversionCheck, WrittenModel
from triptych.core.algebra.forms import are_finite
from triptych.core.checkpoints.checkpoint import Checkpoint, LayerReader
from triptych.core.checkpoints.family import family_of
from triptych.core.checkpoints.gguf import (
    Heads,
    Layout,
    entry_of,
    find_architecture,
    in_transformers,
    layout_of,
    name_in_gguf,
    read_configuration,
    split,
    written_metadata,
)
from triptych.core.checkpoints.gguf.architectures import (
    Architecture,
    Joined,
    Listed,
    architectures,
    architectures_of_type,
    refusals,
)
from triptych.core.checkpoints.model_map import has_two_stacks
from triptych.core.storage import (
    SUFFIX,
    Gguf,
    InMemory,
    Settings,
    TensorFile,
    TensorInfo,
    Tensors,
    of_one,
)
from triptych.errors import DataError, TriptychError, UsageError
from triptych.extras import require_extra
from triptych.files import write_atomically
from triptych.literals import Quantization
from triptych.running.opened_source import Opened
from triptych.running.text import PretrainedTokenizer, load_tokenizer
from triptych.untrusted import LocalBytes, shown

# Names of types in a file, with their codes in `general.file_type`.
_TYPES: dict[Quantization, tuple[str, int]] = {
    "float32": ("F32", 0),
    "float16": ("F16", 1),
    "int8": ("Q8_0", 7),
}
_BLOCK = 32  # numbers of a block of Q8_0
_ROUTER = "ffn_gate_inp.weight"
# Maps that llama.cpp multiplies in float32 whatever the file's type.
_KEPT_WIDE = (
    *(_ROUTER, "position_embd.weight", "rope_freqs.weight"),
    *("token_types.weight", "attn_rel_b.weight"),
)
_FLOATS = (
    *(
        "freq_base",
        "freq_base_swa",
        "epsilon",
        "scale",
        "softcapping",
        "factor",
        "clamp_kqv",
        "max_alibi_bias",
    ),
    *("beta_fast", "beta_slow", "log_multiplier"),
)
_FACTORS = "rope_freqs.weight"
_LONG = "rope_factors_long.weight"
_SHORT = "rope_factors_short.weight"


@final
@dataclass(frozen=True)
class _Described:
    """A file to be written: its metadata and its tensors."""

    architecture: Architecture
    metadata: dict[str, Any]
    lists: dict[str, list[float]]  # further metadata, without the architecture's name
    tensors: Tensors
    again: Checkpoint  # the description, read as a file


def write_gguf(
    source: Opened, target: Path, quantization: Quantization
) -> WrittenModel:
    """Write a model to a GGUF file, and read it again."""
    require_extra("gguf", "gguf", what="--to gguf")
    if target.suffix != SUFFIX:
        raise UsageError(
            f"{target}: a model in GGUF is one file: give a name that ends in {SUFFIX}"
        )
    model, done = _as_checkpoint(source)
    described, notes = _describe(model)
    tokens = _tokens(source, model, described)
    kind, number = _TYPES[quantization]
    metadata = {
        "general.type": "model",
        "general.name": Path(source.name).name,
        **{
            f"{described.architecture.name}.{key}": value
            for key, value in described.metadata.items()
        },
        **described.lists,
        **_token_types(described),
        "general.file_type": number,
        "general.quantization_version": 2,
        **tokens[0],
    }
    # The check runs on the temporary file: a file that fails it never gets the target's name.
    checks = [*tokens[2]]

    def write(path: Path) -> None:
        _write(path, described, metadata, kind)
        checks.append(_check_again(path, described, kind))

    write_atomically(target, write)
    parameters = sum(
        torch.Size(info.shape).numel() for info in described.tensors.infos.values()
    )
    folded = (*done, *notes, *tokens[1])
    return WrittenModel(described.architecture.name, parameters, folded, tuple(checks))


def _token_types(described: _Described) -> dict[str, int]:
    """Return the number of token types, required by llama.cpp for encoders."""
    if described.architecture.has_head:
        return {}
    types = described.tensors.infos.get("token_types.weight")
    count = 1 if types is None else types.shape[0]
    return {"tokenizer.ggml.token_type_count": count}


def _as_checkpoint(source: Opened) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return a model as a checkpoint of `transformers`, and what was changed for that."""
    attention = source.attention
    if isinstance(attention, Checkpoint):
        return attention, ()
    model = source.to_run.language_model
    if not model.causal:
        raise UsageError(
            f"{source.name}: llama.cpp has no language models that see both sides"
        )
    made = formats.language_model(model)
    settings = Settings(dict(made.settings), source.name)
    family = family_of(str(made.settings["model_type"]))
    assert family is not None
    tensors = {name: tensor.detach() for name, tensor in made.tensors.items()}
    return Checkpoint(
        source.name, family, settings, of_one(InMemory(source.name, tensors))
    ), made.done


def _describe(model: Checkpoint) -> tuple[_Described, tuple[str, ...]]:
    """Describe a file of which llama.cpp computes the model; raise UsageError if it cannot."""
    model_type = str(model.settings.value("model_type"))
    candidates = [
        one
        for one in architectures_of_type(model_type)
        if not one.unlike and one.has_two_stacks == has_two_stacks(model)
    ]
    if not candidates:
        known = sorted({*chain.from_iterable(one.types for one in architectures())})
        why = refusals().get(model_type, f"these are: {', '.join(known)}")
        raise UsageError(
            f"{model.name}: models of the type {shown(model_type)} are not written in GGUF: {why}"
        )
    any_map(model)  # raises the reason why a model cannot be run
    reasons: list[str] = []
    for architecture in candidates:
        try:
            fitted, notes = fit_to(model, architecture)
            described = _description(fitted, architecture)
            found = differences(fitted, described.again)
        except TriptychError as error:
            reasons.append(str(error))
            continue
        if not found:
            return described, notes
        if (window := windows_only(fitted, found)) is not None:
            longest = described.metadata["context_length"]
            described = replace(
                described, metadata={**described.metadata, "context_length": window}
            )
            note = f"context {window:,} of {longest:,} tokens: {architecture.name} of llama.cpp has no window"
            return described, (*notes, note)
        reasons.append(f"{'; '.join(found[:4])}{' …' if len(found) > 4 else ''}")
        reasons += architecture.advised(fitted.settings)[:1]
    said = " / ".join(dict.fromkeys(reasons))
    raise UsageError(
        f"{model.name}: {candidates[0].name} of llama.cpp has no place for it: {said}"
    )


def _description(model: Checkpoint, architecture: Architecture) -> _Described:
    site = next(site for site in model.sites if site.stack == _stack(model))
    place = model.place(site)
    weights = model.outline(site).weights
    width = weights.width("q")
    heads = Heads(weights.num_heads, weights.num_key_heads)
    if architecture.square and heads.queries * width != weights.d_model:
        raise UsageError(
            f"{heads.queries} heads of {width} channels, and a width of {weights.d_model}"
        )
    if architecture.equal_heads and heads.queries != heads.keys:
        raise UsageError(f"{heads.queries} heads of queries and {heads.keys} of keys")
    metadata = written_metadata(architecture, place.settings, width)
    if "attention.head_count_kv" not in architecture.by_layer:
        # Absorbed into the queries, the maps of keys leave one latent for all heads.
        latent = architecture.has_latents
        metadata["attention.head_count_kv"] = 1 if latent else heads.keys
    extra: dict[str, Tensor] = {}
    if architecture.has_rotary:
        _add_scaling(model, architecture, place.settings, metadata, extra)
    if architecture.windows:
        windows = [
            model.outline(one).weights.semantics.window is not None
            for one in model.sites
        ]
        metadata["attention.sliding_window_pattern"] = windows
    metadata = {key: _typed(key, value) for key, value in metadata.items()}
    if metadata.get("decoder_block_count", 0) > metadata["block_count"]:
        raise UsageError("it opens no decoder with more layers than its encoder")
    layers = max(
        int(metadata.get(key, 0)) for key in ("block_count", "decoder_block_count")
    )
    planned = _Planned(model, architecture, heads, layers, extra)
    tensors = of_one(planned)
    for key, name in architecture.columns.items():
        shapes = [tensors.infos[f"blk.{layer}.{name}"].shape for layer in range(layers)]
        metadata[key] = [shape[1] for shape in shapes]
    if "leading_dense_block_count" in metadata:
        routed = [
            layer
            for layer in range(layers)
            if f"blk.{layer}.{_ROUTER}" in tensors.infos
        ]
        metadata["leading_dense_block_count"] = min(routed, default=layers)
    # llama.cpp asks for it in files without a tokenizer.
    metadata["vocab_size"] = tensors.infos["token_embd.weight"].shape[0]
    whole = {"general.architecture": architecture.name}
    whole |= {f"{architecture.name}.{key}": value for key, value in metadata.items()}
    # From here on, the description is read like the metadata of a file.
    as_read, settings = find_architecture(whole, model.name, frozenset(tensors.infos))
    if as_read.unlike:
        raise UsageError(as_read.unlike)
    all_shapes = {name: info.shape for name, info in tensors.infos.items()}

    def vector(name: str) -> list[float]:
        return [float(number) for number in tensors.read(name).tolist()]

    record = read_configuration(as_read, settings, all_shapes, vector)
    family = family_of(as_read.model_type)
    assert family is not None
    names = in_transformers(tensors, as_read, record, planned.lists)
    again = Checkpoint(model.name, family, Settings(record, model.name), names)
    return _Described(architecture, metadata, planned.lists, tensors, again)


def _stack(model: Checkpoint) -> str:
    """Return the stack described by the sizes in the metadata: the decoder, or an encoder alone."""
    spec = model.family.model
    assert spec is not None
    if spec.encoder is not None and not has_two_stacks(model):
        return spec.encoder.stack
    return spec.stack


def _add_scaling(
    model: Checkpoint,
    architecture: Architecture,
    settings: Settings,
    metadata: dict[str, Any],
    extra: dict[str, Tensor],
) -> None:
    """Add the scaling of rotary positions: as metadata, or as a divisor for each frequency."""
    all_semantics = (
        model.outline(site).weights.semantics
        for site in model.sites
        if site.stack == _stack(model)
    )
    # Where layers differ, the metadata are of those without a window.
    turned = [one for one in all_semantics if one.rotary is not None]
    chosen = next(
        (one for one in turned if one.window is None), next(iter(turned), None)
    )
    if chosen is None or chosen.rotary is None:
        return
    frequencies = chosen.rotary.frequencies.double()
    pairs = torch.arange(len(frequencies), dtype=torch.float64)
    plain = float(metadata["rope.freq_base"]) ** (-pairs / len(frequencies))
    divisors = plain / frequencies
    if (
        torch.allclose(divisors, torch.ones_like(divisors), rtol=1e-6)
        and chosen.rotary.long is None
    ):
        return
    record = _scaling_of(settings)
    kind = record.get("rope_type", record.get("type"))
    if kind in ("linear", "yarn") and record.get("factor"):
        metadata["rope.scaling.type"] = kind
        metadata["rope.scaling.factor"] = float(record["factor"])
        if kind == "yarn":
            for key, name in (
                ("yarn_beta_fast", "beta_fast"),
                ("yarn_beta_slow", "beta_slow"),
            ):
                if record.get(name):
                    metadata[f"rope.scaling.{key}"] = float(record[name])
            original = record.get("original_max_position_embeddings")
            if original:
                metadata["rope.scaling.original_context_length"] = int(original)
            if record.get("mscale_all_dim"):
                per_unit = 1.0 if architecture.plain_mscale else 0.1
                log_factor = per_unit * float(record["mscale_all_dim"])
                metadata["rope.scaling.yarn_log_multiplier"] = log_factor
    elif architecture.name == "phi3" and record.get("long_factor"):
        extra[_LONG] = torch.tensor(record["long_factor"], dtype=torch.float32)
        extra[_SHORT] = torch.tensor(record["short_factor"], dtype=torch.float32)
        metadata["rope.scaling.attn_factor"] = float(chosen.rotary.factor)
        original = settings.value("original_max_position_embeddings")
        original = (
            record.get("original_max_position_embeddings")
            if original is None
            else original
        )
        if original:
            metadata["rope.scaling.original_context_length"] = int(original)
    elif kind == "dynamic" and chosen.rotary.long is None:
        # NTK's rule is another base: all frequencies but the first determine it.
        base = float(frequencies[-1]) ** (-len(frequencies) / (len(frequencies) - 1))
        metadata["rope.freq_base"] = base
    elif architecture.rope_factors and chosen.rotary.long is None:
        extra[_FACTORS] = divisors.float()


def _scaling_of(settings: Settings) -> Mapping[str, Any]:
    for path in ("rope_scaling", "rope_parameters.full_attention", "rope_parameters"):
        found = settings.value(path)
        if isinstance(found, dict) and found.get(
            "rope_type", found.get("type")
        ) not in (None, "default"):
            return found
    return {}


def _typed(key: str, value: Any) -> Any:
    """Return a number of the type that llama.cpp asks for."""
    if isinstance(value, int) and not isinstance(value, bool) and key.endswith(_FLOATS):
        return float(value)
    if isinstance(value, float) and not key.endswith(_FLOATS) and value.is_integer():
        return int(value)
    return value


class _Part(NamedTuple):
    """A part of a stored tensor, as a separate tensor of a file."""

    name: str  # stored tensor
    joined: Joined
    number: int


@final
class _Planned(TensorFile):
    """The tensors of a GGUF file, made from the tensors of a checkpoint when they are read."""

    def __init__(
        self,
        model: Checkpoint,
        architecture: Architecture,
        heads: Heads,
        layers: int,
        extra: Mapping[str, Tensor],
    ) -> None:
        self.name = model.name
        self._tensors = model.tensors
        self._extra = extra
        self._parts: dict[str, dict[int | None, str]] = {}
        self._layouts: dict[str, Layout] = {}
        self._cut: dict[str, _Part] = {}
        self._heads = heads
        self._settings = model.settings
        self._layers = layers
        self.infos = {}
        self.lists: dict[str, list[float]] = {}
        head = written_part(any_map(model).architecture).head
        for name in self._stored(model):
            if (entry := entry_of(architecture, name)) is not None:
                self._enter(name, *entry, architecture)
                continue
            found = name_in_gguf(architecture.name, layers, name)
            if found is None:
                raise UsageError(
                    f"tensor {name} has no place in {architecture.name} of llama.cpp"
                )
            there, expert = found
            # llama.cpp uses the table of tokens if the output table is missing.
            if there == "output.weight" and head is not None and head.tied:
                continue
            held = self._parts.setdefault(there, {})
            if expert in held:
                raise UsageError(
                    f"tensors {held[expert]} and {name} are both {there} of llama.cpp"
                )
            held[expert] = name
            self._layouts[there] = layout_of(architecture, there, heads, model.settings)
        self.infos |= {name: self._info(name) for name in self._parts}
        for name, tensor in extra.items():
            self.infos[name] = TensorInfo(
                tensor.dtype, tuple(tensor.shape), tensor.nbytes
            )

    def _enter(
        self, name: str, joined: Joined | Listed, layer: int, architecture: Architecture
    ) -> None:
        """Enter the parts of a tensor as separate tensors, or its value in a list of the metadata."""
        info = self._tensors.infos[name]
        if isinstance(joined, Listed):
            values = self.lists.setdefault(joined.key, [0.0] * self._layers)
            values[layer] = float(self._tensors.read(name))
            return
        names = [f"blk.{layer}.{part}" for part in joined.parts]
        whole = torch.empty(info.shape, dtype=info.dtype, device="meta")
        parts = split(joined, whole, self._heads, self._settings)
        for number, (there, part) in enumerate(zip(names, parts, strict=True)):
            self._cut[there] = _Part(name, joined, number)
            layout = layout_of(architecture, there, self._heads, self._settings)
            self._layouts[there] = layout
            self.infos[there] = TensorInfo(part.dtype, tuple(part.shape), part.nbytes)

    def _stored(self, model: Checkpoint) -> Iterator[str]:
        """Yield the tensors that the model uses."""
        found = any_map(model)
        copies = found.copies
        used = found.tensors.names
        for site in found.sites:
            reader = LayerReader(model.place(site), model.tensors)
            used |= {*reader.map.names, *reader.names_beside()}
        yield from (
            name for name in self._tensors.infos if name in used and name not in copies
        )

    def _info(self, name: str) -> TensorInfo:
        parts = self._parts[name]
        info = self._tensors.infos[next(iter(parts.values()))]
        shape = (
            tuple(reversed(info.shape))
            if self._layouts[name].transposed
            else info.shape
        )
        if None not in parts:
            shape = (len(parts), *shape)
        return TensorInfo(info.dtype, shape, info.num_bytes * len(parts))

    def read(self, name: str) -> Tensor:
        if name in self._extra:
            return self._extra[name]
        layout = self._layouts[name]
        if (cut := self._cut.get(name)) is not None:
            whole = self._tensors.read(cut.name)
            parts_of = split(cut.joined, whole, self._heads, self._settings)
            return layout.write(parts_of[cut.number])
        parts = self._parts[name]
        if None in parts:
            return layout.write(self._tensors.read(parts[None]))
        experts = [
            layout.write(self._tensors.read(parts[expert]))
            for expert in range(len(parts))
        ]
        return torch.stack(experts)


def _tokens(
    source: Opened, model: Checkpoint, described: _Described
) -> tuple[dict[str, Any], tuple[str, ...], tuple[ConversionCheck, ...]]:
    """Return the metadata, notes and checks of the tokenizer, which may be missing."""
    rows = described.tensors.infos["token_embd.weight"].shape[0]
    tokenizer = source.to_run.tokenizer if source.to_run.has_tokenizer else None
    if tokenizer is None:
        return (
            {"tokenizer.ggml.model": "none"},
            ("no tokenizer is written: the model has none",),
            (),
        )
    if source.to_run.translates and source.source.module is None:
        # The tokenizer of source and target, without the frames of either.
        tokenizer = load_tokenizer(source.files.tokenizer_folder)
    if not isinstance(tokenizer, PretrainedTokenizer):
        raise UsageError(f"{source.name}: its tokenizer is none of a language model")
    written = write_tokens(tokenizer, rows, source.to_run.end_ids, source.name)
    return written.metadata, written.notes, (written.check,)


def _type_of(name: str, shape: tuple[int, ...], kind: str) -> str:
    """Return the type that a tensor is stored in."""
    if len(shape) < 2 or name.endswith(_KEPT_WIDE) or kind == "F32":
        return "F32"
    return "F16" if kind == "Q8_0" and shape[-1] % _BLOCK else kind


def _write(
    path: Path, described: _Described, metadata: Mapping[str, Any], kind: str
) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, described.architecture.name, use_temp_file=False)
    for key, value in metadata.items():
        _add(writer, key, value)
    types = {
        name: _type_of(name, info.shape, kind)
        for name, info in described.tensors.infos.items()
    }
    for name, info in described.tensors.infos.items():
        stored = GGMLQuantizationType[types[name]]
        dtype = np.dtype(np.float16 if types[name] == "F16" else np.float32)
        size = _num_bytes(info.shape, types[name])
        if types[name] == "Q8_0":
            # A block has a float16 scale in two bytes, then a byte for each value.
            shape = (*info.shape[:-1], info.shape[-1] // _BLOCK * (_BLOCK + 2))
            writer.add_tensor_info(
                name, shape, np.dtype(np.uint8), size, raw_dtype=stored
            )
        else:
            writer.add_tensor_info(name, info.shape, dtype, size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in described.tensors.infos:
        writer.write_tensor_data(
            _stored_numbers(described.tensors.read(name), types[name], name)
        )
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, bytes(value) if key == CHARSMAP else value)


def _num_bytes(shape: tuple[int, ...], kind: str) -> int:
    count = torch.Size(shape).numel()
    if kind == "Q8_0":
        return count // _BLOCK * (_BLOCK + 2)
    return count * (2 if kind == "F16" else 4)


def _stored_numbers(tensor: Tensor, kind: str, name: str) -> np.ndarray:
    from gguf import GGMLQuantizationType, quantize

    wide = tensor.float().contiguous()
    if kind == "F32":
        found: np.ndarray = wide.numpy()
        return found
    if kind == "F16":
        half = wide.half()
        if not are_finite(half):
            raise DataError(
                f"numbers of {name} do not fit float16: write it in float32"
            )
        return half.numpy()
    return quantize(wide.numpy(), GGMLQuantizationType[kind])


def _check_again(path: Path, described: _Described, kind: str) -> ConversionCheck:
    """Read the file again, and compare every tensor with its source."""
    file = Gguf(LocalBytes(path))
    largest = 0.0
    for name in described.tensors.infos:
        own = described.tensors.read(name).float()
        found = file.read(name).float()
        difference = float((own - found).abs().max()) if own.numel() else 0.0
        largest = max(largest, difference)
        # Q8_0 rounds by up to 1/254 of the largest value of a block.
        allowed = {"F32": 0.0, "F16": 2.0**-11, "Q8_0": 2.0**-7}[
            _type_of(name, own.shape, kind)
        ]
        if not difference <= allowed * max(1e-3, float(own.abs().max())):
            raise DataError(
                f"{path}: {name} is read with a difference of {difference:.3g}: nothing is written"
            )
    return ConversionCheck(f"every tensor is read again from {kind}", True, largest)
