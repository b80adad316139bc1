"""What a configuration leaves out: read as its class in `transformers` has it, or refused."""

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from checkpoints.test_families import made
from checkpoints.tiny_models import TINY
from edited import drop_fields
from triptych.core.checkpoints import checkpoint as opening
from triptych.core.checkpoints import reading
from triptych.core.checkpoints import stored_positions as positions
from triptych.core.checkpoints.checkpoint import Checkpoint
from triptych.core.checkpoints.family import Family, family_of
from triptych.core.checkpoints.hooks import HOOKS
from triptych.core.storage.settings import Settings
from triptych.core.storage.tensors import Tensors, open_tensors
from triptych.errors import DataError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def plain(value: Any) -> Any:
    """What two readings can be compared by."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.double().numpy().tobytes()
    if is_dataclass(value):
        return type(value).__name__, *(plain(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, dict):
        return tuple((key, plain(part)) for key, part in value.items())
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


def read(record: dict[str, Any], family: Family, tensors: Tensors) -> Any:
    """All that is read of every layer; None if that is refused."""
    try:
        found = Checkpoint("tiny", family, Settings(record, "config.json"), tensors)
        layers = [found.read(site) for site in found.sites]
    except DataError:
        return None
    turning = [layer.site for layer in layers if layer.weights.semantics.rotary]
    return plain(tuple(layers)), {site: found.longest_text(site) for site in turning}


def paths(record: dict[str, Any], words: set[str]) -> Iterator[tuple[str, ...]]:
    """Of all fields that a family may ask for."""
    for name, value in record.items():
        if name in words and name != "model_type":
            yield (name,)
        if isinstance(value, dict):
            yield from ((name, *path) for path in paths(value, words))


def without(record: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    record = deepcopy(record)
    part = record
    for name in path[:-1]:
        part = part[name]
    del part[path[-1]]
    return record


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", TINY)
def test_a_field_that_is_left_out_is_what_the_class_makes_it(name: str, tmp_path: Path) -> None:
    made(name, tmp_path)
    of_class = TINY[name].config
    whole, tensors = json.loads((tmp_path / "config.json").read_text()), open_tensors(tmp_path)
    family = family_of(whole["model_type"])
    assert family is not None
    hooks = [field for spec in family.attention if spec.hook for field in HOOKS[spec.hook].fields]
    in_code = (Path(module.__file__).read_text() for module in (reading, positions, opening))
    asked_for = [family.model_dump_json(), *hooks, *in_code]
    words = set(re.findall(r"\w+", " ".join(asked_for)))
    all_of_it, compared = read(whole, family, tensors), 0
    assert all_of_it is not None
    for path in paths(whole, words):
        less = without(whole, path)
        found = read(less, family, tensors)
        if found is None:
            continue
        try:
            expected = read(of_class.from_dict(deepcopy(less)).to_dict(), family, tensors)
        except Exception:  # noqa: BLE001 (of whatever kind: then there is no such model)
            continue
        # With sizes that the tensors contradict there is no such model, and they speak for themselves.
        assert found == (all_of_it if expected is None else expected), ".".join(path)
        compared += 1
    assert compared > 0


def test_a_scheme_by_an_older_name_is_read_as_the_class_has_it(tmp_path: Path) -> None:
    """Before version 5 all of rotary positions lay beside each other, and patterns stood for lists."""
    settings = TINY["gemma3, text"].settings
    old = {
        **{name: value for name, value in settings.items() if name != "layer_types"},
        "model_type": "gemma3_text",
        "rope_theta": 2e5,
        "rope_local_base_freq": 3e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    }
    transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**settings)).save_pretrained(tmp_path)
    new = transformers.Gemma3TextConfig.from_dict(deepcopy(old)).to_dict()
    family = family_of("gemma3_text")
    assert family is not None
    found = read(old, family, open_tensors(tmp_path))
    assert found == read(new, family, open_tensors(tmp_path))
    (layers, _) = found
    parts = [part for layer in layers for part in layer[2] if isinstance(part, tuple)]
    assert len({str(part) for part in parts if part[0] == "Semantics"}) == 2


def test_windows_begin_at_a_layer(tmp_path: Path) -> None:
    settings = dict(TINY["qwen2"].settings) | {"sliding_window": 4, "use_sliding_window": True}
    settings |= {"max_window_layers": 1, "model_type": "qwen2"}
    made("qwen2", tmp_path)
    family = family_of("qwen2")
    assert family is not None
    found = Checkpoint("tiny", family, Settings(settings, "config.json"), open_tensors(tmp_path))
    assert [found.read(site).weights.semantics.window for site in found.sites] == [None, 4]


def test_lists_that_nothing_else_tells_must_be_there(tmp_path: Path) -> None:
    made("gpt_neo", tmp_path)
    drop_fields(tmp_path / "config.json", "attention_layers")
    with pytest.raises(DataError, match="attention_layers is missing"):
        opening.open_checkpoint(tmp_path)
