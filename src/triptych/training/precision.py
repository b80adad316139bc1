"""Training in bfloat16 with float32 masters.

The model that is trained, saved and judged stays in float32. A twin of it does the computing: its weights are
the masters rounded to bfloat16, once an update instead of once a use as under autocast, and its gradients are
added up in float32. Source: Micikevicius et al. 2018, arXiv 1710.03740, section 3.1.
"""

import copy
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn

from triptych.core.models.embedding import Embeddings
from triptych.core.models.storage import OwnModel


@final
class NarrowTwin:
    """A copy of a model that computes in bfloat16 and follows the model's weights."""

    def __init__(self, model: OwnModel) -> None:
        """Make the twin; `follow` gives it the model's weights."""
        # A frequent token's row gathers hundreds of gradients a batch, which bfloat16 could not add up, and a
        # lookup costs the same in any dtype.
        shared = {
            id(weight): weight for module in _embedding_modules(model) for weight in module.parameters()
        }
        # What deepcopy finds in its memo it takes as it is.
        self.model = copy.deepcopy(model, dict(shared))
        for stack in self.model.stacks.values():
            stack.embeddings.stream_dtype = torch.bfloat16
        self._wide: list[Tensor] = []
        self._narrow: list[Tensor] = []
        for own, master in zip(self.model.parameters(), model.parameters(), strict=True):
            if id(own) not in shared:
                own.data = own.data.bfloat16()
                self._narrow.append(own)
                self._wide.append(master)

    @torch.no_grad()
    def follow(self) -> None:
        torch._foreach_copy_(self._narrow, self._wide)

    @torch.no_grad()
    def hand_over_gradients(self) -> None:
        """Add the twin's gradients to the model's, and forget them."""
        for narrow, wide in zip(self._narrow, self._wide, strict=True):
            if narrow.grad is None:
                continue
            if wide.grad is None:
                wide.grad = narrow.grad.float()
            else:
                wide.grad += narrow.grad
            narrow.grad = None


def _embedding_modules(model: nn.Module) -> Iterator[nn.Module]:
    """What makes the stream of token ids, in float32."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield module
        elif isinstance(module, Embeddings):
            yield from (module.positions, module.norm)
