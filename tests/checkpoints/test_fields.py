"""Fields of a configuration that a family does not read: what `transformers` does with them is done here."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from checkpoints.oracle import has_experts, opened
from checkpoints.test_families import TOLERANCE, furthest_of_layers, made
from checkpoints.tiny_models import TINY
from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.core.checkpoints.family import families
from triptych.core.checkpoints.fields import fields_read, of_attention, overlooked
from triptych.errors import ConfigurationWarning, DataError
from triptych.seeing.inspection import inspect

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def changed(folder: Path, fields: dict[str, Any]) -> None:
    """Change fields of a configuration; of the text's where it has one of its own."""
    path = folder / "config.json"
    record = json.loads(path.read_text())
    of = record.get("text_config", record)
    for name, value in fields.items():
        within, _, own = name.rpartition(".")
        (of[within] if within else of)[own] = value
    path.write_text(json.dumps(record))


def furthest(name: str, folder: Path, fields: dict[str, Any]) -> tuple[float, list[str]]:
    """The largest relative difference of an attention layer's output from that of `transformers`.

    Returns:
        The difference, and the warnings of reading.
    """
    model = made(name, folder)
    changed(folder, fields)
    how = {"attn_implementation": model.config._attn_implementation}
    if has_experts(model.config):
        how["experts_implementation"] = "eager"
    try:
        model = type(model).from_pretrained(folder, **how).double().eval()
    except Exception as error:  # noqa: BLE001
        pytest.skip(f"transformers does not load it: {str(error)[:80]}")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        checkpoint = opened(folder)
    try:
        apart = furthest_of_layers(model, checkpoint)
    except (AttributeError, TypeError) as error:
        pytest.skip(f"transformers does not run it: {error}")
    return max(apart.values()), [str(w.message) for w in said if issubclass(w.category, ConfigurationWarning)]


TURNED_ROUND = ["mistral", "t5", "bart", "gpt_neo"]
# ALiBi and chunks, which are refused; two fields that say so; failures of `transformers`; windows in pieces.
NOT_TURNED = (
    "bloom", "falcon, a key each", "llama4", "gemma3, both ways", "mpt", "longformer", "led",
)  # fmt: skip


@pytest.mark.parametrize("name", TURNED_ROUND)
def test_layers_see_both_sides_where_is_causal_is_false(name: str, tmp_path: Path) -> None:
    apart, _ = furthest(name, tmp_path, {"is_causal": False})
    assert apart < TOLERANCE


def test_alibi_positions_that_see_both_sides_are_refused(tmp_path: Path) -> None:
    made("bloom", tmp_path)
    changed(tmp_path, {"is_causal": False})
    with pytest.raises(DataError, match="is_causal is false, which is not supported with ALiBi"):
        open_checkpoint(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TINY if not name.startswith(NOT_TURNED)])
def test_is_causal_is_followed_in_every_family(name: str, tmp_path: Path) -> None:
    apart, _ = furthest(name, tmp_path, {"is_causal": False})
    assert apart < TOLERANCE


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5, and 5 layers are too few for that"),
        ({"num_kv_shared_layers": 4}, "no earlier layer has keys of layer 1"),
    ],
)
def test_keys_of_an_earlier_layer_need_one_of_the_same_kind(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    made("gemma3n", tmp_path)
    changed(tmp_path, fields)
    with pytest.raises(DataError, match=said):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("mpt", {"attn_config.alibi": False}, "attn_config.alibi is false"),
        ("mpt", {"attn_config.alibi_bias_max": 4}, "attn_config.alibi_bias_max is 4"),
        ("gemma3, text", {"attn_logit_softcapping": 0.02}, "attn_logit_softcapping is 0.02"),
        ("llama", {"clip_qkv": 0.01}, "clip_qkv is not read by Llama in transformers"),
        ("llama", {"attention_multiplier": 9.0, "sliding_window": 2}, "attention_multiplier is not read"),
        ("llama", {"rope_parameters.partial_rotary_factor": 0.5}, ""),
        ("gpt2", {"attn_scale": 9.0, "use_alibi": True}, "attn_scale, use_alibi are not read by GPT-2"),
    ],
)
def test_what_transformers_does_not_follow_is_not_followed_and_said(
    name: str, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    apart, warned = furthest(name, tmp_path, fields)
    assert apart < TOLERANCE
    assert len(warned) == bool(said)
    assert said in "".join(warned)


# Names of all kinds of things that configurations have been seen to say of attention.
STRANGE: dict[str, Any] = {
    "clip_qkv": 0.01,
    "softmax_scale": 3.0,
    "attn_scale": 3.0,
    "attention_multiplier": 3.0,
    "query_pre_attn_scalar": 3.0,
    "attn_logit_softcapping": 0.02,
    "attn_logits_soft_cap": 0.02,
    "qk_norm": True,
    "use_qk_norm": True,
    "qk_layernorm": True,
    "use_alibi": True,
    "alibi": True,
    "use_rope": False,
    "no_rope_layers": [0, 0],
    "partial_rotary_factor": 0.5,
    "rotary_pct": 0.5,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0},
    "position_embedding_type": "relative_key",
    "sliding_window": 2,
    "use_sliding_window": True,
    "attention_window": 2,
    "attention_chunk_size": 2,
    "use_bidirectional_attention": True,
    "scale_attn_weights": False,
    "scale_attn_by_inverse_layer_idx": True,
    "is_decoder": True,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.mark.slow
@pytest.mark.parametrize("field", STRANGE)
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "bert", "t5", "qwen2", "gemma2", "phi3", "gpt_neox", "vit"]
)
def test_a_field_of_others_is_followed_as_transformers_does_or_refused(
    name: str, field: str, tmp_path: Path
) -> None:
    try:
        apart, _ = furthest(name, tmp_path, {field: STRANGE[field]})
    except DataError:
        return
    assert apart < TOLERANCE


def test_a_kind_of_layer_that_a_family_does_not_know_is_refused(tmp_path: Path) -> None:
    made("qwen2", tmp_path)
    changed(tmp_path, {"layer_types": ["full_attention", "linear_attention"]})
    with pytest.raises(DataError, match="layer_types of layer 1 is linear_attention, which is not supported"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        (
            "gemma",
            {"use_bidirectional_attention": True},
            "with use_bidirectional_attention transformers sees both sides or one",
        ),
        (
            "gemma3",
            {"use_bidirectional_attention": True},
            "with use_bidirectional_attention of its text_config",
        ),
        ("mpt", {"attn_config.clip_qkv": 0.0}, "clip_qkv is 0, which transformers takes for no clipping"),
        ("deberta", {"pos_att_type": ["c2p", "p2p"]}, "pos_att_type is .*, which is not supported"),
        ("deberta", {"pos_att_type": "c2p|c2p"}, "pos_att_type is .*, which is not supported"),
    ],
)
def test_a_field_that_transformers_does_not_follow_as_it_reads_is_refused(
    name: str, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    made(name, tmp_path)
    changed(tmp_path, fields)
    with pytest.raises(DataError, match=said):
        inspect(tmp_path)


def test_the_parts_of_disentangled_positions_count_in_the_scale_even_without_them(tmp_path: Path) -> None:
    apart, _ = furthest("deberta, learned", tmp_path, {"pos_att_type": ["c2p", "p2c"]})
    assert apart < TOLERANCE


def with_all_set(record: dict[str, Any]) -> dict[str, Any]:
    return {
        name: with_all_set(value) if isinstance(value, dict) else 1 if value is None else value
        for name, value in record.items()
    }


def test_every_field_of_attention_that_a_class_has_is_read_or_said_to_be_ignored() -> None:
    from transformers import CONFIG_MAPPING

    forgotten: dict[str, set[str]] = {}
    for family in families():
        read = fields_read(family)
        for model_type in [name for name in family.model_types if name in CONFIG_MAPPING]:
            record = with_all_set(CONFIG_MAPPING[model_type]().to_dict())
            for settings in {spec.settings for spec in family.attention}:
                # The first record that is there, as the family reads it.
                records = [
                    record.get(path.strip()) if path.strip() else record for path in settings.split("|")
                ]
                below = next((found for found in records if found is not None), {})
                found = {field for field in overlooked(below, read) if of_attention(field)}
                forgotten.setdefault(model_type, set()).update(found)
    assert not {name: sorted(fields) for name, fields in forgotten.items() if fields}
