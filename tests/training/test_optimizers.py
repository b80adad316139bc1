"""Which parameter each optimizer changes, how, and what of it a saved state holds."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from triptych.core.models import LanguageModel, LanguageModelConfig
from triptych.training import TrainingConfig
from triptych.training.optimizers import Optimizer
from triptych.training.state import Counters, read_state, write_state

RATE = 0.01


def make_model(seed: int = 0, **config: object) -> LanguageModel:
    torch.manual_seed(seed)
    given = {"num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 24, "context": 8, **config}
    positions = {"scheme": "learned", "max_tokens": 8}
    chosen = LanguageModelConfig.model_validate({"positions": positions, **given})
    return LanguageModel.of(chosen, "decoder", 11)


def config(optimizer: str, weight_decay: float = 0.0) -> TrainingConfig:
    return TrainingConfig.model_validate({"optimizer": optimizer, "weight_decay": weight_decay})


def give_gradients(model: LanguageModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def copies(model: LanguageModel) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_decay_shrinks_matrices_and_spares_biases_norms_and_tables(optimizer: str) -> None:
    model = make_model(tie_embeddings=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    before = copies(model)
    give_gradients(model, 0)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    Optimizer(config(optimizer, 0.5), model).step(RATE)
    shrunk = {name for name, value in copies(model).items() if not torch.equal(value, before[name])}
    maps = {name for name, value in before.items() if value.ndim == 2}
    assert shrunk == maps - {"embeddings.table.weight", "embeddings.positions.weight"}
    assert "head.output.weight" in shrunk
    for name in shrunk:
        torch.testing.assert_close(copies(model)[name], before[name] * (1 - RATE * 0.5))


def test_muon_turns_a_blocks_matrices_by_a_near_orthogonal_matrix_as_large_as_an_update_of_adam() -> None:
    model = make_model()
    before = copies(model)
    give_gradients(model, 1)
    Optimizer(config("muon"), model).step(RATE)
    name = "blocks.0.feed_forward.inner.weight"
    change = copies(model)[name] - before[name]
    values = torch.linalg.svdvals(change)
    assert values.max() < 2 * values.min()
    assert change.square().mean().sqrt().item() == pytest.approx(0.2 * RATE, rel=0.3)
    table = "embeddings.table.weight"
    torch.testing.assert_close((copies(model)[table] - before[table]).abs(), torch.full((11, 16), RATE))


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "muon"])
def test_a_saved_optimizer_goes_on_to_the_last_bit(optimizer: str, tmp_path: Path) -> None:
    def steps(model: LanguageModel, chosen: Optimizer, numbers: range) -> None:
        for number in numbers:
            give_gradients(model, number)
            chosen.step(RATE)

    whole, first, second = make_model(), make_model(), make_model(seed=5)
    steps(whole, Optimizer(config(optimizer), whole), range(5))
    begun = Optimizer(config(optimizer), first)
    steps(first, begun, range(2))
    weights = {f"model.{name}": value for name, value in copies(first).items()}
    write_state(tmp_path, Counters(step=2), {**weights, **dict(begun.tensors())})
    resumed = Optimizer(config(optimizer), second)
    assert read_state(tmp_path, second, resumed).step == 2
    steps(second, resumed, range(2, 5))
    for name, value in copies(second).items():
        assert torch.equal(value, copies(whole)[name]), name
