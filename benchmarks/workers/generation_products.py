"""The products of matrices alone, of reading prompts and of every step: what no engine can be faster than."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from benchmarks.workers import generation
from benchmarks.workers.generation import Engine
from benchmarks.workers.protocol import Options, serve
from triptych.checkpoints.models import load_language_model


@final
class Products(Engine):
    """Every matrix of the checkpoint, once for each token; the output table for the last token alone."""

    def __init__(self, options: Options) -> None:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options["precision"]]
        model = load_language_model(options["checkpoint"], dtype=dtype).model
        assert model.head is not None
        self.table = model.head.output.weight.detach()
        self.maps = [p.detach().clone() for b in model.blocks for p in b.parameters() if p.ndim == 2]
        self.inputs: dict[tuple[int, int], Tensor] = {}

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """No tokens: empty rows."""
        self._pass(len(prompts) * len(prompts[0]), len(prompts))
        for _ in range(new - 1):
            self._pass(len(prompts), len(prompts))
        return [[] for _ in prompts]

    def _pass(self, tokens: int, last: int) -> None:
        for weight in self.maps:
            torch.nn.functional.linear(self._input(tokens, weight), weight)
        torch.nn.functional.linear(self._input(last, self.table), self.table)

    def _input(self, tokens: int, weight: Tensor) -> Tensor:
        place = tokens, weight.shape[1]
        if place not in self.inputs:
            self.inputs[place] = torch.randn(place).to(weight.dtype)
        return self.inputs[place]


if __name__ == "__main__":
    serve(lambda options: generation.prepare(options, Products))
