"""Many processes in one: tensors without values, and a process group that sends nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from triptych.errors import UsageError
from triptych.training.parallel.world import AskingNone

_aten = torch.ops.aten


@final
class Simulated(AskingNone):
    """The first of many processes, where the others are thought."""

    def __init__(self, size: int, num_nodes: int) -> None:
        self.size, self.num_nodes = size, num_nodes


@contextmanager
def simulated_processes(size: int) -> Iterator[None]:
    """A process group of this size inside the block, of which this process is the first."""
    if dist.is_initialized():
        raise UsageError("a plan is made by one process: start it without torchrun")
    if size == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sum_in_place(state: None, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """DDP's sum of gradients; a simulated group returns no tensors, as DDP's own way expects."""
    del state
    dist.all_reduce(bucket.buffer())
    summed: Future[Tensor] = Future()
    summed.set_result(bucket.buffer())
    return summed


@final
class Valueless(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Tensors have shapes and no values; a copy of a tensor stays in the same mode."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Valueless":
        return self


@final
class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what only values could: how many tokens of a batch count, and any single number.

    What has values, such as the ranks of a group of processes, keeps them.
    """

    def __init__(self, num_counted: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_counted = num_counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if not types and "lift" not in func.name() and _has_tensor((args, kwargs)):
            with unset_fake_temporarily():
                return func(*args, **(kwargs or {}))
        if func is _aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        if func is _aten.nonzero.default:
            return args[0].new_empty((self._num_counted, args[0].ndim), dtype=torch.int64)
        if func is _aten.index.Tensor and (mask := _mask(args[1])) is not None:
            return args[0].new_empty((self._num_counted, *args[0].shape[mask.ndim :]))
        if func in _PUT_IN_PLACE and _mask(args[1]) is not None:
            return args[0]
        if func is _aten.index_put.default and _mask(args[1]) is not None:
            return torch.empty_like(args[0])
        return func(*args, **(kwargs or {}))


_PUT_IN_PLACE = {_aten.index_put_.default, _aten._index_put_impl_.default}


def _has_tensor(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(tree))


def _mask(indices: Any) -> Tensor | None:
    """The mask that a tensor is indexed by; None for other indices."""
    first: Tensor | None = indices[0]
    return first if len(indices) == 1 and first is not None and first.dtype is torch.bool else None
