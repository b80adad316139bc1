"""Files of `torch.save`: read by torch as plain data (`weights_only`), without the records around weights."""

import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from triptych.core.storage.tensor_file import (
    TensorFile,
    info_of,
    require_printable_name,
)
from triptych.errors import DataError
from triptych.untrusted import require_regular, shown

# Names of the record of weights in a file of training, in order of precedence; averages of weights (EMA) come
# after the weights themselves.
_WEIGHTS = (
    *(
        "state_dict",
        "model_state_dict",
        "model_state",
        "model",
        "module",
        "net",
        "network",
        "weights",
    ),
    *(
        "params",
        "encoder_decoder",
        "ema_state_dict",
        "model_ema",
        "ema_model",
        "params_ema",
        "ema",
    ),
)
# Names of the record of sizes in such a file.
_SIZES = (
    "config",
    "model_config",
    "model_args",
    "hyper_parameters",
    "hparams",
    "args",
    "cfg",
)
# Names of wrappers around modules in names of tensors: `torch.compile`, FSDP, checkpointing of activations.
_WRAPPERS = re.compile(
    r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
)
_DEEPEST = 4


@final
class Pickled(TensorFile):
    """A file of `torch.save` with plain data, memory-mapped if its format allows it.

    Attributes:
        record: sizes of the model, if the file has them next to the weights.
        left_out: names of unread weights, such as averages of the weights.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        found = _load(path)
        self.record = _sizes_in(found)
        weights, self.left_out = _weights_in(found)
        self._tensors = _checked(weights, str(path))
        self.infos = {name: info_of(tensor) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


def _load(path: Path) -> Any:
    try:
        require_regular(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings on pickles refused below
            is_archive = zipfile.is_zipfile(path)
            if is_archive and _is_program(path):
                raise DataError(
                    f"{path}: it is a program of TorchScript, which is not run: save the state_dict() of the "
                    "model that it was made of"
                )
            # Only the newer of torch's two formats, a zip archive, can be mapped.
            return torch.load(
                path, map_location="cpu", weights_only=True, mmap=is_archive
            )
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{path} is missing: fetch it again") from None
    except pickle.UnpicklingError as error:
        raise DataError(
            f"{path}: refused without running it: it contains more than tensors "
            f"({str(error).splitlines()[0][:200]}); get the model as safetensors, or save its state_dict() "
            "alone where it was made"
        ) from None
    # Invalid pickles raise errors of many classes; with `weights_only`, no code of the file is run.
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise DataError(f"{path} cannot be read as weights: {reason}") from error


def _is_program(path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        return any("/code/" in name for name in archive.namelist())


def _weights_in(found: Any) -> tuple[Any, tuple[str, ...]]:
    """Return the record of tensors inside the usual outer records, and the names of unread weights."""
    left_out = list[str]()
    for _ in range(_DEEPEST):
        if not isinstance(found, dict) or any(
            isinstance(held, Tensor) for held in found.values()
        ):
            break
        inside = [
            name
            for name in _WEIGHTS
            if isinstance(found.get(name), dict) and found[name]
        ]
        if not inside:
            break
        left_out += [name for name in inside[1:] if _has_tensors(found[name])]
        found = found[inside[0]]
    return found, tuple(left_out)


def _has_tensors(record: Mapping[Any, Any]) -> bool:
    return any(isinstance(held, Tensor) for held in record.values())


def _sizes_in(found: Any) -> dict[str, Any]:
    """Return the record of sizes next to the weights, or an empty record."""
    if not isinstance(found, dict):
        return {}
    records = (found[name] for name in _SIZES if isinstance(found.get(name), dict))
    return next(
        ({str(key): value for key, value in record.items()} for record in records), {}
    )


def _checked(found: Any, where: str) -> dict[str, Tensor]:
    """Return tensors by their names, without the names of wrappers and without autograd."""
    if not isinstance(found, dict):
        raise DataError(
            f"{where}: it holds a {type(found).__name__} instead of tensors by name"
        )
    checked = dict[str, Tensor]()
    for stored, tensor in found.items():
        if not isinstance(stored, str) or not isinstance(tensor, Tensor):
            raise DataError(
                f"{where}: {shown(stored)} is a {type(tensor).__name__} and no tensor{_within(found)}"
            )
        require_printable_name(stored, where)
        name = without_wrappers(stored)
        held = 0 if tensor.is_meta else tensor.untyped_storage().nbytes()
        if tensor.layout == torch.strided and tensor.nbytes > held:
            raise DataError(
                f"{where}, tensor {name}: it claims more numbers than it holds"
            )
        if tensor.layout != torch.strided or tensor.is_meta:
            raise DataError(
                f"{where}, tensor {name}: its storage is not supported (sparse, or empty)"
            )
        if name in checked:
            raise DataError(
                f"{where}: tensor {name} is there twice, with the name of a wrapper and without"
            )
        # Detach parameters, or autograd would record all computations with them.
        checked[name] = tensor.detach()
    return checked


def without_wrappers(name: str) -> str:
    """Return the name of a tensor without the names of wrappers around its modules."""
    return _WRAPPERS.sub("", name)


def _within(found: Mapping[Any, Any]) -> str:
    """Return advice on weights nested in another record, such as a state of training."""
    for name, held in found.items():
        are_tensors = isinstance(held, dict) and all(
            isinstance(one, Tensor) for one in held.values()
        )
        if are_tensors and held and isinstance(name, str):
            return (
                f"; the weights seem to be under {shown(name)}: save that record alone, "
                f"torch.save(torch.load(FILE, weights_only=True)[{shown(name)!r}], NEW)"
            )
    return ""
