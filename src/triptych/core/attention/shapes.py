"""Construction of modules for their shapes alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


@contextmanager
def shapes_only() -> Iterator[None]:
    """Build modules of this context on the "meta" device, without drawing initial values."""
    with torch.device("meta"), _Undrawn():
        yield


@final
class _Undrawn(TorchFunctionMode):
    """A mode without `nn.init`, for which torch would import its compiler: 800 modules, 70 MB."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", "") == nn.init.__name__:
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)
