"""The configuration: every site its own way to write heads, what is refused, and that it survives a file."""

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from pydantic import ValidationError

from tiny_recipe import generated
from triptych.core.attention import (
    PARAMETERISATIONS,
    AlibiPositions,
    Bilinear,
    Factored,
    Grouped,
    KeyValue,
    Latent,
    MultiHeadAttention,
    Parameterisation,
    RotaryPositions,
    Stacked,
    Symmetric,
)
from triptych.core.models import (
    AttentionConfig,
    DecoderConfig,
    EncoderConfig,
    EncoderDecoder,
    ModelConfig,
    PositionsConfig,
    find_config,
)
from triptych.core.models.sites import attention_sites
from triptych.errors import UsageError
from triptych.training import read_recipe, resolve

DATA = generated()
RECIPE = """
[data]
train = { generated = 100, generated_part = "train" }
valid = { generated = 10, generated_part = "valid" }
"""
ROTARY = PositionsConfig(scheme="rotary")
INTERLEAVED = PositionsConfig(scheme="rotary", rotary_pairing="interleaved")


def make(
    encoder: dict[str, Any] | None = None, decoder: dict[str, Any] | None = None, **sizes: Any
) -> ModelConfig:
    return ModelConfig(
        **{"d_model": 24, "d_ff": 16, "num_heads": 4, **sizes},
        encoder=EncoderConfig(**{"num_layers": 2, **(encoder or {})}),
        decoder=DecoderConfig(**{"num_layers": 2, **(decoder or {})}),
    )


def refusal(site: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as refused:
        AttentionConfig.model_validate(site)
    (error,) = refused.value.errors()
    return str(error["msg"])


MIXED = make(
    {"attention": AttentionConfig(projections="stacked", first_bias=True, dropout=0.1)},
    {
        "attention": AttentionConfig(projections="latent", d_latent=6),
        "attention_in_layer": {1: AttentionConfig(projections="grouped", num_kv_heads=2, num_heads=8, d_k=3)},
        "cross_attention": AttentionConfig(projections="key_value", kv_bias=True),
        "cross_attention_in_layer": {0: AttentionConfig(projections="bilinear", d_v=2)},
    },
    d_v=5,
)


def test_each_site_has_its_own_parameterisation() -> None:
    model = EncoderDecoder.of(MIXED, 11, 11)
    found = {site.name: site.layer.parameterisation for site in attention_sites(model)}
    assert found == {
        "encoder.0": Stacked(first_bias=True, d_v=5),
        "encoder.1": Stacked(first_bias=True, d_v=5),
        "decoder.0": Latent(d_latent=6, d_v=5),
        "cross.0": Bilinear(d_v=2),
        "decoder.1": Grouped(num_kv_heads=2, d_k=3, d_v=5),
        "cross.1": KeyValue(kv_bias=True),  # it has no d_v to take from the model
    }
    heads = {site.name: site.layer.num_heads for site in attention_sites(model)}
    assert heads == {name: 8 if name == "decoder.1" else 4 for name in found}
    dropouts = {site.name: site.layer.dropout for site in attention_sites(model)}
    assert dropouts == {name: 0.1 if name.startswith("encoder") else 0.0 for name in found}


def test_positions_go_into_self_attention_only() -> None:
    positions = PositionsConfig(scheme="rotary", rotary_dim=4, rotary_base=99)
    model = EncoderDecoder.of(make(positions=positions), 11, 11)
    for site in attention_sites(model):
        rotary = site.layer.semantics.rotary
        assert (rotary is None) == (site.stack == "cross")
        assert rotary is None or rotary.frequencies.tolist() == [1.0, pytest.approx(99**-0.5)]


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        (PositionsConfig(), None),
        (PositionsConfig(scheme="none"), None),
        (PositionsConfig(scheme="learned"), None),
        (PositionsConfig(scheme="alibi"), AlibiPositions()),
        (INTERLEAVED, RotaryPositions(None, "interleaved", 10_000.0)),
    ],
)
def test_a_scheme_is_what_attention_holds_of_it(positions: PositionsConfig, expected: Any) -> None:
    assert positions.in_attention() == expected


@pytest.mark.parametrize("name", PARAMETERISATIONS)
def test_a_site_with_a_parameterisation_is_that_parameterisation(name: str) -> None:
    cls = PARAMETERISATIONS[name]
    fields = dataclasses.fields(cls)
    changed: dict[str, Any] = {field.name: True if field.type is bool else 2 for field in fields}
    for chosen in (cls(), cls(**changed)):
        site = AttentionConfig.of(MultiHeadAttention(24, 4, chosen, dropout=0.25))
        assert site.parameterisation() == chosen
        assert (site.projections, site.num_heads, site.dropout) == (name, 4, 0.25)
        assert all(value is not None for value in site.options.values())
        again = AttentionConfig.model_validate_json(site.model_dump_json())
        assert again == site
        assert again.parameterisation() == chosen
    assert AttentionConfig(projections=name).parameterisation() == cls()
    assert AttentionConfig(projections=name, **changed).parameterisation() == cls(**changed)


def test_a_configuration_of_a_parameterisation_names_what_is_no_default() -> None:
    assert AttentionConfig.of(MultiHeadAttention(24, 4, Grouped(num_kv_heads=1, d_k=3))).options == {"d_k": 3}
    assert AttentionConfig.of(MultiHeadAttention(24, 4)) == AttentionConfig(num_heads=4)
    beside = AttentionConfig(num_heads=4, qk_norm=True, output_gate=True)
    assert AttentionConfig.of(beside.layer(24, 1)) == beside


# Refusals


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ({"num_kv_heads": 2}, "'factored' has no num_kv_heads: did you mean num_heads?"),
        ({"projections": "grouped", "num_kv_head": 2},
         "'grouped' has no num_kv_head: did you mean num_kv_heads?"),
        ({"projections": "direct", "d_k": 2},
         "'direct' has no d_k: known are projections, scores, scale, num_heads, "
         "dropout, qk_norm, output_gate, o_bias"),
        ({"projections": "shared", "d_v": 2}, "'shared' has no d_v: did you mean d_k?"),
        ({"projections": "key_value", "v_bias": True}, "'key_value' has no v_bias: did you mean kv_bias?"),
        ({"dropuot": 0.1}, "'factored' has no dropuot: did you mean dropout?"),
        ({"zzz": 1},
         "'factored' has no zzz: known are projections, scores, scale, num_heads, dropout, qk_norm, "
         "output_gate, d_k, d_v"),
        ({"projections": "latnet"}, "'latnet' is not one of factored, "),
        ({"projections": "latnet"}, "did you mean 'latent'?"),
        ({"projections": "four_way"}, "'four_way' is no layer: with the 4th matrix as data"),
    ],
)  # fmt: skip
def test_what_a_parameterisation_has_not_is_refused_with_what_it_has(
    site: dict[str, Any], message: str
) -> None:
    assert message in refusal(site)


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ({"d_k": True}, "d_k: Input should be a valid integer, not True"),
        ({"d_k": "4"}, "d_k: Input should be a valid integer, not '4'"),
        ({"d_v": 4.0}, "d_v: Input should be a valid integer, not 4.0"),
        ({"q_bias": 1}, "q_bias: Input should be a valid boolean, not 1"),
        ({"projections": "grouped", "num_kv_heads": None},
         "num_kv_heads: Input should be a valid integer, not None"),
        ({"dropout": 1.0}, "less than 1"),
        ({"num_heads": 0}, "greater than or equal to 1"),
    ],
)  # fmt: skip
def test_values_of_a_wrong_type_are_refused_by_name(site: dict[str, Any], message: str) -> None:
    assert message in refusal(site)


@pytest.mark.parametrize("where", ["encoder.attention", "decoder.attention", "decoder.attention_in_layer"])
@pytest.mark.parametrize("name", [name for name, cls in PARAMETERISATIONS.items() if cls.no_rotary])
def test_positions_that_a_site_cannot_have_are_refused_with_the_reason(name: str, where: str) -> None:
    stack, field = where.split(".")
    site = AttentionConfig(projections=name)
    given = {stack: {field: {1: site} if field.endswith("layer") else site}}
    with pytest.raises(ValidationError) as refused:
        make(**given, positions=ROTARY)
    assert f"{name} cannot have rotary positions: {PARAMETERISATIONS[name].no_rotary}" in str(refused.value)
    assert make(**given).decoder.num_layers == 2  # without them it can be had
    assert make(**given, positions=PositionsConfig(scheme="alibi"))


@pytest.mark.parametrize("name", PARAMETERISATIONS)
def test_cross_attention_may_be_anything_under_rotary_positions(name: str) -> None:
    config = make(decoder={"cross_attention": AttentionConfig(projections=name)}, positions=ROTARY)
    assert find_config(EncoderDecoder.of(config, 11, 11)).sites("cross")[0].projections == name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"positions": PositionsConfig(scheme="learned", max_tokens=256)},
         "positions.max_tokens is 256: max_source_tokens 256 and the end of sentence need 257"),
        ({"positions": PositionsConfig(scheme="rotary", rotary_dim=3)}, "rotary_dim is 3: it must be even"),
        ({"positions": PositionsConfig(scheme="rotary", rotary_dim=8)},
         "rotary_dim is 8, but queries and keys are 6 wide"),
        ({"positions": ROTARY, "d_k": 5}, "rotary_dim is 5: it must be even"),
        ({"num_heads": 5}, "num_heads 5 does not divide d_model 24"),
        ({"encoder": {"attention_in_layer": {2: AttentionConfig()}}},
         "encoder.attention_in_layer names layer 2: there are 2, counted from 0"),
        ({"decoder": {"attention_in_layer": {-1: AttentionConfig()}}},
         "decoder.attention_in_layer names layer -1"),
        ({"decoder": {"cross_attention_in_layer": {7: AttentionConfig()}}},
         "decoder.cross_attention_in_layer names layer 7"),
        ({"encoder": {"attention": AttentionConfig(projections="grouped", num_kv_heads=3)}},
         "num_kv_heads 3 does not divide num_heads 4"),
        ({"decoder": {"cross_attention": AttentionConfig(projections="direct", num_heads=5)}},
         "num_heads 5 does not divide d_model 24"),
        ({"decoder": {"attention": AttentionConfig(projections="latent", d_latent=0)}},
         "d_latent is 0: it must be at least 1"),
    ],
)  # fmt: skip
def test_a_model_that_could_not_be_built_is_refused_before(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        make(**given)
    assert message in str(refused.value)


def test_just_enough_learned_positions_will_do() -> None:
    assert make(positions=PositionsConfig(scheme="learned", max_tokens=257))
    assert make(positions=PositionsConfig(max_tokens=3))  # sinusoidal ones do not end


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ({"scheme": "rotray"}, "Input should be 'none', 'sinusoidal', 'learned', 'rotary' or 'alibi'"),
        ({"rotary_dims": 4}, "Extra inputs are not permitted"),
        ({"rotary_base": 1.0}, "greater than 1"),
        ({"rotary_pairing": "thirds"}, "Input should be 'halves' or 'interleaved'"),
    ],
)
def test_positions_that_are_none_are_refused(positions: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PositionsConfig.model_validate(positions)


# Files and recipes


def test_a_configuration_with_sites_of_its_own_survives_json_and_toml() -> None:
    text = json.dumps(MIXED.model_dump())
    assert ModelConfig.model_validate(json.loads(text)) == MIXED
    assert ModelConfig.model_validate_json(MIXED.model_dump_json()) == MIXED
    toml = tomli_w.dumps(MIXED.model_dump(mode="json", exclude_none=True))
    assert "[decoder.attention_in_layer.1]" in toml
    again = ModelConfig.model_validate(tomllib.loads(toml))
    assert again == MIXED
    assert again.sites("decoder")[1].parameterisation() == Grouped(num_kv_heads=2, d_k=3, d_v=5)


def test_one_word_changes_the_parameterisation_of_a_site(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    recipe = read_recipe(
        path,
        [
            "model.encoder.attention.projections=stacked",
            "model.encoder.attention.first_bias=true",
            "model.decoder.cross_attention_in_layer.3.projections=symmetric",
        ],
    )
    sites = recipe.model.sites("encoder")
    assert [site.parameterisation() for site in sites] == [Stacked(first_bias=True)] * 6
    crosses: list[Parameterisation] = [Factored()] * 6
    crosses[3] = Symmetric()
    assert [site.parameterisation() for site in recipe.model.sites("cross")] == crosses
    assert recipe.model.sites("decoder")[3].parameterisation() == Factored()
    (tmp_path / "again.toml").write_text(recipe.to_toml())
    assert read_recipe(tmp_path / "again.toml") == recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.encoder.attention.d_k=true"],
         "model.encoder.attention: d_k: Input should be a valid integer, not True"),
        (["model.encoder.attention_in_layer.1.projection=latent"],
         "unknown key model.encoder.attention_in_layer.1.projection: did you mean projections?"),
        (["model.encoder.attention_in_layer.x.d_k=3"], "model.encoder.attention_in_layer.x"),
        (["model.encoder.attention=latent"], "model.encoder.attention: Input should be a valid dictionary"),
        (["model.positions.scheme=learned", "model.positions.max_tokens=300", "data.max_sentence_tokens=300"],
         "model.positions.max_tokens is 300: data.max_sentence_tokens 300 and the end of sentence need 301"),
    ],
)  # fmt: skip
def test_a_recipe_is_refused_in_one_line_with_the_path(overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        resolve({"data": DATA}, overrides)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
