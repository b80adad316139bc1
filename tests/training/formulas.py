"""The losses as their formulas have them, through whole arrays of logits: the slow references."""

from torch import Tensor
from torch.nn import functional as F

from triptych.training import Loss


def reference_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    label_smoothing: float,
) -> Loss:
    log_p = F.linear(x, weight).log_softmax(dim=-1)
    likelihood = -log_p.gather(1, targets[:, None]).sum()
    uniform = -log_p.mean(dim=-1).sum()
    smoothed = (1 - label_smoothing) * likelihood + label_smoothing * uniform
    return Loss(smoothed, likelihood.detach())


def reference_rdrop_loss(
    first: Tensor,
    second: Tensor,
    weight: Tensor,
    targets: Tensor,
    label_smoothing: float,
    rdrop: float,
) -> Loss:
    log_p, log_q = ((x @ weight.T).log_softmax(dim=-1) for x in (first, second))
    apart = (log_p.exp() * (log_p - log_q)).sum() + (log_q.exp() * (log_q - log_p)).sum()
    one, other = (reference_loss(x, weight, targets, label_smoothing) for x in (first, second))
    smoothed = (one.smoothed + other.smoothed) / 2 + rdrop / 4 * apart
    return Loss(smoothed, (one.likelihood + other.likelihood) / 2)
