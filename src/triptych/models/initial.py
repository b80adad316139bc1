"""Initial values that depend on a parameter's name and not on what else a model has."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_RANDOM = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, Tensor.normal_, Tensor.uniform_)
_CONSTANT = (nn.init.constant_, Tensor.zero_, Tensor.fill_, Tensor.copy_)


class _Fill(NamedTuple):
    parameter: nn.Parameter
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@final
class Draws(TorchFunctionMode):
    """A context that records how each parameter that is made within it is drawn.

        with Draws() as draws:
            model = ...
        draws.again_by_name(model, seed)

    Two models that are drawn again by one seed have the same values wherever a parameter has the same name,
    shape and distribution in both. Drawn in order, everything after the first difference would differ.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fills: dict[int, _Fill] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        filled = args[0] if args else options.get("tensor")
        if isinstance(filled, nn.Parameter):
            if func in _RANDOM:
                options_left = {k: v for k, v in options.items() if k not in ("tensor", "generator")}
                self._fills[id(filled)] = _Fill(filled, func, args[1:], options_left)
            elif func in _CONSTANT:
                self._fills.pop(id(filled), None)
        return func(*args, **options)

    @torch.no_grad()
    def again_by_name(self, model: nn.Module, seed: int) -> None:
        """Draw each random parameter of `model` again, from `seed` and its name alone."""
        for name, parameter in model.named_parameters():
            fill = self._fills.get(id(parameter))
            if fill is None:
                continue
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            values = torch.empty(parameter.shape, dtype=parameter.dtype)
            fill.function(values, *fill.arguments, generator=generator, **fill.options)
            parameter.copy_(values)
