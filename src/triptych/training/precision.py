"""Training in bfloat16 with float32 masters.

The trained, saved and validated model stays in float32. A twin computes: its weights are the masters rounded
to bfloat16, once per update instead of once per use (autocast), and its gradients are summed in float32.
Source: Micikevicius et al. 2018, arXiv 1710.03740, section 3.1.
"""

import copy
from collections.abc import Iterator
from itertools import chain
from typing import final

import torch
from torch import Tensor, nn

from triptych.core.models import AnyModel, Embeddings


@final
class NarrowTwin:
    """Twin of a model for computing in bfloat16, with weights rounded from the model's."""

    def __init__(self, model: AnyModel) -> None:
        """Make the twin; `follow` copies the model's weights into it."""
        # Embeddings stay shared in float32. A frequent token's row sums hundreds of gradients a batch, too
        # many for bfloat16, and a lookup costs the same in any dtype.
        weights = chain.from_iterable(
            module.parameters() for module in _embedding_modules(model)
        )
        shared = {id(weight): weight for weight in weights}
        # deepcopy does not copy the objects in its memo.
        self.model = copy.deepcopy(model, dict(shared))
        for stack in self.model.stacks.values():
            stack.embeddings.stream_dtype = torch.bfloat16
        self._wide: list[Tensor] = []
        self._narrow: list[Tensor] = []
        for own, master in zip(
            self.model.parameters(), model.parameters(), strict=True
        ):
            if id(own) not in shared:
                own.data = own.data.bfloat16()
                self._narrow.append(own)
                self._wide.append(master)

    @torch.no_grad()
    def follow(self) -> None:
        torch._foreach_copy_(self._narrow, self._wide)

    @torch.no_grad()
    def hand_over_gradients(self) -> None:
        """Add the twin's gradients to the model's, and release them."""
        for narrow, wide in zip(self._narrow, self._wide, strict=True):
            if narrow.grad is None:
                continue
            if wide.grad is None:
                wide.grad = narrow.grad.float()
            else:
                wide.grad += narrow.grad
            narrow.grad = None


def _embedding_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules between token ids and the residual stream; they stay in float32."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield module
        elif isinstance(module, Embeddings):
            yield from (module.positions, module.norm)
