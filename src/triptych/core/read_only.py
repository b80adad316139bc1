"""Read-only tensors, for the matrices of a model.

PyTorch does not have a read-only flag. A subclass of `Tensor` intercepts every operation and refuses writes.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, final

import numpy
import torch
from torch import Tensor

from triptych.errors import UsageError

# Operations without writes, in spite of their names.
_HARMLESS = {
    "requires_grad_",
    "__invert__",
    "__index__",
    "__int__",
    "__iter__",
    "__init__",
}


@final
class ReadOnlyTensor(Tensor):
    """A read-only matrix of a model. Views are read-only, too; results with new memory are plain tensors.

    Writing raises a `UsageError`: `model.replace` returns a model with another matrix, and `clone()` a
    writable tensor.
    """

    @classmethod
    def of(cls, value: Tensor) -> "ReadOnlyTensor":
        """Wrap a tensor as read-only, sharing its memory."""
        return value.detach().as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        written = [
            args[0] if args and (_writes(func) or given.get("inplace")) else None,
            given.get("out"),
        ]
        if any(_holds_one(value) for value in written):
            _refuse()
        with torch._C.DisableTorchFunctionSubclass():
            return _as_given(
                func(*args, **given),
                [value for value in args if isinstance(value, cls)],
            )

    def plain(self) -> Tensor:
        """Return a writable tensor with the same memory, for code without writes."""
        with torch._C.DisableTorchFunctionSubclass():
            plain: Tensor = self.as_subclass(Tensor)
        return plain

    def set_(self, *given: Any, **named: Any) -> NoReturn:
        """Refuse to replace the memory: PyTorch does not report this operation to `__torch_function__`."""
        _refuse()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.plain())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = self.plain().clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __dlpack__(self, **options: Any) -> Any:
        return self.plain().clone().__dlpack__(**options)


def _writes(func: Any) -> bool:
    schema = getattr(func, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    name = str(getattr(func, "__name__", ""))
    if name in _HARMLESS:
        return False
    if (
        name == "__set__"
    ):  # setter of a property, such as `data`; setting a gradient is harmless
        return getattr(func, "__self__", None) is not Tensor.grad
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or name.startswith("__i")


def _holds_one(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(_holds_one(one) for one in value)
    return isinstance(value, ReadOnlyTensor)


def _refuse() -> NoReturn:
    raise UsageError(
        "a matrix that is read from a model cannot be written: model.replace(place, W_Q=…) gives a model "
        "with another one, and clone() a copy of your own"
    )


def _as_given(found: Any, read: list[Tensor]) -> Any:
    """Return the result of an operation, read-only where it shares memory with a read-only tensor."""
    if type(found) in (tuple, list):
        return type(found)(_as_given(one, read) for one in found)
    if isinstance(found, numpy.ndarray):
        found.flags.writeable = False
        return found
    if not isinstance(found, Tensor) or isinstance(found, torch.nn.Parameter):
        return found
    own = _memory(found)
    if own and any(own == _memory(one) for one in read):
        return found.as_subclass(ReadOnlyTensor)
    return found.as_subclass(Tensor)


def _memory(tensor: Tensor) -> int:
    """Return the address of the tensor's memory; 0 without memory."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()
