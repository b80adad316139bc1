"""What each part of a training step holds, moves and sends, seen operation by operation."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.distributed._tools.fake_collectives import (
    CollectiveOp,
    functional_collectives,
    non_functional_collectives,
)
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# Those of DDP and FSDP. DTensor has functional ones, for the norms of the gradients: a few numbers.
_COLLECTIVES = non_functional_collectives
# Of what a ring of n devices sends of each byte of the whole tensor, in units of (n − 1) / n.
_RING = {"allgather": 1, "reducescatter": 1, "allreduce": 2, "broadcast": 1}


class Exchange(NamedTuple):
    """Collectives of one kind within one group of processes.

    Attributes:
        kind: "allgather", "reducescatter", "allreduce" or "broadcast".
        group_size: processes that take part.
        num_nodes: machines that they are on.
    """

    kind: str
    group_size: int
    num_nodes: int


@dataclass
class Stretch:
    """A part of a step: a pass through all blocks, a segment for each, or something else of one segment.

    Attributes:
        name: "forward", "backward", "loss", "clip" …
        peaks: most bytes held during each segment, in the order in which they happen.
    """

    name: str
    peaks: list[int] = field(default_factory=list)


@final
class Held(MemTracker):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors, without saying which module they belong to, which takes long."""

    @property
    def num_bytes(self) -> int:
        """Held now, what has no memory ("meta") apart."""
        return sum(of["Total"] for device, of in self._curr_mem_snap.items() if device.type == "cpu")

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None: ...

    def _post_fw_hook(self, module: nn.Module, inputs: Any, outputs: Any) -> None: ...

    def _pre_bw_hook(self, module: nn.Module, args: Any) -> None: ...

    def _post_bw_hook(self, module: nn.Module, args: Any) -> None: ...


@final
class Timeline(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows a step in the order of its operations.

    Attributes:
        stretches: of the step so far.
        held_after_forward: bytes held when the backward pass of the first batch begins.
        moved: bytes that operations other than matrix products and collectives read and write.
        sent: bytes that this process sends, by exchange; as a ring does.
        calls: number of collectives, by exchange.
    """

    def __init__(self, tracker: Held, node_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker, self._node_size = tracker, node_size
        self._live = tracker.num_bytes
        self._mode, self._sees = active_fake_mode(), True
        self.stretches: list[Stretch] = []
        self.held_after_forward: int | None = None
        self.moved = 0
        self.sent: dict[Exchange, int] = {}
        self.calls: dict[Exchange, int] = {}

    def begin(self, name: str) -> None:
        """What follows is a segment of the last stretch if that has the same name, and else of a new one."""
        if not self.stretches or self.stretches[-1].name != name:
            self.stretches.append(Stretch(name))
        self.stretches[-1].peaks.append(self._live)

    @contextmanager
    def not_looking(self) -> Iterator[None]:
        """Nothing is noted inside the block."""
        self._sees = False
        yield
        self._sees = True

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """What is moved and sent inside the block happens so many times in a step."""
        moved, sent, calls = self.moved, dict(self.sent), dict(self.calls)
        yield
        self.moved += (times - 1) * (self.moved - moved)
        for now, before in ((self.sent, sent), (self.calls, calls)):
            for key in now:
                now[key] += (times - 1) * (now[key] - before.get(key, 0))

    @contextmanager
    def of_blocks(self, blocks: list[nn.Module]) -> Iterator[None]:
        """Segments begin where a block does, forwards and backwards, inside the block of code."""

        def before(module: nn.Module, args: Any) -> None:
            del module, args
            if not _in_backward():
                self.begin("forward")

        def after(module: nn.Module, args: Any, output: Any) -> None:
            del args
            if _in_backward():
                return
            if module is blocks[-1]:
                self.begin("loss")
            output[0].register_hook(lambda gradient: self.begin("backward"))

        handles = [block.register_forward_pre_hook(before) for block in blocks]
        handles += [block.register_forward_hook(after) for block in blocks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if self.held_after_forward is None and _in_backward():
            self.held_after_forward = self._live
        result = func(*args, **(kwargs or {}))
        self._live = self._tracker.num_bytes
        if not self._sees:
            return result
        if self.stretches:
            peaks = self.stretches[-1].peaks
            peaks[-1] = max(peaks[-1], self._live)
        if func in _COLLECTIVES:
            self._note_exchange(func, result, args, kwargs or {})
        elif func not in functional_collectives and func.overloadpacket not in flop_registry:
            self.moved += _moved(func, result, args, kwargs or {})
        return result

    def _note_exchange(self, func: Any, result: Any, args: Any, kwargs: dict[str, Any]) -> None:
        kind = next((kind for kind in _RING if kind in func.name().replace("_", "")), None)
        if kind is None:  # waits for one, and sends nothing
            return
        size = CollectiveOp.get_comm_tensor_size(func, result, args, kwargs)
        ranks = dist.get_process_group_ranks(CollectiveOp.get_process_group(func, args))
        exchange = Exchange(kind, len(ranks), len({rank // self._node_size for rank in ranks}))
        sent = _RING[kind] * size * (len(ranks) - 1) // len(ranks)
        self.sent[exchange] = self.sent.get(exchange, 0) + sent
        self.calls[exchange] = self.calls.get(exchange, 0) + 1


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _moved(func: Any, result: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Bytes that an operation reads and writes: its arguments, its results, and once more what it changes."""
    if func.is_view:
        return 0
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    read = _num_bytes(given)
    if "empty" in func.name() or not read:
        return 0
    written = [
        given[argument.name]
        for argument in func._schema.arguments
        if argument.name in given and argument.alias_info is not None and argument.alias_info.is_write
    ]
    return read + _num_bytes(written if written else result)


def _num_bytes(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
