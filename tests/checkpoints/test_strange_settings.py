"""Settings of the wrong kind or size: one line that names them, or a model that runs."""

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from checkpoints.tiny_models import TINY
from edited import with_value
from triptych.core.checkpoints.checkpoint import Checkpoint, open_checkpoint
from triptych.core.checkpoints.stored_models import read_encoder_decoder, read_language_model
from triptych.core.storage.settings import Settings
from triptych.errors import DataError, TriptychError

STRANGE: list[Any] = [
    *([], ["relu"], [1, 2], [[1]], {"a": 1}, "x", None, True),
    *(10**30, 10**9, -1, 0, 2.5, math.inf, math.nan),
]
Path_ = tuple[str | int, ...]


def saved(name: str, folder: Path) -> dict[str, Any]:
    """Write a tiny model; its configuration."""
    torch.manual_seed(0)
    tiny = TINY[name]
    config = tiny.configured()
    getattr(transformers, tiny.model)(config).save_pretrained(folder)
    return dict(json.loads((folder / "config.json").read_text()))


def fields(record: dict[str, Any], at: Path_ = ()) -> Iterator[Path_]:
    """Every field, those of records within, and the first entry of every list."""
    for name, value in record.items():
        yield (*at, name)
        if isinstance(value, dict):
            yield from fields(value, (*at, name))
        elif isinstance(value, list) and value:
            yield (*at, name, 0)


def opened(folder: Path) -> Checkpoint:
    """A checkpoint whose layers can all be read."""
    source = open_checkpoint(folder)
    for site in source.sites:
        source.read(site)
    assert isinstance(source, Checkpoint)
    return source


def load(folder: Path) -> object:
    """Read every layer, and the model."""
    source = opened(folder)
    return (read_encoder_decoder if source.family.name == "bart" else read_language_model)(source)


def use(folder: Path) -> None:
    """Read every layer, and run the model if it is one that runs.

    Raises:
        TriptychError: the layers cannot be read.
    """
    source = opened(folder)
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        with contextlib.suppress(TriptychError):
            read_language_model(source)(ids)
        with contextlib.suppress(TriptychError):
            read_encoder_decoder(source)(ids, ids)


@pytest.mark.filterwarnings("ignore::triptych.errors.ConfigurationWarning")
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bart", {"activation_function": ["relu"]}),
        ("bart", {"pad_token_id": 10**30}),
        ("roberta", {"pad_token_id": 10**9}),
        ("albert", {"num_hidden_layers": 10**9}),
        ("albert", {"num_hidden_layers": -1}),
        ("gemma3, text", {"layer_types": [["full_attention"]] * 6}),
        ("gemma3, text", {"query_pre_attn_scalar": -1}),
        ("gemma3, text", {"sliding_window": 10**30}),
        ("gemma2", {"attn_logit_softcapping": -1}),
        ("mixtral", {"num_local_experts": 10**9}),
        ("dinov3", {"image_size": 10**9}),
        ("dinov3", {"num_register_tokens": 10**9}),
        ("deberta-v2", {"position_buckets": []}),
        ("deberta-v2", {"position_buckets": 10**9}),
        ("deberta-v2", {"position_buckets": 1}),
        ("deberta-v2", {"position_buckets": 8, "max_relative_positions": 4}),
        ("t5, far", {"relative_attention_max_distance": -1}),
        ("t5, far", {"relative_attention_max_distance": 2}),
        ("phi3, stretched", {"rope_parameters": {"short_factor": [[], 1.0, 1.0]}}),
        ("llama4, stretched", {"rope_parameters": {"mscale_all_dim": math.inf}}),
        ("llama4, stretched", {"rope_parameters": {"attention_factor": 0}}),
    ],
)
def test_a_setting_of_the_wrong_kind_or_size_is_refused_by_its_name(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    record = saved(name, tmp_path)
    for field, value in changes.items():
        record[field] = {**record[field], **value} if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(DataError) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::triptych.errors.ConfigurationWarning")
@pytest.mark.parametrize("name", TINY)
def test_no_value_of_any_setting_ends_in_an_error_of_python(name: str, tmp_path: Path) -> None:
    record = saved(name, tmp_path)
    wrong = []
    for field in fields(record):
        for value in STRANGE:
            (tmp_path / "config.json").write_text(json.dumps(with_value(record, field, value)))
            try:
                use(tmp_path)
            except TriptychError:
                pass
            except Exception as error:  # noqa: BLE001 (all are told)
                wrong.append(f"{field} = {value!r}: {type(error).__name__}: {error}")
    assert wrong == []


def test_a_condition_on_the_number_of_a_layer_in_an_unknown_form_is_refused() -> None:
    settings = Settings({"num_hidden_layers": 4}, "config.json")
    assert settings.holds("(layer + 1) >= num_hidden_layers", 3)
    assert not settings.holds("(layer + 1) >= num_hidden_layers", 2)
    with pytest.raises(DataError, match=r"the condition layer \+ 1 >= num_hidden_layers of a family file"):
        settings.holds("layer + 1 >= num_hidden_layers", 3)
