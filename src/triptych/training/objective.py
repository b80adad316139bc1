"""The objective: cross-entropy against smoothed labels.

    loss = Σ_t −(1 − ε) log p(y_t) − (ε / |V|) Σ_v log p(v)

summed over the target tokens, so that the mean over any set of batches is a sum of losses over a
sum of tokens. Source: Szegedy et al. 2016, arXiv 1512.00567, section 7.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

# Rows of logits alive at a time: few enough to stay in a CPU's cache, enough for full-speed products.
_CHUNK_TOKENS = 512


class Loss(NamedTuple):
    """Sums over tokens, in nats.

    Attributes:
        smoothed: what training minimises.
        likelihood: −Σ log p(y), the cross-entropy without smoothing; it carries no gradient.
    """

    smoothed: Float[Tensor, ""]
    likelihood: Float[Tensor, ""]


def reference_loss(
    x: Float[Tensor, "tokens d_model"],
    weight: Float[Tensor, "vocab d_model"],
    targets: Int[Tensor, " tokens"],
    label_smoothing: float,
) -> Loss:
    """The loss as the formula has it, through the whole array of logits: the slow reference."""
    log_p = F.linear(x, weight).log_softmax(dim=-1)
    likelihood = -log_p.gather(1, targets[:, None]).sum()
    uniform = -log_p.mean(dim=-1).sum()
    smoothed = (1 - label_smoothing) * likelihood + label_smoothing * uniform
    return Loss(smoothed, likelihood.detach())


def output_loss(
    x: Float[Tensor, "tokens d_model"],
    weight: Float[Tensor, "vocab d_model"],
    targets: Int[Tensor, " tokens"],
    label_smoothing: float,
) -> Loss:
    """The loss of the decoder's output, without the whole array of logits.

    Output layer, loss and gradient are worked out a few hundred tokens at a time, in one pass, so
    that no `[tokens, vocab]` array is ever made. Under autocast the products run in its dtype, the
    softmax in float32. Differentiable once, with respect to `x` and `weight`.

    Args:
        x: the decoder's output at the positions that count.
        weight: of the output layer.
        targets: token ids, none of them padding.
        label_smoothing: ε, at least 0 and below 1.
    """
    smoothed, likelihood = _OutputLoss.apply(x, weight, targets, label_smoothing)  # type: ignore[no-untyped-call]
    return Loss(smoothed, likelihood)


class _OutputLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            return _forward(ctx, x, weight, targets, epsilon, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        of_x, of_weight = ctx.saved_tensors
        return of_x * gradients[0], of_weight * gradients[0], None, None


def _forward(
    ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    wants_gradient = any(ctx.needs_input_grad[:2])
    narrow_x, narrow_weight = x.to(dtype), weight.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    smoothed = torch.zeros((), dtype=wide, device=x.device)
    likelihood = torch.zeros((), dtype=wide, device=x.device)
    of_x = torch.empty_like(x)
    of_weight = torch.zeros_like(weight, dtype=wide)
    for start in range(0, x.shape[0], _CHUNK_TOKENS):
        rows = slice(start, start + _CHUNK_TOKENS)
        logits = (narrow_x[rows] @ narrow_weight.T).to(wide)
        log_total = logits.logsumexp(dim=-1, keepdim=True)
        chosen = logits.gather(1, targets[rows, None])
        likelihood += (log_total - chosen).sum()
        smoothed += (log_total - (1 - epsilon) * chosen - epsilon * logits.mean(dim=-1, keepdim=True)).sum()
        if wants_gradient:
            # softmax − ε/|V| everywhere − (1 − ε) at the target, in the place of the logits
            change = logits.sub_(log_total).exp_().sub_(epsilon / logits.shape[1])
            change.scatter_add_(1, targets[rows, None], torch.full_like(chosen, epsilon - 1))
            narrow = change.to(dtype)
            of_x[rows] = narrow @ narrow_weight
            of_weight += narrow.T @ narrow_x[rows]
    ctx.mark_non_differentiable(likelihood)
    if wants_gradient:
        ctx.save_for_backward(of_x, of_weight.to(weight.dtype))
    return smoothed, likelihood
