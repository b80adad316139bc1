"""The learning rate, step by step."""

from triptych.training.recipe import TrainingConfig


def learning_rate(step: int, config: TrainingConfig, d_model: int) -> float:
    """The rate of update number `step`, counted from 1.

    Linear warm-up to the peak, then `peak · √(warmup_steps / step)` or a straight line to zero at
    `max_steps`. With no peak given it is the paper's,
    `d_model^-0.5 · min(step^-0.5, step · warmup_steps^-1.5)`.

    Source: Vaswani et al. 2017, arXiv 1706.03762, equation 3.
    """
    warmup = config.warmup_steps
    peak = config.learning_rate or (d_model * warmup) ** -0.5
    if step <= warmup:
        return peak * step / warmup
    if config.schedule == "linear":
        # A run shorter than its warm-up never gets here; the last update still moves.
        return peak * (config.max_steps - step + 1) / (config.max_steps - warmup + 1)
    return peak * (warmup / step) ** 0.5  # type: ignore[no-any-return]
