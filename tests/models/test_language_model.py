"""Models of one stack: what they see, what they keep, and what they are made of."""

import pytest
import torch
from tests.tolerances import assert_same

from triptych.core.attention import PositionIds
from triptych.core.models import AttentionConfig, LanguageModel, LanguageModelConfig, PositionsConfig

VOCAB = 23


def make(kind: str = "decoder", **options: object) -> LanguageModel:
    torch.manual_seed(0)
    config = LanguageModelConfig.model_validate(
        {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_ff": 24, "context": 12, **options}
    )
    return LanguageModel.of(config, kind, VOCAB).double().eval()  # type: ignore[arg-type]


def text(length: int = 9) -> torch.Tensor:
    return torch.randint(0, VOCAB, (3, length), generator=torch.Generator().manual_seed(1))


def test_a_decoder_does_not_see_later_tokens_and_an_encoder_does() -> None:
    ids = text()
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] + 1) % VOCAB
    for kind, same in (("decoder", True), ("encoder", False)):
        model = make(kind)
        one, other = model(ids).logits[:, :-1], model(changed).logits[:, :-1]
        assert torch.equal(one, other) == same


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_model_learns_a_text_by_heart(norm: str, gated: bool) -> None:
    model, ids = make(norm=norm, gated=gated, norm_kind="rms", activation="swish").train(), text(12)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        logits = model(ids[:, :-1]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3


def test_without_biases_there_are_none() -> None:
    model = make(bias=False, attention=AttentionConfig(projections="grouped", num_kv_heads=1))
    biases = [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert all("attention" in name for name in biases)


def test_given_positions_choose_the_rows_of_learned_ones() -> None:
    model, ids = make(positions=PositionsConfig(scheme="learned")), text(5)
    moved = model(ids, positions=PositionIds(torch.arange(3, 8), 8)).logits
    assert not torch.allclose(moved, model(ids).logits)
    same = model(ids, positions=PositionIds(torch.arange(5), 5)).logits
    assert_same(same, model(ids).logits, kind="output")
