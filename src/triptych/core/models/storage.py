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
from triptych.core.attention.shapes import shapes_only
from triptych.core.models.configuration import LanguageModelConfig, ModelConfig
from triptych.core.models.encoder_decoder import AnyModel, EncoderDecoder
from triptych.core.models.language_model import LanguageModel
from triptych.errors import DataError, first_line
from triptych.files import write_bytes, write_json
from triptych.untrusted import LONGEST_JSON, read_limited, require_regular

_FORMAT = 1
_ENCODER_DECODER = "encoder-decoder"
_WEIGHTS = "model.safetensors"
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


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights by their names in files, tied weights once."""
    return {name: value.detach().contiguous() for name, value in stored_parameters(model).items()}


def write_config(model: AnyModel, folder: Path) -> None:
    # Encoder-decoders and language models have different keys in this version of the format.
    record: dict[str, Any] = {"format": _FORMAT}
    match model:
        case EncoderDecoder():
            record |= {
                "architecture": _ENCODER_DECODER,
                "src_vocab_size": model.src_vocab_size,
                "tgt_vocab_size": model.tgt_vocab_size,
                "pad_id": model.pad_id,
            }
        case LanguageModel():
            kind = model.architecture.kind
            record |= {"model_type": "triptych", "kind": kind, "vocab_size": model.vocab_size}
    if model.config is None:
        raise ValueError("the model is of another library's checkpoint: no recipe describes it")
    config = model.config.model_dump()
    table = next(iter(model.stacks.values())).embeddings.table.weight
    record |= {"dtype": str(table.dtype).removeprefix("torch."), "model": config}
    if code := user_code.file_digests(config):
        record["code"] = code
    write_json(folder / "config.json", record)


def write_weights(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write named tensors as safetensors, atomically."""
    write_bytes(path, save({name: tensor.cpu() for name, tensor in tensors.items()}, {"format": "pt"}))


def write_model(model: AnyModel, folder: Path) -> None:
    write_config(model, folder)
    write_weights(model_tensors(model), folder / _WEIGHTS)


def read_config(folder: Path, held: Mapping[str, Sequence[int]] | None = None) -> AnyModel:
    """Build a model from a folder's `config.json`, in its dtype (float32 by default), with fresh weights."""
    path = folder / "config.json"
    try:
        record = json.loads(read_limited(path, LONGEST_JSON))
        if record["format"] != _FORMAT:
            raise DataError(
                f"{path} has format {record['format']}, this triptych reads {_FORMAT}: "
                "use the release that wrote it"
            )
        # Check digests before user files are executed.
        code = record.get("code", {})
        if unknown := user_code.named_files(record["model"]) - code.keys():
            raise DataError(f"{path} names a class in {sorted(unknown)[0]} without the SHA-256 of that file")
        user_code.require_digests(code)
        dtype = record.get("dtype", "float32")
        if dtype not in _DTYPES:
            raise DataError(f"{path}: dtype is {dtype!r}: known are {', '.join(_DTYPES)}")
        return _made(record, held, path).to(_DTYPES[dtype])
    except FileNotFoundError:
        raise DataError(f"{folder} holds no config.json: give the folder of a finished run") from None
    except KeyError as error:
        raise DataError(f"{path} is not a triptych configuration: it has no {error}") from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{path} is not a triptych configuration: model.{where}: {first['msg']}") from None
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise DataError(f"{path} is not a triptych configuration: {first_line(error)}") from None


def _made(record: dict[str, Any], held: Mapping[str, Sequence[int]] | None, path: Path) -> AnyModel:
    """Build the model of a configuration, after a check that stored tensors fit it."""

    def size(name: str) -> int:
        value = record[name]
        if not isinstance(value, int) or isinstance(value, bool):
            raise DataError(f"{path}: {name} is {value!r}: a whole number is needed")
        return value

    make: Callable[[], AnyModel]
    kind = record.get("kind", _ENCODER_DECODER)
    if kind == _ENCODER_DECODER:
        src = size("src_vocab_size")
        tgt = size("tgt_vocab_size")
        pad_id = size("pad_id")
        if not (0 <= pad_id < min(src, tgt)):
            raise DataError(f"{path}: pad_id {pad_id} is outside the vocabularies of {src} and {tgt}")
        of_both = ModelConfig.model_validate(record["model"])
        make = partial(EncoderDecoder.of, of_both, src, tgt, pad_id)
        stacks = {"encoder": of_both.encoder.num_layers, "decoder": of_both.decoder.num_layers}
    else:
        vocab_size = size("vocab_size")
        if kind not in ("decoder", "encoder"):
            raise DataError(f"{path}: kind is {kind!r}: known are decoder, encoder, {_ENCODER_DECODER}")
        config = LanguageModelConfig.model_validate(record["model"])
        make = partial(LanguageModel.of, config, kind, vocab_size)
        stacks = {"blocks": config.num_layers}
    if held is None:
        return make()
    # Compare with stored tensors before memory is allocated: a forged file may ask for a huge model.
    for name, layers in stacks.items():
        found = {weight.split(".")[1] for weight in held if weight.startswith(f"{name}.")}
        if layers > len(found):
            of_stack = "" if name == "blocks" else f" of the {name}"
            raise DataError(
                f"{path.parent / _WEIGHTS} does not fit its config.json: {len(found)} layers{of_stack}, "
                f"and there {layers}"
            )
    with shapes_only():
        wanted = stored_parameters(make())
    _require_fit(_shapes(wanted), held, str(path.parent / _WEIGHTS))
    return make()


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, Sequence[int]]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _require_fit(wanted: Mapping[str, Sequence[int]], held: Mapping[str, Sequence[int]], origin: str) -> None:
    """Check that names and shapes of stored tensors equal the names and shapes of a model's tensors."""
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
            raise DataError(f"{origin}: {name} is {list(held[name])}, the model wants {list(shape)}")


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        require_regular(path)
        return load_file(path)
    except FileNotFoundError:
        raise DataError(f"{path} is missing: a run has a model from its first validation on") from None
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} cannot be read as safetensors ({error}): copy or train it again") from None


def load_tensors(
    model: nn.Module,
    tensors: dict[str, torch.Tensor],
    origin: str,
    place: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda parameter, whole: whole,
) -> None:
    """Copy named tensors into a model; names must match exactly."""
    # Check everything first, so that an error leaves the model unchanged.
    parameters = stored_parameters(model)
    _require_fit(_shapes(parameters), _shapes(tensors), origin)
    for name, parameter in parameters.items():
        if parameter.dtype != tensors[name].dtype:
            raise DataError(
                f"{origin}: {name} is {tensors[name].dtype}, the model {parameter.dtype}: "
                "convert the file first; reading does not cast"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(place(parameter, tensors[name]))


def read_model(folder: Path) -> EncoderDecoder:
    """Read a translation model from a folder of `write_model`, in evaluation mode."""
    model = read_own_model(folder)
    if not isinstance(model, EncoderDecoder):
        raise DataError(
            f"{folder} holds a language model, which does not translate: see triptych generate or fill"
        )
    return model


def read_own_model(folder: Path) -> AnyModel:
    """Read a model of either kind from a folder of `write_model`, in evaluation mode."""
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
    load_tensors(model, read_tensors(path), str(path))
    return model.eval()
