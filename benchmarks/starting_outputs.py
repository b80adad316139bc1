"""Size of outputs before training, relative to `factored`, over 48 independent tokens."""

import torch

from triptych.core.attention import (
    Direct,
    Factored,
    KeyValue,
    Latent,
    MultiHeadAttention,
    Parameterisation,
    Shared,
    Symmetric,
)


def output_size(projections: Parameterisation, d_model: int, heads: int, seed: int, *, cross: bool) -> float:
    """Root mean square output of a layer that was just drawn."""
    torch.manual_seed(seed)
    layer = MultiHeadAttention(d_model, heads, projections)
    x, memory = torch.randn(2, 16, 48, d_model)
    with torch.no_grad():
        return float(layer(x, memory=memory if cross else None).output.pow(2).mean().sqrt())


for cross in (False, True):
    print("cross-attention" if cross else "self-attention")
    for projections in (Symmetric(), Shared(), KeyValue(), Direct(), Latent()):
        ratios = [
            sum(output_size(projections, d, h, seed, cross=cross) for seed in range(20))
            / sum(output_size(Factored(), d, h, seed, cross=cross) for seed in range(20))
            for d, h in ((64, 8), (64, 4), (64, 2), (128, 8))
        ]
        print(f"  {projections.name}: {min(ratios):.2f} to {max(ratios):.2f}")
