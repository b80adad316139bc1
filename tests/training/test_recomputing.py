"""Activation checkpointing: a training step keeps less and learns the same."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from training.ranks import language, translation
from triptych.core.models.blocks import recompute_activations
from triptych.training.computing import Whole
from triptych.training.objectives import Objective

KINDS: dict[str, Callable[[], Objective[Any, Any]]] = {
    "encoder-decoder": lambda: translation(dropout=0.2),
    "decoder": lambda: language("decoder", dropout=0.2),
    "encoder": lambda: language("encoder", dropout=0.2, positions="learned"),
}


def learned(kind: str, precision: str, *, recompute: bool) -> tuple[Tensor, dict[str, Tensor], int]:
    """Loss and gradients of two batches, and the bytes that the second forward pass kept."""
    torch.manual_seed(2)
    objective = KINDS[kind]()
    if recompute:
        recompute_activations(objective.model.blocks)
    computing = Whole(objective, precision)
    computing.set_mode(training=True)
    kept = 0

    def note(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    loss = torch.zeros(())
    for step in (1, 2):
        batch = objective.train.collate(np.arange(5 * step))
        kept = 0
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = loss + computing.learn(batch, step, batch.num_target_tokens, last=True)
    named = objective.model.named_parameters()
    return loss, {name: weight.grad for name, weight in named if weight.grad is not None}, kept


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_compute_again_give_the_same_bits_and_keep_less(kind: str, precision: str) -> None:
    """With dropout, whose numbers must be drawn alike the second time."""
    loss, gradients, kept = learned(kind, precision, recompute=False)
    again, found, left = learned(kind, precision, recompute=True)
    assert torch.equal(again, loss)
    assert found.keys() == gradients.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())
    assert left < kept / 2


def test_a_block_that_computes_again_leaves_decoding_and_validation_alone() -> None:
    objective = KINDS["decoder"]()
    model = objective.model
    ids = torch.arange(6)[None]
    expected = model.eval()(ids).logits
    recompute_activations(model.blocks)
    cache = model.new_cache()
    model.train()
    halves = [model(half, cache=cache).logits.shape for half in ids.chunk(2, dim=1)]
    assert cache.length == 6
    assert halves == [(1, 3, 37)] * 2
    assert torch.equal(model.eval()(ids).logits, expected)
