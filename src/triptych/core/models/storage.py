"""Storage of models: `config.json` and `model.safetensors` in one folder."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pydantic
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import nn

from triptych import user_code
from triptych.core.attention.layer import MultiHeadAttention
from triptych.core.attention.projections.composed import AsWritten
from triptych.core.attention.projections.maps import StoredLink
from triptych.core.attention.shapes import shapes_only
from triptych.core.models.configuration import LanguageModelConfig, ModelConfig
from triptych.core.models.encoder_decoder import AnyModel, EncoderDecoder
from triptych.core.models.language_model import LanguageModel
from triptych.core.models.model_records import ModelRecord, describe_model
from triptych.core.storage.tensors import open_tensors
from triptych.errors import DataError, UsageError, first_line
from triptych.files import write_bytes, write_json
from triptych.untrusted import LONGEST_JSON, read_limited, require_regular

# Version 1 has the recipe of the model, version 2 the model as data (`model_records`).
_FORMAT = 2
_READ = (1, 2)
_ENCODER_DECODER = "encoder-decoder"
_WEIGHTS = "model.safetensors"
# Types with a superset of the values of a type.
_WIDER = {
    torch.float16: (torch.float32, torch.float64),
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
}
# Prefixes of parameters in files, for the halves of an encoder-decoder.
_STORED = {
    "encoder.embeddings.table.": "src_embedding.",
    "encoder.embeddings.": "src_",
    "encoder.blocks.": "encoder.",
    "encoder.final_norm.": "encoder_norm.",
    "decoder.embeddings.table.": "tgt_embedding.",
    "decoder.embeddings.": "tgt_",
    "decoder.blocks.": "decoder.",
    "decoder.final_norm.": "decoder_norm.",
    "decoder.head.": "",
}


def stored_name(name: str) -> str:
    """Return the name of a parameter in files."""
    for ours, stored in _STORED.items():
        if name.startswith(ours):
            return stored + name.removeprefix(ours)
    return name


def stored_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by their names in files, tied parameters once."""
    return {stored_name(name): value for name, value in model.named_parameters()}


def _stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and stored buffers, such as the corrections of a router, by their names in files.

    A fixed map of a named parameterisation is left out: it follows from the configuration.
    """
    kept = model.state_dict().keys()
    fixed = set[str]()
    for path, module in model.named_modules():
        if isinstance(module, MultiHeadAttention) and not isinstance(
            module.parameterisation, AsWritten
        ):
            of_links = (
                name
                for name, part in module.named_modules()
                if isinstance(part, StoredLink)
            )
            fixed |= {f"{path}.{name}.weight" for name in of_links}
    buffers = {
        stored_name(n): value
        for n, value in model.named_buffers()
        if n in kept and n not in fixed
    }
    return {**stored_parameters(model), **buffers}


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights by their names in files, tied weights once."""
    return {name: value.detach().contiguous() for name, value in _stored(model).items()}


def write_config(model: AnyModel, folder: Path) -> None:
    """Write a model as data, without its weights."""
    try:
        described = describe_model(model)
    except ValueError as error:
        raise UsageError(
            f"the model cannot be written in triptych's format: {error}"
        ) from None
    is_pair = isinstance(model, EncoderDecoder)
    kind = (
        _ENCODER_DECODER
        if is_pair
        else next(iter(model.stacks.values())).architecture.kind
    )
    table = next(iter(model.stacks.values())).embeddings.table.weight
    record: dict[str, Any] = {
        "format": _FORMAT,
        "model_type": "triptych",
        "kind": kind,
        "dtype": str(table.dtype).removeprefix("torch."),
        "model": described,
    }
    # Parameters frozen in training, such as pretrained word vectors.
    parameters = stored_parameters(model)
    if frozen := [
        name for name, parameter in parameters.items() if not parameter.requires_grad
    ]:
        record["frozen"] = frozen
    if code := user_code.file_digests(described):
        record["code"] = code
    write_json(folder / "config.json", record)


def write_weights(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write named tensors as safetensors, atomically."""
    write_bytes(
        path,
        save(
            {name: tensor.cpu() for name, tensor in tensors.items()}, {"format": "pt"}
        ),
    )


def write_model(model: AnyModel, folder: Path) -> None:
    write_config(model, folder)
    write_weights(model_tensors(model), folder / _WEIGHTS)


def read_config(
    folder: Path, held: Mapping[str, Sequence[int]] | None = None
) -> AnyModel:
    """Build a model from a folder's `config.json`, in its dtype (float32 by default), with fresh weights.

    The stored tensors' shapes are compared with the model before memory is allocated.
    """
    path = folder / "config.json"
    try:
        record = json.loads(read_limited(path, LONGEST_JSON))
        if record["format"] not in _READ:
            raise DataError(
                f"{path} has format {record['format']}, this triptych reads {' and '.join(map(str, _READ))}: "
                "use the release that wrote it"
            )
        # Check digests before user files are executed.
        code = record.get("code", {})
        if unknown := user_code.named_files(record["model"]) - code.keys():
            raise DataError(
                f"{path} names a class in {sorted(unknown)[0]} without the SHA-256 of that file"
            )
        user_code.require_digests(code)
        dtype = record.get("dtype", "float32")
        if dtype not in _DTYPES:
            raise DataError(
                f"{path}: dtype is {dtype!r}: known are {', '.join(_DTYPES)}"
            )
        made = _of_recipe(record, path) if record["format"] == 1 else _of_data(record)
        model = _fitting(*made, held, path).to(_DTYPES[dtype])
        parameters = stored_parameters(model)
        for name in record.get("frozen", ()):
            parameters[name].requires_grad_(False)
        return model
    except FileNotFoundError:
        raise DataError(
            f"{folder} holds no config.json: give the folder of a finished run"
        ) from None
    except KeyError as error:
        raise DataError(
            f"{path} is not a triptych configuration: it has no {error}"
        ) from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(
            f"{path} is not a triptych configuration: model.{where}: {first['msg']}"
        ) from None
    except (
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        IndexError,
        OverflowError,
        RuntimeError,
    ) as error:
        raise DataError(
            f"{path} is not a triptych configuration: {first_line(error)}"
        ) from None


# The constructor of a model, and the number of layers by prefix of their tensors.
_Made = tuple[Callable[[], AnyModel], Mapping[str, int]]


def _of_data(record: dict[str, Any]) -> _Made:
    """Return constructor and numbers of layers from a configuration of version 2."""
    found = ModelRecord.read(record["model"])
    return found.build, found.num_layers


def _of_recipe(record: dict[str, Any], path: Path) -> _Made:
    """Return constructor and numbers of layers from a configuration of version 1."""

    def size(name: str) -> int:
        value = record[name]
        if not isinstance(value, int) or isinstance(value, bool):
            raise DataError(f"{path}: {name} is {value!r}: a whole number is needed")
        return value

    kind = record.get("kind", _ENCODER_DECODER)
    if kind == _ENCODER_DECODER:
        src = size("src_vocab_size")
        tgt = size("tgt_vocab_size")
        pad_id = size("pad_id")
        if not (0 <= pad_id < min(src, tgt)):
            raise DataError(
                f"{path}: pad_id {pad_id} is outside the vocabularies of {src} and {tgt}"
            )
        of_both = ModelConfig.model_validate(record["model"])
        stacks = {
            "encoder": of_both.encoder.num_layers,
            "decoder": of_both.decoder.num_layers,
        }
        return partial(EncoderDecoder.of, of_both, src, tgt, pad_id), stacks
    vocab_size = size("vocab_size")
    if kind not in ("decoder", "encoder"):
        raise DataError(
            f"{path}: kind is {kind!r}: known are decoder, encoder, {_ENCODER_DECODER}"
        )
    config = LanguageModelConfig.model_validate(record["model"])
    return partial(LanguageModel.of, config, kind, vocab_size), {
        "blocks": config.num_layers
    }


def _fitting(
    make: Callable[[], AnyModel],
    num_layers: Mapping[str, int],
    held: Mapping[str, Sequence[int]] | None,
    path: Path,
) -> AnyModel:
    """Build a model, after a check that stored tensors fit it."""
    if held is None:
        return make()
    # Compare with stored tensors before memory is allocated: a forged file may ask for a huge model.
    for name, layers in num_layers.items():
        found = {
            weight.split(".")[1] for weight in held if weight.startswith(f"{name}.")
        }
        if layers > len(found):
            of_stack = "" if name == "blocks" else f" of the {name}"
            raise DataError(
                f"{path.parent / _WEIGHTS} does not fit its config.json: {len(found)} layers{of_stack}, "
                f"and there {layers}"
            )
    with shapes_only():
        wanted = make()
    _require_fit(wanted, held, str(path.parent / _WEIGHTS))
    return make()


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, Sequence[int]]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _require_fit(
    model: nn.Module, held: Mapping[str, Sequence[int]], origin: str
) -> None:
    """Check that names and shapes of stored tensors equal the names and shapes of a model's tensors."""
    wanted = _shapes(_stored(model))
    missing = wanted.keys() - held.keys()
    unknown = held.keys() - wanted.keys()
    if missing or unknown:
        names = ", ".join(sorted(missing | unknown)[:3])
        raise DataError(
            f"{origin} does not fit its config.json: {len(missing)} tensors missing, "
            f"{len(unknown)} unknown ({names}, …)"
        )
    for name, shape in wanted.items():
        if tuple(shape) != tuple(held[name]):
            raise DataError(
                f"{origin}: {name} is {list(held[name])}, the model wants {list(shape)}"
            )


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        require_regular(path)
        return load_file(path)
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing: a run has a model from its first validation on"
        ) from None
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"{path} cannot be read as safetensors ({error}): copy or train it again"
        ) from None


def load_tensors(
    model: nn.Module,
    tensors: dict[str, torch.Tensor],
    origin: str,
    part_of: Callable[
        [torch.Tensor, torch.Tensor], torch.Tensor
    ] = lambda parameter, whole: whole,
    *,
    adopted: bool = False,
) -> None:
    """Copy named tensors into a model, or adopt the tensors; names, shapes and dtypes must match exactly.

    `part_of(parameter, whole)` returns the local shard of a whole tensor for a sharded parameter. `adopted`:
    use the tensors themselves instead of copying their values.
    """
    # Check everything first, so that an error leaves the model unchanged.
    _require_fit(model, _shapes(tensors), origin)
    wanted = _stored(model)
    for name, parameter in wanted.items():
        if parameter.dtype != tensors[name].dtype:
            raise DataError(
                f"{origin}: {name} is {tensors[name].dtype}, the model {parameter.dtype}: "
                "convert the file first; reading does not cast"
            )
    with torch.no_grad():
        for name, parameter in wanted.items():
            own = part_of(parameter, tensors[name])
            if adopted:
                parameter.data = own
            else:
                parameter.copy_(own)


def read_model(folder: Path) -> EncoderDecoder:
    """Read a translation model from a folder of `write_model`, in evaluation mode."""
    model = read_own_model(folder)
    if not isinstance(model, EncoderDecoder):
        raise DataError(
            f"{folder} holds a language model, which does not translate: see triptych generate or fill"
        )
    return model


def read_own_model(folder: Path, *, mapped: bool = False) -> AnyModel:
    """Read a model of either kind from a folder of `write_model`, in evaluation mode.

    `mapped`: map the weights into memory, so that each weight is read at its first use.
    """
    path = folder / _WEIGHTS
    try:
        require_regular(path)
        with safe_open(path, framework="pt") as file:
            held = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError):
        held = None
        if (folder / "config.json").exists():
            read_tensors(path)  # raises with the reason
    model = read_config(folder, held)
    if mapped:
        found = open_tensors(path, mapped=True)
        tensors = {name: found.read(name) for name in found.infos}
    else:
        tensors = read_tensors(path)
    load_tensors(model, _widened(tensors, model), str(path), adopted=mapped)
    return model.eval()


def _widened(
    tensors: dict[str, torch.Tensor], model: nn.Module
) -> dict[str, torch.Tensor]:
    """Return tensors of a narrower type, converted without loss to the type of the model's parameters."""
    wanted = {name: parameter.dtype for name, parameter in _stored(model).items()}
    return {
        name: tensor.to(wanted[name])
        if wanted.get(name) in _WIDER.get(tensor.dtype, ())
        else tensor
        for name, tensor in tensors.items()
    }
