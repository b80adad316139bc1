"""Encoders with decoders of every family that is run, against those of `transformers`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from checkpoints.oracle import apart, fields_not_understood, in_float64, pairs, saved
from checkpoints.tiny_models import TINY
from triptych.attention import DecoderCache
from triptych.checkpoints.models import load_encoder_decoder, load_language_model
from triptych.errors import DataError
from triptych.models import EncoderDecoder
from triptych.opening import record_calls

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


class Case(NamedTuple):
    """A model: whose configuration it has, and settings that differ."""

    tiny: str
    settings: Mapping[str, Any] = MappingProxyType({})


CASES = {
    "bart": Case("bart"),
    "bart, scaled": Case(
        "bart", {"scale_embedding": True, "activation_function": "relu", "decoder_layers": 3}
    ),
    "mbart": Case("mbart", {"scale_embedding": True}),
    "pegasus": Case("pegasus", {"scale_embedding": True}),
    "m2m_100": Case("m2m_100", {"scale_embedding": True, "pad_token_id": 1}),
    "blenderbot": Case("blenderbot"),
    "blenderbot-small": Case("blenderbot-small", {"scale_embedding": True}),
    "marian": Case("marian", {"scale_embedding": True}),
    **{
        f"{name}, untied": Case(name, {"tie_word_embeddings": False, "scale_embedding": True})
        for name in ("bart", "mbart", "pegasus", "m2m_100", "blenderbot", "blenderbot-small", "marian")
    },
    "marian, not scaled": Case("marian", {"scale_embedding": False}),
    "t5": Case("t5"),
    "t5, silu": Case("t5", {"feed_forward_proj": "silu"}),
    "t5, gated": Case("t5", {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 3}),
    "t5, not scaled": Case("t5", {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False}),
    "mt5": Case("mt5"),
    "umt5": Case("umt5"),
    "t5gemma": Case("t5gemma"),
    "t5gemma, untied": Case("t5gemma", {"tie_word_embeddings": False}),
}
# Marian's class rounds sines and cosines to float32.
TOLERANCE = {name: 1e-6 for name, case in CASES.items() if case.tiny == "marian"}
IN_EVERY_RUN = ("bart", "bart, untied", "t5, gated")
ALL = [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow) for name in CASES]


def config_of(name: str) -> Any:
    tiny = TINY[CASES[name].tiny]
    return getattr(transformers, tiny.config)(**{**tiny.settings, **CASES[name].settings})


def made(name: str, folder: Path) -> Any:
    """A tiny model with random numbers everywhere, in float64, saved in a folder."""
    model_class = getattr(transformers, TINY[CASES[name].tiny].model)  # imports its module

    def configure() -> Any:
        config = config_of(name)
        config._attn_implementation = "eager"
        return config

    not_saved = "embed_positions" if CASES[name].tiny == "marian" else ""
    return saved(model_class, configure, folder, leave=not_saved)


Pair = tuple[Any, EncoderDecoder]


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A tiny model of `transformers`, and ours of its files; made once."""
    return pairs(made, load_encoder_decoder, tmp_path_factory)


def some_ids(length: int) -> Tensor:
    return torch.randint(4, 40, (2, length), generator=torch.Generator().manual_seed(length))


def theirs(model: Any, src: Tensor, tgt: Tensor, **given: Any) -> Any:
    with in_float64(), torch.no_grad():
        there = (src != model.config.pad_token_id).long()
        return model(input_ids=src, attention_mask=there, decoder_input_ids=tgt, **given)


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_logits_and_attention_weights_are_those_of_transformers(
    name: str, pair_of: Callable[[str], Pair]
) -> None:
    other, model = pair_of(name)
    src, tgt = some_ids(9), some_ids(7)
    expected = theirs(other, src, tgt, output_attentions=True)
    with record_calls(model) as calls:
        found = model(src, tgt)
    assert found.dtype == torch.float64
    assert apart(found, expected.logits) < TOLERANCE.get(name, 1e-10)
    for kind, layers in (
        ("encoder", expected.encoder_attentions),
        ("decoder", expected.decoder_attentions),
        ("cross", expected.cross_attentions),
    ):
        recorded = [call for call in calls if call.kind == kind]
        assert len(recorded) == len(layers)
        for call, layer in zip(recorded, layers, strict=True):
            assert apart(call.queries_and_keys().weights(), layer) < TOLERANCE.get(name, 1e-10)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("m2m_100", {"activation_function": None, "scale_embedding": None}),
        ("t5", {"dense_act_fn": "silu"}),
        ("t5, gated", {"dense_act_fn": "relu"}),
    ],
)
@torch.no_grad()
def test_what_a_file_leaves_out_or_says_twice_is_what_the_class_makes_of_it(
    name: str, fields: Mapping[str, Any], tmp_path: Path
) -> None:
    made(name, tmp_path)
    path = tmp_path / "config.json"
    record = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({field: value for field, value in record.items() if value is not None}))
    model_class = getattr(transformers, TINY[CASES[name].tiny].model)
    with in_float64():
        other = model_class.from_pretrained(tmp_path, attn_implementation="eager").eval()
    src, tgt = some_ids(9), some_ids(7)
    found = load_encoder_decoder(tmp_path)(src, tgt)
    assert apart(found, theirs(other, src, tgt).logits) < 1e-10


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_of_the_source_is_not_seen_on_either_side(
    name: str, side: str, pair_of: Callable[[str], Pair]
) -> None:
    other, model = pair_of(name)
    src, tgt = some_ids(9), some_ids(7)
    src[1, slice(0, 3) if side == "left" else slice(6, None)] = model.pad_id
    found = model(src, tgt)
    assert apart(found, theirs(other, src, tgt).logits) < TOLERANCE.get(name, 1e-10)
    if side == "right":
        assert apart(found[1:], model(src[1:, :6], tgt[1:])) < 1e-10


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_token_by_token_is_the_whole_target_at_once(name: str, pair_of: Callable[[str], Pair]) -> None:
    _, model = pair_of(name)
    src, tgt = some_ids(9), some_ids(7)
    memory, mask, cache = model.encode(src), model.memory_mask(src), DecoderCache(len(model.decoder))
    steps = [model.decode(tgt[:, :3], memory, mask, cache)]
    steps += [model.decode(tgt[:, i : i + 1], memory, mask, cache) for i in range(3, 7)]
    assert apart(model.logits(torch.cat(steps, dim=1)), model(src, tgt)) < 1e-10


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_float32_models_agree_to_five_digits(name: str, tmp_path: Path) -> None:
    other = made(name, tmp_path).float()
    model = load_encoder_decoder(tmp_path, dtype=torch.float32)
    src, tgt = some_ids(9), some_ids(7)
    found, expected = model(src, tgt), other(input_ids=src, decoder_input_ids=tgt).logits
    assert found.dtype == torch.float32
    assert apart(found, expected) < 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_every_field_of_its_class_in_transformers_is_understood(name: str) -> None:
    assert fields_not_understood(config_of(name)) == []


def test_a_model_with_an_encoder_is_no_language_model_and_the_other_way_round(tmp_path: Path) -> None:
    made("bart", tmp_path / "bart")
    with pytest.raises(DataError, match="a model of BART has an encoder and a decoder"):
        load_language_model(tmp_path / "bart")
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**TINY["gpt2"].settings)).save_pretrained(
        tmp_path / "g"
    )
    with pytest.raises(DataError, match="GPT-2 is not run as an encoder with a decoder"):
        load_encoder_decoder(tmp_path / "g")


def test_what_no_recipe_describes_is_not_rewritten_as_if_one_did(pair_of: Callable[[str], Pair]) -> None:
    _, model = pair_of("bart")
    with pytest.raises(ValueError, match="no recipe describes it"):
        _ = model.config


@pytest.mark.parametrize("name", ["vit", "clip", "whisper", "wav2vec2"])
def test_models_of_pictures_and_of_speech_can_be_read_and_say_that_they_are_not_run(
    name: str, tmp_path: Path
) -> None:
    tiny = TINY[name]
    config = getattr(transformers, tiny.config)(**tiny.settings)
    getattr(transformers, tiny.model)(config).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="can be read, and not run"):
        load_language_model(tmp_path)
    with pytest.raises(DataError, match="is not run as an encoder with a decoder"):
        load_encoder_decoder(tmp_path)
