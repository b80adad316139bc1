"""Learning rates, and optimizers: Adam, AdamW with weight decay of matrices only, Muon for matrices."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import final

import torch
from torch import Tensor, nn

from triptych.core.attention import LearnedPositions
from triptych.core.models import AnyModel, stored_parameters
from triptych.training.sections import OptimisationConfig

# State tensors of each optimizer for a parameter, by the prefix of their names in a saved state.
_KEPT = {"adam": ("step", "exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}


@final
class Optimizer:
    """Optimizer of all parameters; combines torch's optimizers for groups of them."""

    def __init__(self, config: OptimisationConfig, model: AnyModel) -> None:
        """Make the optimizers for the parameters of a model."""
        self._named = stored_parameters(model)
        self._parts = list(_torch_optimizers(config, model))
        self._part_of: dict[Tensor, torch.optim.Optimizer] = {}
        for part in self._parts:
            for group in part.param_groups:
                self._part_of |= dict.fromkeys(group["params"], part)

    @property
    def rate(self) -> float:
        """Learning rate of the last step."""
        return float(self._parts[0].param_groups[0]["lr"])

    def zero_grad(self) -> None:
        """Release the gradients."""
        for part in self._parts:
            part.zero_grad()

    def step(self, rate: float) -> None:
        """Update the parameters with this learning rate."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the state tensors with their names, for a saved state."""
        for name, parameter in self._named.items():
            held = self._part_of[parameter].state.get(parameter, {})
            for word, keys in _KEPT.items():
                yield from (
                    (f"{word}.{key}.{name}", held[key]) for key in keys if key in held
                )

    def empty_tensors(self) -> dict[str, Tensor]:
        """Return zeros with the names and layouts of the state tensors after a step."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._named.items():
            if not parameter.requires_grad:
                continue
            word = (
                "muon"
                if isinstance(self._part_of[parameter], torch.optim.Muon)
                else "adam"
            )
            for key in _KEPT[word]:
                empty = (
                    torch.zeros(())
                    if key == "step"
                    else torch.zeros_like(parameter.detach())
                )
                found[f"{word}.{key}.{name}"] = empty
        return found

    def load(
        self,
        tensors: dict[str, Tensor],
        place: Callable[[Tensor, Tensor], Tensor] = lambda parameter, whole: whole,
    ) -> None:
        """Load state tensors by the names of `tensors()`; missing tensors are skipped.

        `place` converts a whole tensor to the layout of a parameter.
        """
        for name, parameter in self._named.items():
            for word, keys in _KEPT.items():
                for key in keys:
                    value = tensors.get(f"{word}.{key}.{name}")
                    if value is None:
                        continue
                    if key != "step" and value.shape != parameter.shape:
                        raise ValueError(f"{word}.{key}.{name}")
                    # The fused optimizer needs its step count on the device too.
                    held = value if key == "step" else place(parameter, value)
                    self._part_of[parameter].state[parameter][key] = held.to(
                        parameter.device
                    )


def _torch_optimizers(
    config: OptimisationConfig, model: nn.Module
) -> Iterator[torch.optim.Optimizer]:
    """Yield torch's optimizers with their parameters of the model."""
    # Adam: Kingma and Ba 2014, arXiv 1412.6980. AdamW: Loshchilov and Hutter 2017, arXiv 1711.05101. Muon:
    # Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; updates as large as AdamW's let one rate
    # and one decay serve both (Liu et al. 2025, arXiv 2502.16982, section 2.2).
    betas = (config.adam_beta1, config.adam_beta2)
    epsilon = config.adam_epsilon
    if config.optimizer == "adam":
        yield torch.optim.Adam(
            model.parameters(), lr=0.0, betas=betas, eps=epsilon, fused=True
        )
        return
    decayed = {*matrices(model)}
    in_muon = {
        weight for weight in decayed if config.optimizer == "muon" and weight.ndim == 2
    }
    if in_muon:
        yield torch.optim.Muon(
            [weight for weight in model.parameters() if weight in in_muon],
            lr=0.0,
            weight_decay=config.weight_decay,
            momentum=config.muon_momentum,
            adjust_lr_fn="match_rms_adamw",
        )
    rest = [weight for weight in model.parameters() if weight not in in_muon]
    groups = [
        {
            "params": [w for w in rest if w in decayed],
            "weight_decay": config.weight_decay,
        },
        {"params": [w for w in rest if w not in decayed], "weight_decay": 0.0},
    ]
    yield torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=0.0,
        betas=betas,
        eps=epsilon,
        fused=True,
    )


def matrices(model: nn.Module) -> Iterable[nn.Parameter]:
    """Return the parameters of two dimensions or more, without tables of embeddings and positions."""
    tables = set[int]()
    for module in model.modules():
        if isinstance(module, nn.Embedding | LearnedPositions):
            tables |= {id(weight) for weight in module.parameters()}
    return [
        weight
        for weight in model.parameters()
        if weight.ndim >= 2 and id(weight) not in tables
    ]


def learning_rate(step: int, config: OptimisationConfig, d_model: int) -> float:
    """Return the learning rate of update number `step`, counted from 1.

    Linear warm-up to the peak. Then, by the schedule:

    - "inverse_sqrt": `peak · √(warmup_steps / step)`;
    - "linear": a straight line to the minimum at `max_steps`;
    - "cosine": half a cosine to the minimum at `max_steps`;
    - "wsd": the peak, and over the last `decay_share` of `max_steps` a straight line to the minimum.

    If `learning_rate` is not set, the peak is the paper's: the rate of "inverse_sqrt" is then
    `d_model^-0.5 · min(step^-0.5, step · warmup_steps^-1.5)`.

    Source: Vaswani et al. 2017, arXiv 1706.03762, equation 3; cosine: Loshchilov and Hutter 2016, arXiv
    1608.03983, equation 5; warm-up, stable, decay: Hu et al. 2024, arXiv 2404.06395, section 4.
    """
    warmup = config.warmup_steps
    last = config.max_steps
    peak: float = config.learning_rate or (d_model * warmup) ** -0.5
    if step <= warmup:
        return peak * step / warmup
    lowest = min(config.min_learning_rate, peak)
    # `last - step + 1` keeps the rate of the last update above the minimum.
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
