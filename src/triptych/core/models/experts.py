"""Mixtures of experts: a few of many feed-forward layers for every token."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from triptych.core.models.architecture import (
    EXPERTS_NORMS,
    ExpertsConfig,
    FeedForwardConfig,
)
from triptych.core.models.feed_forward import (
    Dropout,
    FeedForward,
    activation_of,
    combined,
)


class Routing(NamedTuple):
    """The chosen experts of every token."""

    experts: Int[Tensor, "tokens top_k"]  # indices of experts `[tokens, top_k]`
    # weights of the experts; float64 in a float64 model, otherwise float32
    weights: Float[Tensor, "tokens top_k"]


@final
class Router(nn.Module):
    """The router of a mixture of experts; see `ExpertsConfig`. Scores are computed in float32 at least."""

    correction: Tensor | None

    def __init__(self, config: ExpertsConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(
            torch.empty(config.num_experts, d_model).normal_(std=0.02)
        )
        self.bias = (
            nn.Parameter(torch.zeros(config.num_experts))
            if config.router_bias
            else None
        )
        self.register_buffer(
            "correction", torch.zeros(config.num_experts) if config.correction else None
        )
        self.expert_scale = (
            nn.Parameter(torch.ones(config.num_experts)) if config.weighted else None
        )

    def forward(self, x: Float[Tensor, "tokens d_model"]) -> Routing:
        # Scores are computed in float32 at least, under autocast too.
        config = self.config
        precise = torch.float64 if x.dtype == torch.float64 else torch.float32
        bias = None if self.bias is None else self.bias.to(precise)
        with torch.autocast(x.device.type, enabled=False):
            logits = nn.functional.linear(x.to(precise), self.weight.to(precise), bias)
        if config.scores == "sparsemixer":
            experts, weights = _sparse_mixer(logits, config.top_k, config.threshold)
        else:
            scores = (
                logits.softmax(dim=-1)
                if config.scores == "softmax"
                else logits.sigmoid()
            )
            experts = self._allowed(scores).topk(config.top_k, dim=-1).indices
            weights = scores.gather(-1, experts)
        if config.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp(
                min=config.min_sum
            )
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[experts].to(weights.dtype)
        return Routing(
            experts, weights * config.scale if config.scale != 1.0 else weights
        )

    def _allowed(self, scores: Tensor) -> Tensor:
        """Return corrected scores for the choice of experts, −∞ outside the chosen groups."""
        config = self.config
        if self.correction is not None:
            scores = scores + self.correction.to(scores.dtype)
        if config.top_groups == config.groups:
            return scores
        grouped = scores.view(-1, config.groups, config.num_experts // config.groups)
        best = 1 if config.group_score == "best" else min(2, grouped.shape[-1])
        chosen = (
            grouped.topk(best, dim=-1)
            .values.sum(dim=-1)
            .topk(config.top_groups, dim=-1)
            .indices
        )
        others = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=scores.device)
        others = others.scatter(-1, chosen, False)
        return grouped.masked_fill(others[..., None], -torch.inf).flatten(-2)


def _sparse_mixer(
    logits: Tensor, top_k: int, threshold: float
) -> tuple[Tensor, Tensor]:
    """Choose experts one after the other; return them with probabilities among experts near the best."""
    experts = []
    weights = []
    left = logits
    for _ in range(top_k):
        best, expert = left.max(dim=-1, keepdim=True)
        far = (best - logits) / torch.maximum(logits.abs(), best) > threshold
        near = left.masked_fill(far, -torch.inf)
        experts.append(expert)
        weights.append(near.softmax(dim=-1).gather(-1, expert))
        left = left.scatter(-1, expert, -torch.inf)
    return torch.cat(experts, dim=-1), torch.cat(weights, dim=-1)


# Linear maps of all experts in one parameter, `[experts, d_out, d_in]`; a call applies that of one expert.
@final
class StackedLinear(nn.Module):
    def __init__(self, num_experts: int, d_in: int, d_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, d_out, d_in))
        self.bias = nn.Parameter(torch.zeros(num_experts, d_out)) if bias else None
        for weight in self.weight:
            nn.init.xavier_uniform_(weight)

    def forward(
        self, x: Float[Tensor, "tokens d_in"], expert: int
    ) -> Float[Tensor, "tokens d_out"]:
        return nn.functional.linear(
            x, self.weight[expert], None if self.bias is None else self.bias[expert]
        )


@final
class Experts(nn.Module):
    """A mixture of experts; see `ExpertsConfig`. Every chosen expert runs once, on all of its tokens."""

    def __init__(self, config: ExpertsConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        expert = config.expert
        count = config.num_experts
        self.router = Router(config, d_model)
        self.inner = StackedLinear(count, d_model, expert.d_ff, expert.bias)
        self.gate = (
            StackedLinear(count, d_model, expert.d_ff, expert.bias)
            if expert.gated
            else None
        )
        self.outer = StackedLinear(count, expert.d_ff, d_model, expert.out_bias)
        self.shared = (
            None if config.shared is None else FeedForward(config.shared, d_model)
        )
        self.shared_gate = (
            nn.Parameter(torch.zeros(1, d_model)) if config.shared_gate else None
        )
        self.norms = None
        if (eps := config.norm_eps) is not None:
            self.norms = nn.ModuleDict(
                {name: nn.RMSNorm(d_model, eps) for name in EXPERTS_NORMS}
            )
        self.activation = activation_of(expert)
        self.dropout = Dropout(expert.dropout)

    def forward(
        self, x: Float[Tensor, "*rows d_model"]
    ) -> Float[Tensor, "*rows d_model"]:
        tokens = x.reshape(-1, x.shape[-1])
        norms = self.norms
        routed = (
            tokens
            if norms is None
            else norms["router"](tokens) * tokens.shape[-1] ** -0.5
        )
        chosen, weights = self.router(routed)
        # Sort pairs of token and expert by expert, so that the tokens of an expert are one slice.
        order = chosen.flatten().argsort(stable=True)
        rows = order // self.config.top_k
        of_rows = weights.flatten()[order, None].to(x.dtype)
        gathered = (tokens if norms is None else norms["experts"](tokens))[rows]
        if self.config.scale_input:
            gathered = gathered * of_rows
        counts = chosen.flatten().bincount(minlength=self.config.num_experts).tolist()
        parts = torch.split(gathered, counts)
        given = torch.cat(
            [
                self._expert(part, number)
                for number, part in enumerate(parts)
                if len(part)
            ]
        )
        if not self.config.scale_input:
            given = given * of_rows
        total = torch.zeros_like(tokens).index_add(0, rows, given.to(tokens.dtype))
        return self._with_shared(total, tokens).view(x.shape)

    def _with_shared(self, total: Tensor, tokens: Tensor) -> Tensor:
        if self.shared is None:
            return total
        if self.norms is not None:
            shared = self.norms["shared_out"](self.shared(self.norms["shared"](tokens)))
            return self.norms["out"](total) + shared  # type: ignore[no-any-return]
        shared = self.shared(tokens)
        if self.shared_gate is not None:
            shared = (
                shared
                * nn.functional.linear(
                    tokens, self.shared_gate.to(tokens.dtype)
                ).sigmoid()
            )
        return total + shared  # type: ignore[no-any-return]

    def _expert(self, x: Tensor, number: int) -> Tensor:
        if self.gate is None:
            hidden = self.activation(self.inner(x, number))
        else:
            hidden = combined(
                self.config.expert,
                self.activation,
                self.gate(x, number),
                self.inner(x, number),
            )
        return self.outer(self.dropout(hidden) if self.training else hidden, number)  # type: ignore[no-any-return]


def make_feed_forward(
    config: FeedForwardConfig | ExpertsConfig, d_model: int
) -> FeedForward | Experts:
    return (
        Experts(config, d_model)
        if isinstance(config, ExpertsConfig)
        else FeedForward(config, d_model)
    )
