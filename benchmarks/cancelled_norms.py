"""Effect of leaving out a norm whose readers are normalised again (`flashNorm_cancel` of transformer-tricks).

    python benchmarks/cancelled_norms.py FOLDER --text FILE

Here the gain of the norm before attention is in W_Q, W_K and W_V already. Queries and keys, and in Gemma 4
values, have an RMSNorm for each head, which divides by √(m(y)/r² + ε) for y = W x and r² = m(x) + ε₀.
Without the norm before, it would divide by √(m(y) + ε). Both are equal for all x only if ε = 0.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="a Gemma in the format of transformers")
    parser.add_argument("--text", type=Path, required=True)
    arguments = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    text = arguments.text.read_text(encoding="utf-8")
    ids = torch.tensor([tokenizer(text)["input_ids"][:TOKENS]])
    norms = [name for name, part in model.named_modules() if name.endswith(("q_norm", "k_norm", "v_norm"))]
    print("norms", {name.rpartition(".")[2] for name in norms}, "epsilon", model.config.rms_norm_eps)
    with torch.no_grad():
        before = model(ids).logits[0].double().log_softmax(-1)
        for name, scaled in (("ε", False), ("ε times the mean of r² in each layer", True)):
            handles = [*without_norms(model, scaled=scaled)]
            after = model(ids).logits[0].double().log_softmax(-1)
            for handle in handles:
                handle.remove()
            divergence = (before.exp() * (before - after)).sum(-1)
            print(f"{name}: KL {divergence.mean():.3g} nats, most {divergence.max():.3g}")
        print_sizes(model, ids)


def without_norms(model: Any, *, scaled: bool) -> Any:
    """Make queries and keys of each layer what they are without the norm before them."""
    for layer in model.model.layers:
        factor: dict[str, Tensor] = {}
        norm = layer.input_layernorm

        def keep(_: nn.Module, given: tuple[Tensor, ...], factor: dict[str, Tensor] = factor) -> None:
            factor["r"] = root(given[0], norm_eps(model))

        yield norm.register_forward_pre_hook(keep)
        for own in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            yield own.register_forward_hook(renormalised(factor, own, scaled=scaled))


def renormalised(factor: dict[str, Tensor], norm: Any, *, scaled: bool) -> Callable[..., Tensor]:
    """Return a hook that replaces the output of a norm by that of the unnormalised input."""

    def hook(_: nn.Module, given: tuple[Tensor, ...], __: Tensor) -> Tensor:
        r = factor["r"].unsqueeze(1)
        epsilon = norm.eps * (float(r.square().mean()) if scaled else 1.0)
        y = given[0].float() * r
        gain = 1.0 + norm.weight.float()
        return y * (y.square().mean(-1, keepdim=True) + epsilon).rsqrt() * gain

    return hook


def root(x: Tensor, epsilon: float) -> Tensor:
    return (x.float().square().mean(-1, keepdim=True) + epsilon).sqrt()


def norm_eps(model: Any) -> float:
    return float(model.config.rms_norm_eps)


def print_sizes(model: Any, ids: Tensor) -> None:
    """Print the largest relative change of a query or key in each layer, by ε alone."""
    found: list[tuple[Tensor, Tensor]] = []
    handles = []
    factors: list[Tensor] = []
    epsilon = norm_eps(model)
    for layer in model.model.layers:
        handles.append(
            layer.input_layernorm.register_forward_pre_hook(
                lambda _, given: factors.append(root(given[0], epsilon).squeeze(-1))
            )
        )
        for own in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            handles.append(
                own.register_forward_pre_hook(
                    lambda _, given: found.append((factors[-1], given[0].float().square().mean(-1)))
                )
            )
    model(ids)
    for handle in handles:
        handle.remove()
    changes = []
    for r, square in found:
        # `square` is m(y)/r²; heads come before or after positions.
        squared = r.square().reshape(1, -1)
        own = square if square.shape[-1] == squared.shape[-1] else square.mT
        changes.append(float(((own + epsilon) / (own + epsilon / squared)).sqrt().sub(1).abs().max()))
    roots = torch.cat([r.flatten() for r in factors])
    print(f"r from {roots.min():.3g} to {roots.max():.3g}, median {roots.median():.3g}")
    print(
        f"largest relative change of a query or key: {max(changes):.3g}; median of layers "
        f"{sorted(changes)[len(changes) // 2]:.3g}"
    )


if __name__ == "__main__":
    main()
