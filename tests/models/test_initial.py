"""Initial values by name: what two models have in common begins alike."""

import pytest
import torch

from triptych.core.attention import PARAMETERISATIONS
from triptych.core.models import PRESETS, EncoderDecoder, LanguageModel, LanguageModelConfig
from triptych.core.models.initial import DeferredInit


def drawn(seed: int, projections: str = "factored", **changes: object) -> dict[str, torch.Tensor]:
    with DeferredInit() as deferred:
        model = language_model(attention={"projections": projections}, **LEARNED, **changes)
    return dict(deferred.values(model, seed))


LEARNED = {"positions": {"scheme": "learned", "max_tokens": 8}}


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
    common = shared.keys() & factored.keys()
    alike = [name for name in common if factored[name].shape == shared[name].shape]
    assert any("feed_forward" in name for name in alike)
    assert any("table" in name for name in alike)
    for name in alike:
        # Maps that a parameterisation draws with another variance differ by a factor.
        ratio = factored[name].norm() / shared[name].norm() if factored[name].any() else 1.0
        assert ratio == 1 or "attention" in name, name
        torch.testing.assert_close(factored[name], shared[name] * ratio, msg=name)


def test_values_keep_their_distribution() -> None:
    config = LanguageModelConfig(num_layers=1, d_model=64, num_heads=4, context=8)
    before = dict(LanguageModel.of(config, "decoder", 500).named_parameters())
    with DeferredInit() as deferred:
        model = LanguageModel.of(config, "decoder", 500)
    for name, value in deferred.values(model, 1):
        assert value.std().item() == pytest.approx(before[name].std().item(), rel=0.06), name


def language_model(**changes: object) -> LanguageModel:
    sizes = {"num_layers": 2, "d_model": 16, "num_heads": 4, "context": 8}
    changes = {"positions": {"scheme": "none"}, **changes}
    return LanguageModel.of(LanguageModelConfig.model_validate({**sizes, **changes}), "decoder", 11)


def translator(tie: str) -> EncoderDecoder:
    sizes = {"d_model": 16, "d_ff": 8, "num_heads": 2, "tie_embeddings": tie}
    return EncoderDecoder.of(PRESETS["tiny"].model_copy(update=sizes), 11, 11)


MADE = {
    **{name: lambda name=name: language_model(attention={"projections": name}) for name in PARAMETERISATIONS},
    "learned positions": lambda: language_model(**LEARNED),
    "QK-norm, gates on heads": lambda: language_model(attention={"qk_norm": True, "output_gate": True}),
    "gated, without ties": lambda: language_model(
        tie_embeddings=False, gated=True, activation="swish", bias=False, norm_kind="rms"
    ),
    **{f"translator, {tie}": lambda tie=tie: translator(tie) for tie in ("all", "target", "none")},
}


@pytest.mark.parametrize("kind", MADE)
def test_values_made_later_are_those_of_a_model_made_at_once(kind: str) -> None:
    torch.manual_seed(3)
    expected = dict(MADE[kind]().named_parameters())
    torch.manual_seed(3)
    with DeferredInit() as deferred:
        model = MADE[kind]()
    torch.manual_seed(4)
    made = dict(deferred.values(model))
    assert made.keys() == expected.keys() == dict(deferred.values(model, 7)).keys()
    assert all(torch.equal(made[name], value) for name, value in expected.items())
    assert all(weight.is_meta for weight in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_numbers_drawn_before_they_are_a_parameter_cannot_be_made_later() -> None:
    with pytest.raises(AssertionError, match="numbers were drawn that no parameter holds"), DeferredInit():
        torch.nn.Parameter(torch.empty(3).normal_())
    layer = torch.nn.Linear(2, 2)
    assert not layer.weight.is_meta, "the context is left"


def test_a_change_that_is_no_fill_of_a_whole_parameter_is_refused() -> None:
    with DeferredInit():
        layer = torch.nn.Linear(2, 2)
        with torch.no_grad(), pytest.raises(AssertionError, match="mul_ cannot be done later"):
            layer.weight.mul_(2)
        with torch.no_grad(), pytest.raises(AssertionError, match="normal_ cannot be done later"):
            layer.weight[0].normal_()
