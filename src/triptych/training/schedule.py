"""The learning rate, step by step."""

import math

from triptych.training.sections import OptimisationConfig


def learning_rate(step: int, config: OptimisationConfig, d_model: int) -> float:
    """The rate of update number `step`, counted from 1.

    Linear warm-up to the peak. Then, by the schedule:

    - "inverse_sqrt": `peak · √(warmup_steps / step)`;
    - "linear": a straight line to the minimum at `max_steps`;
    - "cosine": half a cosine to the minimum at `max_steps`;
    - "wsd": the peak, and over the last `decay_share` of `max_steps` a straight line to the minimum.

    With no peak given it is the paper's, `d_model^-0.5 · min(step^-0.5, step · warmup_steps^-1.5)`.

    Source: Vaswani et al. 2017, arXiv 1706.03762, equation 3; cosine: Loshchilov and Hutter 2016, arXiv
    1608.03983, equation 5; warm-up, stable, decay: Hu et al. 2024, arXiv 2404.06395, section 4.
    """
    warmup, last = config.warmup_steps, config.max_steps
    peak: float = config.learning_rate or (d_model * warmup) ** -0.5
    if step <= warmup:
        return peak * step / warmup
    lowest = min(config.min_learning_rate, peak)
    # A run shorter than its warm-up never gets past here; the last update still moves.
    match config.schedule:
        case "linear":
            return lowest + (peak - lowest) * (last - step + 1) / (last - warmup + 1)
        case "cosine":
            done = min((step - warmup) / (last - warmup + 1), 1.0)
            return lowest + (peak - lowest) * (1 + math.cos(math.pi * done)) / 2
        case "wsd":
            falling = max(min(math.ceil(config.decay_share * last), last - warmup), 1)
            left = min(last - step + 1, falling + 1)
            return peak - (peak - lowest) * (1 - left / (falling + 1))
        case "inverse_sqrt":
            return peak * (warmup / step) ** 0.5  # type: ignore[no-any-return]
