"""The attention weights that the layers of a model use while it runs."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from triptych.core.attention import LayerOutput
from triptych.core.models import AnyModel
from triptych.core.models.sites import attention_sites


@contextmanager
def attention_maps(model: AnyModel) -> Iterator[dict[str, Tensor]]:
    """By site, the weights of the last call of each layer."""
    found: dict[str, Tensor] = {}

    def ask(layer: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        return given, {**named, "need_weights": True}

    def keep(layer: nn.Module, given: object, output: LayerOutput, *, name: str) -> None:
        assert output.weights is not None
        found[name] = output.weights

    with ExitStack() as stack:
        for site in attention_sites(model):
            before = site.layer.register_forward_pre_hook(ask, with_kwargs=True)
            after = site.layer.register_forward_hook(partial(keep, name=site.name))
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield found
