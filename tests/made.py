"""What torch makes while some code runs: `with Made() as made: …`."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Made(TorchDispatchMode):
    """The operations that run, and the tensors that they make: no views of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        self.largest = 0  # numbers in the memory of one tensor
        self.largest_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for one in tree_leaves(out):
            if isinstance(one, Tensor) and one.untyped_storage().data_ptr() not in given:
                num_bytes = one.untyped_storage().nbytes()
                self.shapes.append(tuple(one.shape))
                self.largest = max(self.largest, num_bytes // one.element_size())
                self.largest_bytes = max(self.largest_bytes, num_bytes)
        return out
