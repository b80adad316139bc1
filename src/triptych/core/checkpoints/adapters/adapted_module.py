"""Models in memory with unmerged adapters of PEFT."""

import re
from collections.abc import Mapping
from typing import Any, final

from torch import Tensor, nn

from triptych.core.checkpoints.adapters.adapter import Adapter
from triptych.core.storage.tensors import InMemory, of_one
from triptych.errors import DataError

_OF_ADAPTERS = re.compile(r"\.(lora_\w+|modules_to_save)(\.|$)")
_AROUND = re.compile(r"\.(base_layer|original_module)(?=\.)")


@final
class AdapterInMemory:
    """An adapter of a module; its tensors are not copied."""

    folder = None

    def __init__(self, module: Any, name: str) -> None:
        from peft import get_peft_model_state_dict

        record = module.peft_config[name].to_dict()
        tensors = get_peft_model_state_dict(
            module, adapter_name=name, save_embedding_layers=False
        )
        where = f"{type(module).__name__}, adapter {name}"
        self.adapter = Adapter(where, record, of_one(InMemory(where, tensors)))
        self.adapter.require_complete()

    def require_same(self) -> None:
        """Return at once: the base, the module with the adapter's parameters, compares all parameters."""


def has_adapters(module: nn.Module) -> bool:
    return isinstance(getattr(module, "peft_config", None), dict)


def base_of(module: Any) -> Any:
    """Return the model of `transformers` in a model of PEFT."""
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def adapters_of(module: Any) -> list[AdapterInMemory]:
    """Return the active adapters of a module, in their order."""
    parts = [part for part in module.modules() if hasattr(part, "merged_adapters")]
    if any(part.merged_adapters for part in parts):
        raise DataError(
            f"{type(module).__name__}: its adapters are merged, and not removed: take merge_and_unload(), or "
            "unmerge_adapter()"
        )
    if any(part.disable_adapters for part in parts):
        return []
    active = module.active_adapters
    return [
        AdapterInMemory(module, name)
        for name in (active() if callable(active) else active)
    ]


def without_adapters(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a module's base, under their names without adapters."""
    return {
        _AROUND.sub("", name): tensor
        for name, tensor in state.items()
        if not _OF_ADAPTERS.search(name)
    }
