"""Encoders of every family that is run, against those that `transformers` makes of the same files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from checkpoints.oracle import apart, changed, fields_not_understood, pairs, saved
from checkpoints.test_models_run import theirs
from checkpoints.tiny_models import TINY
from triptych.attention import PositionIds
from triptych.checkpoints.models import load_language_model
from triptych.errors import DataError
from triptych.models.language_model import LanguageModel
from triptych.opening import record_calls

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

PAD = 0


class Case(NamedTuple):
    """A model.

    Attributes:
        model: its class in `transformers`.
        tiny: whose configuration it has.
        settings: that differ.
    """

    model: str
    tiny: str
    settings: Mapping[str, Any] = MappingProxyType({})


_SAME = {"embedding_size": 24}
CASES = {
    "bert": Case("BertForMaskedLM", "bert"),
    "bert, two sentences": Case("BertForPreTraining", "bert"),
    "bert, no head": Case("BertModel", "bert", {"hidden_act": "gelu_new"}),
    "bert, free output": Case("BertForMaskedLM", "bert", {"tie_word_embeddings": False}),
    "roberta": Case("RobertaForMaskedLM", "roberta", {"pad_token_id": PAD}),
    "roberta, padding past others": Case("RobertaForMaskedLM", "roberta", {"pad_token_id": 2}),
    "xlm-roberta": Case("XLMRobertaForMaskedLM", "roberta", {"pad_token_id": PAD}),
    "camembert": Case("CamembertForMaskedLM", "roberta"),
    "electra, generator": Case("ElectraForMaskedLM", "electra"),
    "electra, one width": Case("ElectraForMaskedLM", "electra", _SAME),
    "electra, discriminator": Case("ElectraForPreTraining", "electra"),
    "electra, no head": Case("ElectraModel", "electra"),
    "distilbert": Case("DistilBertForMaskedLM", "distilbert"),
    "distilbert, sinusoidal": Case("DistilBertForMaskedLM", "distilbert", {"sinusoidal_pos_embds": True}),
    "albert": Case("AlbertForMaskedLM", "albert"),
    "albert, one width": Case("AlbertForMaskedLM", "albert", _SAME),
    "albert in groups": Case("AlbertForPreTraining", "albert in groups"),
    "deberta": Case("DebertaForMaskedLM", "deberta"),
    "deberta, another head": Case("DebertaForMaskedLM", "deberta", {"legacy": False}),
    "deberta, learned": Case("DebertaForMaskedLM", "deberta, learned"),
    "deberta-v2": Case("DebertaV2ForMaskedLM", "deberta-v2"),
    "deberta-v2, all": Case(
        "DebertaV2ForMaskedLM",
        "deberta-v2",
        {"legacy": False, "position_biased_input": True, "type_vocab_size": 2},
    ),
    "deberta-v2, maps of its own": Case("DebertaV2Model", "deberta-v2, maps of its own"),
    "mpnet": Case("MPNetForMaskedLM", "mpnet", {"pad_token_id": 1}),
    "modernbert": Case("ModernBertForMaskedLM", "modernbert"),
    "modernbert, biases": Case("ModernBertForMaskedLM", "modernbert, biases", {"classifier_bias": True}),
    "nomic_bert": Case("NomicBertForMaskedLM", "nomic_bert"),
    "roformer": Case("RoFormerForMaskedLM", "roformer"),
    "roformer, one width": Case("RoFormerForMaskedLM", "roformer", _SAME),
    "esm": Case("EsmForMaskedLM", "esm"),
    "esm, rotary": Case("EsmForMaskedLM", "esm, rotary"),
    "esm, first norm": Case("EsmForMaskedLM", "esm, rotary", {"emb_layer_norm_before": True}),
}
# RoFormer's class stores sines and cosines with seven digits.
TOLERANCE = {"roformer": 1e-8, "roformer, one width": 1e-8}
IN_EVERY_RUN = ("bert", "roberta", "electra, discriminator", "albert in groups")
ALL = [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow) for name in CASES]


def config_of(name: str) -> Any:
    case = CASES[name]
    tiny = TINY[case.tiny]
    class_name = getattr(transformers, case.model).config_class
    return class_name(**{**tiny.settings, **case.settings})


def made(name: str, folder: Path) -> Any:
    """A tiny model with random numbers everywhere, in float64, saved in a folder."""
    model_class = getattr(transformers, CASES[name].model)  # imports its module

    def configure() -> Any:
        config = config_of(name)
        config._attn_implementation = "eager"
        return config

    return saved(model_class, configure, folder, leave="encoder.embed_positions")  # RoFormer's angles


Pair = tuple[Any, LanguageModel]


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A tiny model of `transformers`, and ours of its files; made once."""
    return pairs(made, lambda folder: load_language_model(folder).model, tmp_path_factory)


def some_ids(other: Any, batch: int = 2, length: int = 11) -> Tensor:
    ids = torch.randint(4, 40, (batch, length), generator=torch.Generator().manual_seed(1))
    ids[:, 3] = 3  # a masked token, where a model knows one
    return ids


def outputs(found: Any) -> Tensor:
    """Logits, `[batch, length, number]`, or the stream of a model without head."""
    for name in ("logits", "prediction_logits"):
        if name in found:
            return found[name] if found[name].dim() == 3 else found[name][..., None]
    return found.last_hidden_state


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_outputs_and_attention_weights_are_those_of_transformers(
    name: str, pair_of: Callable[[str], Pair]
) -> None:
    other, model = pair_of(name)
    ids = some_ids(other)
    expected = theirs(other, ids, output_attentions=True)
    with record_calls(model) as calls:
        found = model(ids)
    assert not model.causal
    assert found.logits.dtype == torch.float64
    assert apart(found.logits, outputs(expected)) < TOLERANCE.get(name, 1e-10)
    assert len(calls) == len(expected.attentions)
    for call, layer in zip(calls, expected.attentions, strict=True):
        assert apart(call.queries_and_keys().weights(), layer) < TOLERANCE.get(name, 1e-10)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_is_not_seen_on_either_side(name: str, side: str, pair_of: Callable[[str], Pair]) -> None:
    other, model = pair_of(name)
    ids, there = some_ids(other), torch.ones(2, 11, dtype=torch.bool)
    there[1, slice(0, 4) if side == "left" else slice(7, None)] = False
    ids[~there] = other.config.pad_token_id
    expected = outputs(theirs(other, ids, attention_mask=there.long()))
    found = model(ids, mask=there[:, None, None]).logits
    assert apart(found[there], expected[there]) < TOLERANCE.get(name, 1e-10)
    if side == "right":
        assert apart(found[1:, :7], model(ids[1:, :7]).logits) < 1e-10


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_float32_models_agree_to_five_digits(name: str, tmp_path: Path) -> None:
    other = made(name, tmp_path).float()
    model = load_language_model(tmp_path, dtype=torch.float32).model
    ids = some_ids(other)
    found, expected = model(ids).logits, outputs(other(input_ids=ids))
    assert found.dtype == torch.float32
    assert apart(found, expected) < 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(
    "name", ["bert", "roberta", "electra, generator", "albert", "roformer", "nomic_bert"]
)
@torch.no_grad()
def test_segments_have_rows_of_their_own(name: str, pair_of: Callable[[str], Pair]) -> None:
    other, model = pair_of(name)
    ids, types = some_ids(other), (torch.arange(11) > 5).long().expand(2, 11)
    expected = outputs(theirs(other, ids, token_type_ids=types))
    found = model(ids, types=types).logits
    assert apart(found, expected) < TOLERANCE.get(name, 1e-10)
    assert apart(found, model(ids).logits) > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_every_field_of_its_class_in_transformers_is_understood(name: str) -> None:
    assert fields_not_understood(config_of(name)) == []


@torch.no_grad()
def test_given_positions_are_taken_instead_of_counted_ones(pair_of: Callable[[str], Pair]) -> None:
    other, model = pair_of("roberta")
    ids, places = some_ids(other), torch.arange(3, 14)
    expected = theirs(other, ids, position_ids=places.expand(2, 11) + other.config.pad_token_id + 1).logits
    assert apart(model(ids, positions=PositionIds(places, 14)).logits, expected) < 1e-10


@pytest.mark.parametrize(
    ("name", "tensors", "fields", "said"),
    [
        (
            "bert",
            {"classifier.weight": torch.ones(2, 24)},
            {},
            "unknown tensor classifier.weight: models of BERT have none",
        ),
        (
            "bert",
            {"cls.predictions.decoder.bias": torch.ones(40)},
            {},
            "cls.predictions.decoder.bias is not cls.predictions.bias",
        ),
        ("bert", {}, {"hidden_act": "mish"}, "activation 'mish' is not one of"),
        ("bert", {}, {"is_decoder": True}, "no self-attention of its encoder"),
        ("deberta-v2", {}, {"conv_kernel_size": 3}, "conv_kernel_size is not 0"),
        (
            "electra, generator",
            {"electra.embeddings_project.weight": None},
            {},
            "12 wide, and no map leads to 24",
        ),
    ],
)
def test_what_is_not_understood_or_missing_is_refused_by_name(
    name: str, tensors: dict[str, Any], fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    made(name, tmp_path)
    changed(tmp_path, tensors, fields)
    with pytest.raises(DataError, match=said) as raised:
        load_language_model(tmp_path)
    assert "\n" not in str(raised.value)
