"""Modules of other libraries in memory: models of `transformers`, and any module with attention."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from triptych.core.checkpoints.adapters.adapted_module import without_adapters
from triptych.core.checkpoints.written_files import WrittenFiles, tokenizer_files
from triptych.core.storage.pickled import without_wrappers
from triptych.core.storage.tensors import InMemory, Tensors, of_one, open_tensors
from triptych.errors import DataError
from triptych.files import write_json


@final
class ModuleOfTransformers(WrittenFiles):
    """A model of `transformers` in memory; its weights are written to files only when a path is needed.

    Adapters of PEFT in it are left out.
    """

    is_in_memory = True

    def __init__(self, module: Any, tokenizer: Path | None) -> None:
        self._module, self._version = module, _version_of(module)
        self.has_tokenizer = tokenizer is not None
        self._tokenizer = tokenizer

    def write_beside(self, folder: Path) -> None:
        parts = [self._module.config, getattr(self._module, "generation_config", None)]
        if self._tokenizer is not None:
            from transformers import AutoTokenizer

            parts.append(
                AutoTokenizer.from_pretrained(
                    str(self._tokenizer), local_files_only=True
                )
            )
        for part in parts:
            if part is not None:
                part.save_pretrained(folder)

    def require_same(self) -> None:
        """Check that the parameters were not written to since the model was opened."""
        if _version_of(self._module) != self._version:
            raise DataError(
                f"the parameters of {type(self._module).__name__} were changed after it was opened: load it "
                "again"
            )

    def tensors(self, *, mapped: bool = False) -> Tensors:
        """Return the parameters under the names of their files, without copying."""
        try:
            from transformers.core_model_loading import revert_weight_conversion
            from transformers.modeling_utils import remove_tied_weights_from_state_dict
        except (
            ImportError
        ):  # another version of `transformers`: take the names from written files
            return open_tensors(self.fetch(), mapped=mapped)
        module = self._module
        found = remove_tied_weights_from_state_dict(
            without_adapters(module.state_dict()), module
        )
        left_out = set(getattr(module, "_keys_to_ignore_on_save", None) or ())
        found = {name: tensor for name, tensor in found.items() if name not in left_out}
        return of_one(
            InMemory(type(module).__name__, revert_weight_conversion(module, found))
        )

    def fetch(self) -> Path:
        """Write the model in the format of `transformers`, once; return the folder."""
        if not any(self.folder.glob("*.safetensors")):
            try:
                self._module.save_pretrained(self.folder)
            except (OSError, ValueError, RuntimeError, NotImplementedError) as error:
                raise DataError(
                    f"{type(self._module).__name__}: transformers cannot write it: {error}"
                ) from error
        return self.folder


@final
class AnyModule(WrittenFiles):
    """A module in memory, with tensors named by a family file or with layers of `torch.nn`.

    Attributes:
        record: sizes of its layers of `torch.nn`, and the plain values of its `config`.
    """

    is_in_memory = True

    def __init__(self, module: nn.Module, tokenizer: Path | None) -> None:
        self._module = module
        self._version = _version_of(module)
        self._tokenizer = [] if tokenizer is None else tokenizer_files(tokenizer)
        self.has_tokenizer = bool(self._tokenizer)
        self._around, of_torch = _of_torch(module)
        self.record = {**of_torch, **_plain_config(module)}

    def require_same(self) -> None:
        """Check that the parameters were not written to since the module was opened."""
        if _version_of(self._module) != self._version:
            raise DataError(_changed(self._module))

    def tensors(self, *, mapped: bool = False) -> Tensors:
        """Return the parameters and buffers under their names, without copying."""
        self.require_same()
        state = {
            name: tensor
            for name, tensor in self._module.state_dict().items()
            if isinstance(tensor, Tensor)
        }
        found = {
            f"{self._around}{without_wrappers(name)}": tensor
            for name, tensor in state.items()
        }
        return of_one(InMemory(type(self._module).__name__, found))

    def write_beside(self, folder: Path) -> None:
        write_json(folder / "config.json", self.record)
        for path in self._tokenizer:
            (folder / path.name).write_bytes(path.read_bytes())


# Layers of `torch.nn` with attention: whole stacks come first, so that a stack is not read as a single layer.
_STACKS = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def _of_torch(module: nn.Module) -> tuple[str, dict[str, Any]]:
    """Return what comes before the names of a lone layer, and the sizes of a module's layers of `torch.nn`.

    Sizes have the names of the arguments in PyTorch.
    """
    for kinds in (_STACKS, _LAYERS, (nn.MultiheadAttention,)):
        found = [part for part in module.modules() if isinstance(part, kinds)]
        if not found:
            continue
        first = found[0]
        kind = next(kind for kind in kinds if isinstance(first, kind))
        if kind in _STACKS:
            return "", {"model_type": f"torch.nn.{kind.__name__}", **_sizes(first)}
        # Of layers in another module, names and kinds are not known.
        if first is not module:
            return "", {
                name: size
                for name, size in _sizes(first).items()
                if name != "num_layers"
            }
        around = "attention." if kind is nn.MultiheadAttention else "layers.0."
        return around, {"model_type": f"torch.nn.{kind.__name__}", **_sizes(first)}
    return "", {}


def _sizes(module: Any) -> dict[str, Any]:
    """Return the arguments that a stack, a layer or an attention of `torch.nn` was made with."""
    if isinstance(module, nn.MultiheadAttention):
        _require_plain(module)
        return {"d_model": module.embed_dim, "nhead": module.num_heads, "num_layers": 1}
    # All layers of a stack are made with the same arguments.
    if isinstance(module, nn.Transformer):
        return {
            **_sizes(module.encoder),
            "num_encoder_layers": len(module.encoder.layers),
            "num_decoder_layers": len(module.decoder.layers),
        }
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder):
        layers: Any = module.layers
        return {**_sizes(layers[0]), "num_layers": len(layers)}
    return {
        **_sizes(module.self_attn),
        "dim_feedforward": module.linear1.out_features,
        "activation": getattr(
            module.activation, "__name__", type(module.activation).__name__
        ).lower(),
        "norm_first": module.norm_first,
        "layer_norm_eps": module.norm1.eps,
    }


def _require_plain(module: nn.MultiheadAttention) -> None:
    """Check that an attention of `torch.nn` computes all keys and values from its inputs."""
    if module.bias_k is not None or module.add_zero_attn:
        raise DataError(
            "MultiheadAttention: it adds a key and a value of its own (add_bias_kv, add_zero_attn), which is "
            "not supported"
        )
    if module.in_proj_weight is None:
        raise DataError(
            "MultiheadAttention: its keys and values have other widths than its queries (kdim "
            f"{module.kdim}, vdim {module.vdim}), which is not supported"
        )


def _plain_config(module: nn.Module) -> dict[str, Any]:
    """Return the plain values of a module's configuration, whatever it is kept in."""
    # Records, dataclasses and objects with attributes are common.
    for name in ("config", "cfg", "hparams", "args"):
        found = getattr(module, name, None)
        if found is None or isinstance(found, nn.Module):
            continue
        if dataclasses.is_dataclass(found) and not isinstance(found, type):
            found = dataclasses.asdict(found)
        elif not isinstance(found, Mapping):
            found = getattr(found, "__dict__", {})
        return {
            str(key): value
            for key, value in found.items()
            if isinstance(value, bool | int | float | str | list)
        }
    return {}


def _changed(module: nn.Module) -> str:
    return f"the parameters of {type(module).__name__} were changed after it was opened: load it again"


def _version_of(module: nn.Module) -> int:
    """Return the sum of the parameters' version counters, which grows with every write."""
    return sum(parameter._version for parameter in module.parameters())
