"""The products of matrices alone, of reading prompts and of every step: what engines add to."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from benchmarks.workers import generation
from benchmarks.workers.generation import Engine
from benchmarks.workers.protocol import Options, serve
from triptych.core.checkpoints.stored_models import load_language_model
from triptych.running.decoding.linear_maps import Maps


@final
class Products(Engine):
    """Every matrix, packed, once for each token; the output table for the last token alone."""

    def __init__(self, options: Options) -> None:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options["precision"]]
        model = load_language_model(options["checkpoint"], dtype=dtype)
        assert model.head is not None
        self.dtype, packing = dtype, Maps("fp32", dtype, packed=True)
        weights = [p.detach() for b in model.blocks for p in b.parameters() if p.ndim == 2]
        *self.maps, self.table = (
            (packing.linear(weight, None), weight.shape[1])
            for weight in [*weights, model.head.output.weight.detach()]
        )
        self.inputs: dict[tuple[int, int], Tensor] = {}

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """No tokens: empty rows."""
        self._pass(len(prompts) * len(prompts[0]), len(prompts))
        for _ in range(new - 1):
            self._pass(len(prompts), len(prompts))
        return [[] for _ in prompts]

    def _pass(self, tokens: int, last: int) -> None:
        for product, width in self.maps:
            product(self._input(tokens, width))
        product, width = self.table
        product(self._input(last, width))

    def _input(self, tokens: int, width: int) -> Tensor:
        if (tokens, width) not in self.inputs:
            self.inputs[tokens, width] = torch.randn(tokens, width).to(self.dtype)
        return self.inputs[tokens, width]


if __name__ == "__main__":
    serve(lambda options: generation.prepare(options, Products))
