"""Two passes over the same tokens, drawn apart by dropout, that should agree.

    loss = ½ (CE(p₁) + CE(p₂)) + (α / 4) Σ_t KL(p₁ ‖ p₂) + KL(p₂ ‖ p₁)

summed over the target tokens, with the cross-entropy against smoothed labels of `losses.py`. What
dropout leaves to chance costs something of its own, which small data sets need: a step takes twice the
time, and many more steps go by before the model knows its text by heart.

Source: Liang et al. 2021, R-Drop, arXiv 2106.14448, equations 1 to 3, all divided by two.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triptych.training.losses import Loss, chunks, computing_dtype, reference_loss


def reference_rdrop_loss(
    first: Float[Tensor, "tokens d_model"],
    second: Float[Tensor, "tokens d_model"],
    weight: Float[Tensor, "vocab d_model"],
    targets: Int[Tensor, " tokens"],
    label_smoothing: float,
    rdrop: float,
) -> Loss:
    """The loss as the formula has it, through whole arrays of logits: the slow reference."""
    log_p, log_q = ((x @ weight.T).log_softmax(dim=-1) for x in (first, second))
    apart = (log_p.exp() * (log_p - log_q)).sum() + (log_q.exp() * (log_q - log_p)).sum()
    one, other = (reference_loss(x, weight, targets, label_smoothing) for x in (first, second))
    smoothed = (one.smoothed + other.smoothed) / 2 + rdrop / 4 * apart
    return Loss(smoothed, (one.likelihood + other.likelihood) / 2)


def rdrop_loss(
    first: Float[Tensor, "tokens d_model"],
    second: Float[Tensor, "tokens d_model"],
    weight: Float[Tensor, "vocab d_model"],
    targets: Int[Tensor, " tokens"],
    label_smoothing: float,
    rdrop: float,
) -> Loss:
    """The same without the whole array of logits: loss and gradient in one pass, a chunk of tokens at a time.

    Products are in the dtype of `first` (under autocast, in its dtype), all else in float32 or wider.
    Differentiable once, with respect to both passes and `weight`.
    """
    dtype = computing_dtype(first)
    with torch.autocast(first.device.type, enabled=False):
        return Loss(
            *_RDropLoss.apply(first, second, weight, targets, label_smoothing, rdrop, dtype)  # type: ignore[no-untyped-call]
        )


class _RDropLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        first: Tensor,
        second: Tensor,
        weight: Tensor,
        targets: Tensor,
        epsilon: float,
        rdrop: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        smoothed, likelihood, of_passes, of_weight = _loss_and_gradients(
            (first.to(dtype), second.to(dtype)), weight.to(dtype), targets, epsilon, rdrop
        )
        ctx.save_for_backward(*(of_x.to(first.dtype) for of_x in of_passes), of_weight.to(weight.dtype))
        ctx.mark_non_differentiable(likelihood)
        return smoothed, likelihood

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (*(saved * gradients[0] for saved in ctx.saved_tensors), None, None, None, None)


def _loss_and_gradients(
    passes: tuple[Tensor, Tensor], weight: Tensor, targets: Tensor, epsilon: float, rdrop: float
) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """Both sums, and the gradients of the smoothed one.

    With a = log p − log q, the sum of the divergences is Σ (p − q) a, and its gradient with respect to
    the logits of p is p (a − Σ p a) + p − q; for q likewise, with −a.
    """
    share = rdrop / 4
    wide = torch.promote_types(weight.dtype, torch.float32)
    smoothed = torch.zeros((), dtype=wide, device=weight.device)
    likelihood = torch.zeros_like(smoothed)
    of_passes = [torch.empty_like(x) for x in passes]
    of_weight = torch.zeros_like(weight, dtype=wide)
    for rows in chunks(passes[0], weight):
        at_target = torch.arange(rows.stop - rows.start, device=weight.device), targets[rows]
        log_p, log_q = ((x[rows] @ weight.T).to(wide).log_softmax(dim=-1) for x in passes)
        p, q, apart = log_p.exp(), log_q.exp(), log_p - log_q
        for one, log_one, other, away, x, of_x in (
            (p, log_p, q, apart, passes[0], of_passes[0]),
            (q, log_q, p, apart.neg(), passes[1], of_passes[1]),
        ):
            chosen, uniform = log_one[at_target].sum(), log_one.mean(dim=-1).sum()
            divergence = (one * away).sum(dim=-1, keepdim=True)
            likelihood -= chosen / 2
            smoothed += share * divergence.sum() - ((1 - epsilon) * chosen + epsilon * uniform) / 2
            gradient = (away - divergence + 1).mul_(share).add_(0.5).mul_(one)
            gradient.sub_(other, alpha=share).sub_(epsilon / 2 / weight.shape[0])
            gradient[at_target] -= (1 - epsilon) / 2
            narrow = gradient.to(weight.dtype)
            torch.mm(narrow, weight, out=of_x[rows])
            of_weight += narrow.T @ x[rows]
    return smoothed, likelihood, of_passes, of_weight
