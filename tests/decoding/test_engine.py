"""The engine against the model's own modules: the same outputs from every kind of model."""

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from decoding.plain_search import plain_search, search
from triptych.core.attention.projections import PARAMETERISATIONS
from triptych.core.models import EncoderDecoder, ModelConfig
from triptych.running.decoding import Engine, Hypothesis, SearchOptions
from triptych.running.decoding.engine import GROUP
from triptych.running.decoding.linear_maps import Maps, unsupported_precision
from triptych.running.text import OutputRules

PAD, BOS, EOS = 0, 1, 2
RULES = OutputRules((BOS,), EOS, (PAD, BOS))
SOURCES = [[5, 9, 4, 7], [3], [6, 6, 8, 10, 11, 12, 13, 4], [14, 3, 9], [12, 4], [8, 7, 5, 3, 9, 11]]
OPTIONS: dict[str, dict[str, int]] = {"grouped": {"num_kv_heads": 2}}


def make_model(
    projections: str = "factored",
    *,
    norm: str = "post",
    positions: str = "sinusoidal",
    vocab: int = 90,
    sizes: dict[str, int] | None = None,
    seed: int = 6,
) -> EncoderDecoder:
    """An untrained model in float64 that is sure of itself."""
    torch.manual_seed(seed)
    site = {"projections": projections, **(sizes or OPTIONS.get(projections, {}))}
    cross = {} if positions in ("rotary", "alibi") else site
    tree = {
        **{"d_model": 16, "d_ff": 32, "num_heads": 4, "norm": norm, "tie_embeddings": "target"},
        **{"max_source_tokens": 20, "positions": {"scheme": positions, "max_tokens": 40}},
        "encoder": {"num_layers": 2, "attention": site},
        "decoder": {"num_layers": 2, "attention": site, "cross_attention": cross},
    }
    config = ModelConfig.model_validate(tree)
    model = EncoderDecoder.of(config, 30, vocab, PAD).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.4)
    return model


def pad(sources: list[list[int]]) -> Tensor:
    width = max(map(len, sources)) + 1
    return torch.tensor([[*ids, EOS] + [PAD] * (width - 1 - len(ids)) for ids in sources])


def both(
    model: EncoderDecoder, src: Tensor, options: SearchOptions
) -> tuple[list[list[Hypothesis]], list[list[Hypothesis]]]:
    engine = Engine(model, never=(PAD, BOS))
    return search(engine, src, options, RULES), plain_search(model, src, options, BOS, EOS)


def assert_alike(fast: list[list[Hypothesis]], slow: list[list[Hypothesis]]) -> None:
    assert [[h.ids for h in of_one] for of_one in fast] == [[h.ids for h in of_one] for of_one in slow]
    for of_fast, of_slow in zip(fast, slow, strict=True):
        for one, other in zip(of_fast, of_slow, strict=True):
            # The reference adds up log-probabilities in float32.
            assert one.log_prob == pytest.approx(other.log_prob, rel=1e-5)
            assert one.score == pytest.approx(other.score, rel=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("norm", "beam_size"),
    [
        ("post", 4),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("pre", 1), ("post", 1), ("pre", 4))),
    ],
)
@pytest.mark.parametrize("projections", sorted(PARAMETERISATIONS))
def test_every_parameterisation_is_searched_as_by_its_modules(
    projections: str, norm: str, beam_size: int
) -> None:
    model = make_model(projections, norm=norm)
    options = SearchOptions(beam_size=beam_size, num_best=beam_size, max_extra_tokens=7)
    assert_alike(*both(model, pad(SOURCES), options))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("projections", ["grouped", "factored", "stacked"])
@pytest.mark.parametrize("positions", ["none", "learned", "rotary", "alibi"])
def test_positions_are_where_they_belong(positions: str, projections: str) -> None:
    options = SearchOptions(beam_size=3, max_extra_tokens=25)  # past the first room of the cache
    assert_alike(*both(make_model(projections, positions=positions), pad(SOURCES), options))


@pytest.mark.parametrize("alpha", [0.6, 2.0])
@pytest.mark.parametrize("num_best", [1, 3])
def test_a_search_that_stops_with_a_full_beam_means_the_same(alpha: float, num_best: int) -> None:
    options = SearchOptions(beam_size=3, alpha=alpha, num_best=num_best, max_extra_tokens=9, stop="full")
    assert_alike(*both(make_model(), pad(SOURCES), options))


@pytest.mark.parametrize("vocab", [4, GROUP - 1, GROUP, GROUP + 1])
def test_a_vocabulary_of_any_size_is_searched_whole(vocab: int) -> None:
    options = SearchOptions(beam_size=6, num_best=6, max_extra_tokens=5)
    assert_alike(*both(make_model(vocab=vocab), pad(SOURCES), options))


@pytest.mark.parametrize("sizes", [{"d_k": 2, "d_v": 6}, {"d_k": 6, "d_v": 2}])
def test_rotated_heads_may_be_narrower_than_values_or_wider(sizes: dict[str, int]) -> None:
    options = SearchOptions(beam_size=3, max_extra_tokens=9)
    assert_alike(*both(make_model(positions="rotary", sizes=sizes), pad(SOURCES), options))


@pytest.mark.parametrize(("precision", "close"), [("bf16", 0.15), ("int8", 0.15)])
def test_lower_precision_comes_close(precision: str, close: float) -> None:
    model = make_model().float()
    src = pad(SOURCES)
    exact, rough = (Engine(model, p, never=(PAD, BOS)) for p in ("fp32", precision))
    tokens = torch.full((len(SOURCES),), BOS)
    logits = [engine.step(tokens, engine.start(src, 1)) for engine in (exact, rough)]
    finite = logits[0].isfinite()
    assert torch.equal(finite, logits[1].isfinite())
    error = (logits[0] - logits[1])[finite].norm() / logits[0][finite].norm()
    assert 0 < float(error) < close


def test_a_model_in_float16_reads_sentences_of_unlike_length_as_in_float32() -> None:
    model = make_model().float()
    src, tokens = pad(SOURCES), torch.full((len(SOURCES),), BOS)
    assert bool((src == PAD).any())
    engines = [Engine(own, never=(PAD, BOS)) for own in (model, copy.deepcopy(model).half())]
    expected, found = (engine.step(tokens, engine.start(src, 1)) for engine in engines)
    finite = expected.isfinite()
    assert torch.equal(finite, found.isfinite())
    assert float((expected - found)[finite].norm() / expected[finite].norm()) < 0.01


def test_an_int8_map_of_zeros_is_its_bias_and_rows_of_any_size_keep_their_bits() -> None:
    for width, bias in ((5, torch.randn(40)), (300, torch.randn(40)), (300, None)):
        rows = torch.randn(9, 1, width) * torch.tensor([1, 0, 1e-38, 1e-43, 1e6, 1, 0, 1, 1])[:, None, None]
        layer = Maps("int8", torch.float32).linear(torch.randn(40, width), bias)
        found = layer(rows)
        assert torch.equal(found[1, 0], torch.zeros(40) if bias is None else bias)
        assert found.isfinite().all()
        assert torch.equal(found, torch.cat([layer(row[None]) for row in rows]))


def test_int8_is_for_cpus() -> None:
    assert unsupported_precision("int8", torch.device("cuda")) != ""
    assert unsupported_precision("bf16", torch.device("cuda")) == ""


# Steps that are always the same work, as a GPU replays them


@pytest.mark.sampled(6)
@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize(
    ("projections", "positions"),
    [
        *((name, "sinusoidal") for name in sorted(PARAMETERISATIONS)),
        ("factored", "learned"),
        ("grouped", "rotary"),
        ("grouped", "alibi"),
    ],
)
def test_fixed_steps_find_what_the_modules_find(projections: str, positions: str, beam_size: int) -> None:
    model = make_model(projections, positions=positions)
    # Longer than the room that a cache begins with.
    options = SearchOptions(beam_size=beam_size, num_best=beam_size, max_extra_tokens=25)
    src, engine = pad(SOURCES), Engine(model, never=(PAD, BOS))
    engine.fixed = True
    fixed = search(engine, src, options, RULES)
    assert_alike(fixed, plain_search(model, src, options, BOS, EOS))
    if positions == "sinusoidal":  # the other models end sooner
        assert max(len(h.ids) for of_one in fixed for h in of_one) > 16


def test_fixed_steps_stay_on_their_memory() -> None:
    """What a recording needs: cache, mask and position are the same tensors from step to step."""
    model = make_model("grouped")
    engine = Engine(model, never=(PAD, BOS))
    changing = engine.start(pad(SOURCES), 3)
    engine.fixed = True
    cache = engine.start(pad(SOURCES), 3)
    for each in (cache, changing):
        engine.step(torch.full((len(SOURCES) * 3,), BOS), each)

    def addresses() -> list[int]:
        stores = [entry for layer in cache.layers.own for entry in layer.entries]
        return [t.data_ptr() for t in (*stores, cache.mask, cache.lengths)]

    first = addresses()
    for step in range(10):
        tokens = torch.randint(3, 90, (len(SOURCES) * 3,))
        torch.testing.assert_close(engine.step(tokens, cache), engine.step(tokens, changing))
        parents = torch.randint(0, 3, (len(SOURCES), 3))
        for each in (cache, changing):
            each.reorder(parents)
        assert addresses() == first
        assert cache.longest == changing.longest == step + 2


@pytest.mark.parametrize("fixed", [False, True])
def test_a_batch_that_has_ended_is_given_back_without_waiting_for_the_collector(fixed: bool) -> None:
    engine = Engine(make_model(), never=(PAD, BOS))
    engine.fixed = fixed
    gc.disable()
    try:
        cache = engine.start(pad(SOURCES), 2)
        engine.step(torch.full((len(SOURCES) * 2,), BOS), cache)
        store = weakref.ref(cache.layers.own[0].entries[0])
        del cache
        assert store() is None
    finally:
        gc.enable()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("beam_size", [1, 4])
def test_recorded_steps_find_what_the_modules_find(beam_size: int) -> None:
    model = make_model().cuda()
    options = SearchOptions(beam_size=beam_size, num_best=beam_size, max_extra_tokens=25)
    src = pad(SOURCES).cuda()
    recorded = search(Engine(model, never=(PAD, BOS)), src, options, RULES)
    assert_alike(recorded, plain_search(model, src, options, BOS, EOS))
