"""The losses through whole arrays of logits, as torch has them: the slow references."""

from torch import Tensor
from torch.nn import functional as F

from triptych.training import Loss


def reference_loss(x: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float) -> Loss:
    logits = x @ weight.T
    smoothed = F.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction="sum")
    return Loss(smoothed, F.cross_entropy(logits.detach(), targets, reduction="sum"))


def reference_rdrop_loss(
    first: Tensor,
    second: Tensor,
    weight: Tensor,
    targets: Tensor,
    label_smoothing: float,
    rdrop: float,
) -> Loss:
    log_p, log_q = ((x @ weight.T).log_softmax(dim=-1) for x in (first, second))
    pairs = ((log_q, log_p), (log_p, log_q))
    apart = sum(F.kl_div(one, other, log_target=True, reduction="sum") for one, other in pairs)
    one, other = (reference_loss(x, weight, targets, label_smoothing) for x in (first, second))
    smoothed = (one.smoothed + other.smoothed) / 2 + rdrop / 4 * apart
    return Loss(smoothed, (one.likelihood + other.likelihood) / 2)
