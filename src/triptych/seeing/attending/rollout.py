"""Attention rollout: shares of the tokens of a text in each token after some layers.

A layer mixes the rows of the stream by `A = (Ā + I) / 2`, with the mean Ā of its heads' weights and the
identity for the residual connection. The rollout after layer l is the product `A_l … A_1`. Maps, norms and
feed-forward layers are left out.

Source: Abnar and Zuidema 2020, arXiv 2005.00928, section 3.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.errors import UsageError
from triptych.running.measuring import StackAttention


def roll_out(
    stack: StackAttention, others: str
) -> Float[Tensor, "layers queries keys"]:
    """Compute the rollout of a stack of self-attention after each layer.

    Rows of weights below a sum of 1 (attention sinks) are divided by their sum. `others` are names of stacks
    of self-attention, for the error about cross-attention.
    """
    if stack.kind == "cross":
        raise UsageError(
            "cross-attention has no rollout: all its layers read one text, so that a product of "
            f"weights means nothing; {others} have one"
        )
    found = list[Tensor]()
    for weights in stack:
        mean = weights.double().mean(dim=0)
        mean = mean / mean.sum(dim=-1, keepdim=True)
        # The identity is the residual connection, with the same weight as attention.
        mixed = (mean + torch.eye(len(mean), dtype=mean.dtype, device=mean.device)) / 2
        found.append(mixed @ found[-1] if found else mixed)
    return torch.stack(found).to(weights.dtype)
