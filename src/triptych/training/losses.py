"""The loss: cross-entropy against smoothed labels.

    loss = Σ_t −(1 − ε) log p(y_t) − (ε / |V|) Σ_v log p(v)

summed over the target tokens, so that the mean over any set of batches is a sum of losses over a
sum of tokens. Source: Szegedy et al. 2016, arXiv 1512.00567, section 7.

R-Drop penalises the divergence of two passes over the same tokens with different dropout masks:

    loss = ½ (CE(p₁) + CE(p₂)) + (α / 4) Σ_t KL(p₁ ‖ p₂) + KL(p₂ ‖ p₁)

It regularises: on small data sets the model overfits many steps later. A step takes twice the time. Source:
Liang et al. 2021, R-Drop, arXiv 2106.14448, equations 1 to 3, all divided by two.

In distillation, cross-entropy against a teacher's probabilities q has the share w of the loss:

    loss = (1 − w) CE(p) − w Σ_t Σ_v q(v) log p(v)

Source: Hinton et al. 2015, arXiv 1503.02531; Kim & Rush 2016, arXiv 1606.07947, equation 4.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from triptych.core.models import LanguageModelHead
from triptych.thresholds import (
    CHUNK_LOGITS,
    CHUNK_LOGITS_ON_GPU,
    MAX_CHUNK_TOKENS,
    MIN_CHUNK_TOKENS,
)
from triptych.training.machine import in_any_order


class Loss(NamedTuple):
    """Sums over tokens, in nats."""

    smoothed: Float[Tensor, ""]  # training minimises this sum
    likelihood: Float[
        Tensor, ""
    ]  # −Σ log p(y), the cross-entropy without smoothing and without a gradient


def output_loss(
    x: Float[Tensor, "tokens d_model"],
    weight: Float[Tensor, "vocab d_model"],
    targets: Int[Tensor, " tokens"],
    label_smoothing: float,
) -> Loss:
    """Compute the loss of the decoder's output in chunks of tokens; differentiable once."""
    dtype = computing_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):

            def compute(
                x: Tensor, weight: Tensor
            ) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
                return _loss_and_gradients(
                    x.to(dtype), weight.to(dtype), targets, label_smoothing
                )

            return Loss(*_WithGradients.apply(compute, x, weight))  # type: ignore[no-untyped-call]
        return Loss(
            *_loss_alone(x.to(dtype), weight.to(dtype), targets, label_smoothing)
        )


def head_loss(
    head: LanguageModelHead,
    x: Float[Tensor, "tokens d_model"],
    targets: Int[Tensor, " tokens"],
    label_smoothing: float = 0.0,
) -> Loss:
    """Compute the loss of a language model's logits without allocating all of them at a time."""
    features, weight = output_factors(head, x)
    if head.config.soft_cap is None:
        return output_loss(features, weight, targets, label_smoothing)
    cap = head.config.soft_cap
    parts = []
    # Checkpointing computes the logits of a chunk again in the backward pass.
    for rows in chunks(features, weight):
        parts.append(
            checkpoint(
                _capped_loss,
                features[rows],
                weight,
                targets[rows],
                label_smoothing,
                cap,
                use_reentrant=False,
            )
        )
    if not parts:
        return output_loss(features, weight, targets, label_smoothing)
    smoothed, likelihood = (
        torch.stack(sums).sum() for sums in zip(*parts, strict=True)
    )
    return Loss(smoothed, likelihood.detach())


def output_factors(
    head: LanguageModelHead, x: Float[Tensor, "tokens d_model"]
) -> tuple[Float[Tensor, "tokens width"], Float[Tensor, "vocab width"]]:
    """Return features and a weight with the logits as their product, scale and bias included."""
    features = head.features(x)
    weight = head.output.weight
    if head.config.scale != 1.0:
        features = features * head.config.scale
    if head.output.bias is not None:
        # The bias becomes one more column of the weight.
        scaled = torch.full_like(features[:, :1], head.config.scale)
        features = torch.cat([features, scaled], dim=1)
        weight = torch.cat([weight, head.output.bias[:, None]], dim=1)
    return features, weight


def _capped_loss(
    x: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float, cap: float
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    log_p = (cap * torch.tanh(F.linear(x, weight).to(wide) / cap)).log_softmax(dim=-1)
    likelihood = -log_p.gather(1, targets[:, None]).sum()
    smoothed = (1 - label_smoothing) * likelihood - label_smoothing * log_p.mean(
        dim=-1
    ).sum()
    return smoothed, likelihood


def computing_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype for products of `x`: autocast's if enabled, else `x.dtype`."""
    device = x.device.type
    return (
        torch.get_autocast_dtype(device)
        if torch.is_autocast_enabled(device)
        else x.dtype
    )


class _WithGradients(torch.autograd.Function):
    """Loss of which `compute` returns both sums and the gradients of its tensors in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[..., tuple[Tensor, Tensor, Sequence[Tensor]]],
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        smoothed, likelihood, gradients = compute(*tensors)
        ctx.save_for_backward(
            *(of.to(x.dtype) for of, x in zip(gradients, tensors, strict=True))
        )
        ctx.mark_non_differentiable(likelihood)
        return smoothed, likelihood

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(saved * gradients[0] for saved in ctx.saved_tensors))


def _loss_alone(
    x: Tensor, weight: Tensor, targets: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    smoothed = torch.zeros((), dtype=wide, device=x.device)
    likelihood = torch.zeros_like(smoothed)
    for rows in chunks(x, weight):
        logits = (x[rows] @ weight.T).to(wide)
        log_total = logits.logsumexp(dim=-1, keepdim=True)
        chosen = logits.gather(1, targets[rows, None])
        likelihood += (log_total - chosen).sum()
        smoothed += (
            log_total
            - (1 - epsilon) * chosen
            - epsilon * logits.mean(dim=-1, keepdim=True)
        ).sum()
    return smoothed, likelihood


def _loss_and_gradients(
    x: Tensor, weight: Tensor, targets: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """Return both sums of the loss, and the gradients of the smoothed sum.

    With p = softmax(logits), the gradient of the logits is p − (1 − ε) at the target − ε / |V|
    everywhere. The uniform term ε / |V| reaches `x` and `weight` as one vector per tensor, so that only
    the three matrix products pass over the array of p.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    share = epsilon / weight.shape[0]
    total_weight = weight.sum(dim=0, dtype=wide)
    of_x = torch.empty_like(x)
    of_weight = torch.zeros_like(weight, dtype=wide)
    top, top_p, chosen = (x.new_empty((len(x), 1)) for _ in range(3))
    pieces = chunks(x, weight)
    # All chunks share this memory: fresh pages would cost as much as the softmax.
    size = pieces[0].stop if pieces else 0, weight.shape[0]
    logits_space = x.new_empty(size)
    p_space = x.new_empty(size)
    for rows in pieces:
        num_rows = rows.stop - rows.start
        logits = torch.mm(x[rows], weight.T, out=logits_space[:num_rows])
        p = torch.softmax(logits, dim=-1, out=p_space[:num_rows])
        torch.amax(logits, dim=-1, keepdim=True, out=top[rows])
        torch.amax(p, dim=-1, keepdim=True, out=top_p[rows])
        torch.gather(logits, 1, targets[rows, None], out=chosen[rows])
        # scatter_add_ would copy all of p in bfloat16.
        with in_any_order():  # a row has one target
            p[torch.arange(len(p), device=p.device), targets[rows]] -= 1 - epsilon
        torch.mm(p, weight, out=of_x[rows])
        if of_weight.dtype == p.dtype:
            of_weight.addmm_(p.T, x[rows])
        else:
            of_weight += p.T @ x[rows]
    # The largest logit and its probability give log Σ exp without another pass of exponentials. In bfloat16
    # log Σ exp has the rounding error of the probability, about 0.002 nats a token, unbiased.
    log_total = top.to(wide) - top_p.to(wide).log()
    chosen = chosen.to(wide)
    likelihood = (log_total - chosen).sum()
    smoothed = (log_total - (1 - epsilon) * chosen).sum()
    total_x = x.sum(dim=0, dtype=wide)
    smoothed -= share * (total_x @ total_weight)
    of_x -= (share * total_weight).to(x.dtype)
    of_weight -= share * total_x
    return smoothed, likelihood, (of_x, of_weight)


def chunk_tokens(vocab_size: int, *, on_cpu: bool = True) -> int:
    """Return the number of rows of logits in memory at a time."""
    if on_cpu:
        return min(max(CHUNK_LOGITS // vocab_size, MIN_CHUNK_TOKENS), MAX_CHUNK_TOKENS)
    return max(CHUNK_LOGITS_ON_GPU // vocab_size, MIN_CHUNK_TOKENS)


def chunks(x: Tensor, weight: Tensor) -> list[slice]:
    """Split the rows of `x` into chunks; the logits of one chunk are in memory at a time."""
    tokens = chunk_tokens(weight.shape[0], on_cpu=x.is_cpu)
    total = x.shape[0]
    return [
        slice(start, min(start + tokens, total)) for start in range(0, total, tokens)
    ]


def teacher_loss(
    x: Float[Tensor, "tokens d_model"],
    weight: Float[Tensor, "vocab d_model"],
    targets: Int[Tensor, " tokens"],
    label_smoothing: float,
    teacher: Callable[[slice], Float[Tensor, "rows vocab"]],
    share: float,
) -> Loss:
    """Compute the loss with a teacher in chunks of tokens; differentiable once.

    `teacher` returns the teacher's logits for a range of tokens; `share` is w.
    """
    dtype = computing_dtype(x)

    def compute(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        return _of_teacher_and_gradients(
            x.to(dtype), weight.to(dtype), targets, label_smoothing, teacher, share
        )

    with torch.autocast(x.device.type, enabled=False):
        return Loss(*_WithGradients.apply(compute, x, weight))  # type: ignore[no-untyped-call]


def _of_teacher_and_gradients(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    epsilon: float,
    teacher: Callable[[slice], Tensor],
    share: float,
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """Return both sums of the loss, and the gradients of the smoothed sum.

    The gradient of the logits is p minus the mixture of the teacher's probabilities and the smoothed label.
    """
    # Sums and the gradient of the weight are accumulated in float32.
    wide = torch.promote_types(x.dtype, torch.float32)
    smoothed = torch.zeros((), dtype=wide, device=x.device)
    likelihood = torch.zeros_like(smoothed)
    of_x = torch.empty_like(x)
    of_weight = torch.zeros_like(weight, dtype=wide)
    for rows in chunks(x, weight):
        log_p = (x[rows] @ weight.T).to(wide).log_softmax(dim=-1)
        at_target = torch.arange(len(log_p), device=x.device), targets[rows]
        wanted = teacher(rows).to(wide).softmax(dim=-1) * share + (
            1 - share
        ) * epsilon / len(weight)
        with in_any_order():
            wanted[at_target] += (1 - share) * (1 - epsilon)
        likelihood -= log_p[at_target].sum()
        smoothed -= (wanted * log_p).sum()
        gradient = (log_p.exp() - wanted).to(x.dtype)
        torch.mm(gradient, weight, out=of_x[rows])
        of_weight += gradient.T @ x[rows]
    return smoothed, likelihood, (of_x, of_weight)


def rdrop_loss(
    first: Float[Tensor, "tokens d_model"],
    second: Float[Tensor, "tokens d_model"],
    weight: Float[Tensor, "vocab d_model"],
    targets: Int[Tensor, " tokens"],
    label_smoothing: float,
    rdrop: float,
) -> Loss:
    """Compute the R-Drop loss in chunks of tokens; differentiable once."""
    dtype = computing_dtype(first)

    def compute(
        first: Tensor, second: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        passes = first.to(dtype), second.to(dtype)
        return _rdrop_and_gradients(
            passes, weight.to(dtype), targets, label_smoothing, rdrop
        )

    with torch.autocast(first.device.type, enabled=False):
        return Loss(*_WithGradients.apply(compute, first, second, weight))  # type: ignore[no-untyped-call]


def _rdrop_and_gradients(
    passes: tuple[Tensor, Tensor],
    weight: Tensor,
    targets: Tensor,
    epsilon: float,
    rdrop: float,
) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """Return both sums of the loss, and the gradients of the smoothed sum.

    With a = log p − log q, the sum of the divergences is Σ (p − q) a, and its gradient with respect to
    the logits of p is p (a − Σ p a) + p − q. For the logits of q, p and q change roles and a its sign.
    """
    share = rdrop / 4  # α / 4, as in the formula of this module
    wide = torch.promote_types(weight.dtype, torch.float32)
    smoothed = torch.zeros((), dtype=wide, device=weight.device)
    likelihood = torch.zeros_like(smoothed)
    of_passes = [torch.empty_like(x) for x in passes]
    of_weight = torch.zeros_like(weight, dtype=wide)
    for rows in chunks(passes[0], weight):
        at_target = (
            torch.arange(rows.stop - rows.start, device=weight.device),
            targets[rows],
        )
        log_p, log_q = (
            (x[rows] @ weight.T).to(wide).log_softmax(dim=-1) for x in passes
        )
        p = log_p.exp()
        q = log_q.exp()
        apart = log_p - log_q
        for one, log_one, other, away, x, of_x in (
            (p, log_p, q, apart, passes[0], of_passes[0]),
            (q, log_q, p, apart.neg(), passes[1], of_passes[1]),
        ):
            chosen = log_one[at_target].sum()
            uniform = log_one.mean(dim=-1).sum()
            divergence = (one * away).sum(dim=-1, keepdim=True)
            likelihood -= chosen / 2
            smoothed += (
                share * divergence.sum()
                - ((1 - epsilon) * chosen + epsilon * uniform) / 2
            )
            gradient = (away - divergence + 1).mul_(share).add_(0.5).mul_(one)
            gradient.sub_(other, alpha=share).sub_(epsilon / 2 / weight.shape[0])
            with in_any_order():
                gradient[at_target] -= (1 - epsilon) / 2
            narrow = gradient.to(weight.dtype)
            torch.mm(narrow, weight, out=of_x[rows])
            of_weight += narrow.T @ x[rows]
    return smoothed, likelihood, (*of_passes, of_weight)
