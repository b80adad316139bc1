"""Modules of which only the shapes are wanted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


@contextmanager
def shapes_only() -> Iterator[None]:
    """A context in which modules are made on the "meta" device, and no initial numbers are drawn."""
    with torch.device("meta"), _Undrawn():
        yield


@final
class _Undrawn(TorchFunctionMode):
    """Fills nothing: on the "meta" device torch would import its compiler for that, 800 modules, 70 MB."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", "") == nn.init.__name__:
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)
