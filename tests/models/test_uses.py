"""Blocks that serve several times: every use is a layer of its own, with the parameters of the others."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attending.tiny_readers import language_reader, pair_reader, tokenizers
from tolerances import assert_same as assert_same_within
from triptych import load
from triptych.core.models import LanguageModel, attention_sites
from triptych.core.models.encoder_decoder import EncoderDecoder
from triptych.running.decoding.engine import Engine
from triptych.running.measuring.windows import cut_windows
from triptych.running.measuring.worth import measure_worth
from triptych.running.opening import Reader

ORDER = (0, 1, 0, 1, 1)
TEXTS = ["the cat sat on the mat", "a dog ran", "where is the cat now, and where is the dog?"]


def assert_same(one: Tensor, other: Tensor) -> None:
    assert_same_within(one, other, kind="output")


def universal() -> Reader:
    """A decoder of two blocks, of which both serve several times."""
    reader = language_reader()
    plain = reader.model
    assert isinstance(plain, LanguageModel)
    layers = [site.layer for site in attention_sites(plain)]
    architecture = replace(plain.architecture, order=ORDER)
    model = LanguageModel(architecture, layers, plain.recipe_limit).double().eval()
    state = plain.state_dict()
    for name, parameter in model.named_parameters():
        *before, rest = name.split(".", 2) if name.startswith("blocks.") else [name]
        stored = f"blocks.{ORDER[int(before[1])]}.{rest}" if before else rest
        parameter.data = state[stored].clone()
    return reader.with_model(model)


def unrolled(model: LanguageModel) -> LanguageModel:
    """The same model with a copy of the parameters for every use."""
    made = model.architecture
    blocks = tuple(made.blocks[number] for number in made.uses)
    layers = [copy.deepcopy(site.layer) for site in attention_sites(model)]
    apart = LanguageModel(replace(made, blocks=blocks, order=()), layers, model.recipe_limit).double().eval()
    apart.load_state_dict(model.state_dict())
    return apart


def test_a_use_has_the_parameters_of_the_others_and_all_else_of_its_own() -> None:
    model = universal().model
    assert len(model.blocks) == len(ORDER) == len(attention_sites(model))
    numbers = {name.split(".")[1] for name, _ in model.named_parameters() if name.startswith("blocks")}
    assert numbers == {"0", "1"}
    first, _, third, *_ = model.blocks
    assert [id(one) for one in first.parameters()] == [id(one) for one in third.parameters()]
    assert not {id(module) for module in first.modules()} & {id(module) for module in third.modules()}
    model.float()
    assert next(third.parameters()) is next(first.parameters())


def test_a_model_computes_what_one_with_copies_of_its_blocks_computes() -> None:
    model = universal().model
    ids = torch.randint(0, model.vocab_size, (2, 9))
    apart = unrolled(model)
    assert_same(model(ids).logits, apart(ids).logits)
    model(ids).logits.square().sum().backward()
    apart(ids).logits.square().sum().backward()
    total = sum(apart.blocks[place].feed_forward.inner.weight.grad for place in (0, 2))
    assert_same(model.blocks[0].feed_forward.inner.weight.grad, total)


def test_an_order_uses_every_block() -> None:
    made = universal().model.architecture
    with pytest.raises(ValueError, match="does not use each of the 2 blocks, 0 to 1"):
        replace(made, order=(0, 0))


def test_the_same_layer_in_two_places_is_two_modules() -> None:
    plain = language_reader().model
    assert isinstance(plain, LanguageModel)
    layer = plain.blocks[0].self_attention
    model = LanguageModel(plain.architecture, [layer, layer], plain.recipe_limit)
    one, other = (block.self_attention for block in model.blocks)
    assert one is layer is not other
    assert [id(part) for part in one.parameters()] == [id(part) for part in other.parameters()]
    pair = pair_reader().model
    assert isinstance(pair, EncoderDecoder)
    layers = [block.self_attention for block in pair.encoder.blocks]
    cross = [block.cross_attention for block in pair.decoder.blocks]
    tied = EncoderDecoder(pair.architecture, layers, layers, cross, pair.pad_id)
    assert len({id(site.layer) for site in attention_sites(tied)}) == 6


def test_decoding_holds_the_maps_of_a_block_once_and_computes_the_same() -> None:
    model = universal().model
    engine = Engine(model)
    assert len([*engine.model._modules["blocks"].children()]) == 2
    ids = torch.randint(0, model.vocab_size, (1, 12))
    expected = Engine(unrolled(model))
    with torch.inference_mode():
        assert_same(_by_steps(engine, ids), _by_steps(expected, ids))
        assert_same(_by_steps(engine, ids), model(ids).logits)


def _by_steps(engine: Engine, ids: Tensor) -> Tensor:
    cache = engine.model.new_cache()
    return torch.cat(
        [engine.model(ids[:, i : i + 1], cache=cache).logits for i in range(ids.shape[1])], dim=1
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizers().source.save(folder / "tokenizer.json")
    return load(universal().model, tokenizer=folder)


def test_layers_in_memory_say_whose_weights_they_have(model: Any) -> None:
    assert [layer.shares for layer in model.layers] == [None, None, "0", "1", "1"]
    assert len(model.inspect().layers) == 2
    assert model.cost().total() == sum(model.layers[number].weights.num_parameters for number in (0, 1))


def test_a_text_is_continued_without_the_head_of_one_use(model: Any) -> None:
    changed = model.ablate("2.1").edit("4.0", "scores", lambda scores: 3 * scores)
    own = unrolled(model.reader.model)
    expected = load(own, tokenizer=model._opened.source.tokenizer)
    expected = expected.ablate("2.1").edit("4.0", "scores", lambda scores: 3 * scores)
    prompt = "the cat"
    assert changed.generate(prompt, max_new_tokens=8).text == expected.generate(prompt, max_new_tokens=8).text
    assert_same(changed.run(prompt).logits, expected.run(prompt).logits)
    assert not torch.allclose(changed.run(prompt).logits, model.run(prompt).logits)


def test_a_head_of_one_use_is_worth_the_loss_without_it(model: Any) -> None:
    found = model.attend_over(TEXTS, worth="zero", context=16)
    assert [layer.layer for layer in found.layers] == [0, 1, 2, 3, 4]
    windows = cut_windows(model.reader, TEXTS, context=16)
    whole = measure_worth(model.reader, windows, "zero")
    assert whole.loss == found.worth.loss
    for layer in (0, 2, 4):
        without = measure_worth(model.ablate(f"{layer}.1").reader, windows, "zero").loss
        assert found.worth.of("decoder", layer)[1] == pytest.approx(without - whole.loss, abs=1e-9)


def test_weights_that_layers_share_lose_a_head_in_all_of_them_at_once(model: Any) -> None:
    windows = cut_windows(model.reader, TEXTS, context=16)
    together = [["decoder.0", "decoder.2"], ["decoder.1", "decoder.3", "decoder.4"]]
    for instead in ("zero", "mean", "even"):
        found = measure_worth(model.reader, windows, instead, together=together)
        assert {(head.layer, head.head) for head in found.heads} == {
            (n, head) for n in (0, 1) for head in range(4)
        }
        if instead == "zero":
            without = measure_worth(model.ablate("1.2, 3.2, 4.2").reader, windows, "zero").loss
            assert found.of("decoder", 1)[2] == pytest.approx(without - found.loss, abs=1e-9)
