"""The model under every way to tell positions apart."""

from typing import Any

import pytest
import torch

from decoding.plain_search import plain_search, search
from tolerances import assert_same
from triptych.core.attention import DecoderCache
from triptych.core.models import DecoderConfig, EncoderConfig, EncoderDecoder, ModelConfig, PositionsConfig
from triptych.running.decoding import Engine, SearchOptions
from triptych.running.text import OutputRules

PAD, BOS, EOS, VOCAB = 0, 1, 2, 20
RULES = OutputRules((BOS,), EOS, (PAD, BOS))
SRC = torch.tensor([[5, 6, 7, 8, 2], [9, 10, 2, PAD, PAD], [11, 2, PAD, PAD, PAD]])
TGT = torch.tensor([[1, 4, 5, 6, 8], [1, 7, 8, 9, 4], [1, 3, 3, 3, 3]])
SCHEMES: dict[str, PositionsConfig] = {
    "none": PositionsConfig(scheme="none"),
    "sinusoidal": PositionsConfig(scheme="sinusoidal"),
    "learned": PositionsConfig(scheme="learned", max_tokens=12),
    "rotary": PositionsConfig(scheme="rotary"),
    "rotary interleaved": PositionsConfig(scheme="rotary", rotary_pairing="interleaved"),
    "rotary partial": PositionsConfig(scheme="rotary", rotary_dim=2),
    "rotary partial interleaved": PositionsConfig(
        scheme="rotary", rotary_dim=2, rotary_pairing="interleaved", rotary_base=50.0
    ),
    "alibi": PositionsConfig(scheme="alibi"),
}


def make_model(scheme: str) -> EncoderDecoder:
    sizes: dict[str, Any] = {"d_model": 16, "d_ff": 24, "num_heads": 4, "max_source_tokens": 11}
    stacks = {"encoder": EncoderConfig(num_layers=2), "decoder": DecoderConfig(num_layers=2)}
    config = ModelConfig(**sizes, **stacks, positions=SCHEMES[scheme])
    return EncoderDecoder.of(config, VOCAB, VOCAB, PAD).double().eval()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_decoding_with_a_cache_is_decoding_without(scheme: str) -> None:
    model = make_model(scheme)
    memory, mask = model.encode(SRC), model.memory_mask(SRC)
    whole = model.decode(TGT, memory, mask)
    for lengths in ([1, 1, 1, 1, 1], [2, 3]):
        cache = DecoderCache(2)
        parts = [model.decode(part, memory, mask, cache) for part in TGT.split(lengths, dim=1)]
        assert_same(torch.cat(parts, dim=1), whole, kind="output")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_later_target_token_never_changes_an_earlier_logit(scheme: str) -> None:
    model = make_model(scheme)
    before = model(SRC, TGT)
    for position in range(1, 5):
        changed = TGT.clone()
        changed[:, position] = 15
        after = model(SRC, changed)
        assert_same(after[:, :position], before[:, :position], kind="output")
        assert (after[:, position] - before[:, position]).abs().max() > 1e-6


@pytest.mark.parametrize("scheme", SCHEMES)
def test_padding_of_the_source_never_changes_the_result(scheme: str) -> None:
    model = make_model(scheme)
    together = model(SRC, TGT)
    for row, length in enumerate([5, 3, 2]):
        alone = model(SRC[row : row + 1, :length], TGT[row : row + 1])
        assert_same(together[row : row + 1], alone, kind="output")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_only_without_positions_does_the_encoder_not_see_the_order(scheme: str) -> None:
    model = make_model(scheme)
    order = torch.tensor([3, 1, 4, 0, 2])
    memory, of_reordered = model.encode(SRC[:1]), model.encode(SRC[:1, order])
    if scheme == "none":
        assert_same(of_reordered, memory[:, order], kind="output")
    else:
        assert (of_reordered - memory[:, order]).abs().max() > 1e-3


@pytest.mark.parametrize("scheme", SCHEMES)
def test_only_learned_positions_are_weights(scheme: str) -> None:
    names = set(make_model(scheme).state_dict())
    halves = ("encoder", "decoder") if scheme == "learned" else ()
    rows = {f"{half}.embeddings.positions.weight" for half in halves}
    assert {name for name in names if "positions" in name} == rows
    assert {name for name in names if "positions" not in name} == set(make_model("none").state_dict())


def test_learned_positions_of_source_and_target_are_different_rows() -> None:
    model = make_model("learned")
    both = [stack.embeddings.positions for stack in model.stacks.values()]
    assert both[0].weight.shape == (12, 16)
    assert not torch.equal(both[0].weight, both[1].weight)
    model(SRC, TGT).sum().backward()
    for positions in both:
        gradient = positions.weight.grad
        assert gradient is not None
        assert gradient[:5].abs().sum(dim=1).min() > 0
        assert not gradient[5:].any()


def test_a_text_longer_than_what_was_learned_is_refused_with_both_numbers() -> None:
    model = make_model("learned")
    assert model.max_target_tokens == 12
    assert model(torch.full((1, 12), 5), torch.full((1, 12), 5)).shape == (1, 12, VOCAB)
    message = "the text needs 13 positions and 12 were learned"
    with pytest.raises(ValueError, match=message):
        model.encode(torch.full((1, 13), 5))
    memory, mask = model.encode(SRC), model.memory_mask(SRC)
    cache = DecoderCache(2)
    model.decode(torch.full((3, 12), 5), memory, mask, cache)
    with pytest.raises(ValueError, match=message):
        model.decode(torch.full((3, 1), 5), memory, mask, cache)


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme != "learned"])
def test_other_positions_do_not_end(scheme: str) -> None:
    model = make_model(scheme)
    assert model.max_target_tokens is None
    # More than the tables that are made at first hold.
    long = torch.randint(3, VOCAB, (1, 300))
    with torch.no_grad():
        assert model(long, long[:, :270]).isfinite().all()


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("beam_size", [1, 3])
def test_a_search_ends_where_the_learned_positions_do(beam_size: int, fixed: bool) -> None:
    model = make_model("learned")
    against_the_end = torch.zeros(VOCAB).double()
    against_the_end[EOS] = -30
    model.head.output.bias = torch.nn.Parameter(against_the_end)
    options = SearchOptions(beam_size=beam_size, max_extra_tokens=50)
    engine = Engine(model, never=(PAD, BOS))
    engine.fixed = fixed
    found = search(engine, SRC, options, RULES)
    # The beginning of the sentence takes the first of twelve positions.
    assert [len(hypotheses[0].ids) for hypotheses in found] == [11, 11, 11]
    plain = plain_search(model, SRC, options, BOS, EOS)
    assert [h[0].ids for h in plain] == [h[0].ids for h in found]
