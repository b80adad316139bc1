"""Deferred initial values, drawn in order or by the name of a parameter."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from triptych.core.models.storage import stored_name

_RANDOM = (
    nn.init.normal_,
    nn.init.uniform_,
    nn.init.kaiming_uniform_,
    Tensor.normal_,
    Tensor.uniform_,
)
_CONSTANT = (nn.init.constant_, Tensor.zero_, Tensor.fill_, Tensor.copy_)


# Recorded call of `function` to fill a whole parameter.
class _Fill(NamedTuple):
    parameter: nn.Parameter
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @classmethod
    def of(
        cls, function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]
    ) -> "_Fill | None":
        """Record a call to fill a whole parameter; return None for any other call."""
        filled = args[0] if args else options.get("tensor")
        if not isinstance(filled, nn.Parameter) or function not in (
            *_RANDOM,
            *_CONSTANT,
        ):
            return None
        left = {
            name: value
            for name, value in options.items()
            if name not in ("tensor", "generator")
        }
        return cls(filled, function, tuple(args[1:]), left)

    def values(self) -> Tensor:
        """Draw the values from torch's generator."""
        return self._filled({})

    def values_by_name(self, seed: int, name: str) -> Tensor:
        """Draw the values from a seed and the name of the parameter alone."""
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        return self._filled(
            {
                "generator": torch.Generator().manual_seed(
                    int.from_bytes(digest[:8], "big") >> 1
                )
            }
        )

    @torch.no_grad()
    def _filled(self, options: dict[str, Any]) -> Tensor:
        values = torch.empty(self.parameter.shape, dtype=self.parameter.dtype)
        self.function(values, *self.arguments, **self.options, **options)
        return values


@final
class DeferredInit(TorchFunctionMode):
    """A context for building models without memory for parameters, on the "meta" device.

        with DeferredInit() as deferred:
            model = ...
        for name, value in deferred.values(model): ...

    Initialisation is recorded and runs later, one parameter at a time, so that a sharded model never exists
    as a whole in one process. Buffers are created normally.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fills: list[_Fill] = []
        self._held: dict[int, nn.Parameter] = {}
        # Values of parameters at registration. The system does not allocate memory before the first write.
        self._given: dict[int, Tensor] = {}
        self._random = torch.empty(0)

    def __enter__(self) -> "DeferredInit":
        self._random = torch.get_rng_state()
        registered: Callable[..., Any] = self._registered
        self._hook = register_module_parameter_registration_hook(registered)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._hook.remove()
        assert raised[0] is not None or torch.equal(
            torch.get_rng_state(), self._random
        ), "numbers were drawn that no parameter holds"

    # Hook of torch: registers a parameter on "meta" instead of the given parameter, and keeps the given
    # values.
    def _registered(
        self, module: nn.Module, name: str, parameter: nn.Parameter | None
    ) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        held = nn.Parameter(
            torch.empty_like(parameter, device="meta"), parameter.requires_grad
        )
        self._held[id(held)], self._given[id(held)] = held, parameter.detach()
        return held

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Record the fill instead of running it; all further in-place changes of a parameter would be lost.
        options = dict(kwargs or {})
        fill = _Fill.of(func, args, options)
        if fill is None or id(fill.parameter) not in self._held:
            assert not self._is_changed(func, args), (
                f"{func.__name__} cannot be done later"
            )
            return func(*args, **options)
        self._fills.append(fill)
        self._given.pop(id(fill.parameter), None)
        return fill.parameter

    def _is_changed(self, func: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Return True for an in-place change of a deferred parameter, or of a view of it."""
        name = getattr(func, "__name__", "")
        if not name.endswith("_") or name.endswith("__") or name == "requires_grad_":
            return False
        changed = args[0] if args else None
        return isinstance(changed, Tensor) and not {
            id(changed),
            id(changed._base),
        }.isdisjoint(self._held)

    def values(
        self, model: nn.Module, seed_by_name: int | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of each parameter, with the same values as without deferral.

        If `seed_by_name` is given, random values depend on this seed and the parameter's name only.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        return self._drawn(names, seed_by_name)

    def _drawn(
        self, names: dict[int, str], seed_by_name: int | None
    ) -> Iterator[tuple[str, Tensor]]:
        # Only the last fill of a parameter counts; earlier random fills still advance the generator.
        last = {id(fill.parameter): number for number, fill in enumerate(self._fills)}
        yield from (
            (names[held], value) for held, value in self._given.items() if held in names
        )
        torch.set_rng_state(self._random)
        for number, fill in enumerate(self._fills):
            name = (
                names.get(id(fill.parameter))
                if last[id(fill.parameter)] == number
                else None
            )
            if seed_by_name is not None and fill.function in _RANDOM:
                if name is not None:
                    yield name, fill.values_by_name(seed_by_name, stored_name(name))
            elif fill.function in _RANDOM or name is not None:
                value = (
                    fill.values()
                )  # advances the generator even if a later fill overwrites the value
                if name is not None:
                    yield name, value
