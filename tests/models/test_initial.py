"""Initial values by name: what two models have in common begins alike."""

import pytest
import torch

from triptych.attention import PARAMETERISATIONS
from triptych.models import LanguageModel, LanguageModelConfig
from triptych.models.initial import Draws


def drawn(seed: int, projections: str = "factored", **changes: object) -> dict[str, torch.Tensor]:
    config = LanguageModelConfig.model_validate(
        {
            "num_layers": 2,
            "d_model": 16,
            "num_heads": 4,
            "context": 8,
            "attention": {"projections": projections},
            "positions": {"scheme": "learned", "max_tokens": 8},
            **changes,
        }
    )
    with Draws() as draws:
        model = LanguageModel.of(config, "decoder", 11)
    draws.again_by_name(model, seed)
    return {name: value.detach() for name, value in model.named_parameters()}


def is_constant(value: torch.Tensor) -> bool:
    return bool((value == value.flatten()[0]).all())


@pytest.mark.parametrize("projections", PARAMETERISATIONS)
def test_every_random_parameter_follows_the_seed_and_no_constant_one_does(projections: str) -> None:
    torch.manual_seed(1)
    one = drawn(1, projections)
    torch.manual_seed(2)
    again, other = drawn(1, projections), drawn(2, projections)
    for name, value in one.items():
        assert torch.equal(value, again[name]), name
        assert torch.equal(value, other[name]) == is_constant(value), name


def test_a_model_that_differs_in_one_place_begins_alike_everywhere_else() -> None:
    factored, shared = drawn(1), drawn(1, "shared")
    alike = [
        name for name, value in shared.items() if name in factored and factored[name].shape == value.shape
    ]
    assert any("feed_forward" in name for name in alike)
    assert any("table" in name for name in alike)
    for name in alike:
        # Maps that a parameterisation draws with another variance differ by a factor.
        ratio = factored[name].norm() / shared[name].norm() if factored[name].any() else 1.0
        assert ratio == 1 or "attention" in name, name
        torch.testing.assert_close(factored[name], shared[name] * ratio, msg=name)


def test_values_keep_their_distribution() -> None:
    config = LanguageModelConfig(num_layers=1, d_model=64, num_heads=4, context=8)
    with Draws() as draws:
        model = LanguageModel.of(config, "decoder", 500)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    draws.again_by_name(model, 1)
    for name, value in model.named_parameters():
        assert value.std().item() == pytest.approx(before[name].std().item(), rel=0.06), name
