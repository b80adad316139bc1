"""Tiny models of `transformers` in float64 and ours of the same files, for the tests of models that run."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from edited import set_fields, set_tensors
from triptych.core.checkpoints.checkpoint import Checkpoint, open_checkpoint
from triptych.core.checkpoints.family import family_of
from triptych.core.checkpoints.fields import not_understood_of_model
from triptych.core.storage.settings import Settings


class _Wide:
    """`torch`, but that its float32 is float64: models raise some numbers to float32, whatever theirs are."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Everything that `transformers` computes, rotary angles and norms too."""
    before = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        for name, module in [*sys.modules.items()]:
            of_models = name.startswith(("transformers.models.", "transformers.modeling_"))
            if of_models and "torch" in vars(module):
                patch.setattr(module, "torch", _Wide())
        patch.setattr(Tensor, "float", Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def saved(model_class: Any, configure: Callable[[], Any], folder: Path, leave: str = "") -> Any:
    """A model with random numbers everywhere, in float64, saved in a folder.

    Args:
        model_class: of `transformers`.
        configure: makes its configuration.
        folder: for its files.
        leave: parameters with this in their names stay as the class makes them; none if empty.
    """
    with in_float64():
        torch.manual_seed(0)
        model = model_class(configure()).eval()
        with torch.no_grad():  # what begins as 0 or 1 would hide what is done with it
            for name, parameter in model.named_parameters():
                if not leave or leave not in name:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            for name, buffer in model.named_buffers():
                if name.endswith(("final_logits_bias", "layer_scalar", "correction_bias")):
                    buffer.add_(torch.randn_like(buffer))
        model.save_pretrained(folder)
    return model


def has_experts(config: Any) -> bool:
    """Whether a model has mixtures of experts, which must be "eager" in float64."""
    return any(hasattr(config, f"{number}_experts") for number in ("num_local", "n_routed", "num"))


def changed(folder: Path, tensors: dict[str, Any], fields: dict[str, Any] | None = None) -> None:
    """Change a checkpoint; None takes a tensor out."""
    set_tensors(folder, tensors)
    set_fields(folder / "config.json", **(fields or {}))


def opened(folder: Path, **options: Any) -> Checkpoint:
    checkpoint = open_checkpoint(folder, **options)
    assert isinstance(checkpoint, Checkpoint)
    return checkpoint


def fields_not_understood(config: Any) -> list[str]:
    """The fields of a configuration of `transformers` that a family that is run does not understand."""
    family = family_of(config.model_type)
    assert family is not None
    settings = Settings(config.to_dict(), "config.json")
    if "text_config" in settings.record:  # beside it are the parts for pictures and sound
        settings = settings.below("text_config")
    return not_understood_of_model(family, settings)


def apart(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float((one - other).abs().max())
