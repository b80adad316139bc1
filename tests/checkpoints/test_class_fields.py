"""Keys that classes of `transformers` know: the file is what its source says, and holds all that is read."""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from checkpoints import class_fields as made  # noqa: E402
from checkpoints.runs import some  # noqa: E402
from checkpoints.tiny_models import TINY  # noqa: E402
from triptych.core.checkpoints.class_fields import is_known, known_keys  # noqa: E402
from triptych.core.storage.settings import Settings  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
# A class with other names of its fields, one with records within, one whose code takes older keys.
IN_EVERY_RUN = ["gpt2", "mpt", "falcon", "gemma3_text", "qwen2_vl", "llama"]
# Read where outputs are recorded, where a model is saved, and where all that a file says is gone through for
# tokens: what they say changes nothing of a model.
OF_NO_MODEL = {"output_cross_attentions", "output_router_logits", "auto_map", "intermediate_size of falcon"}
OF_WHOLE_CONFIGURATIONS = {"transformers.configuration_utils", "transformers.generation.configuration_utils"}
READS_IN_EVERY_RUN = ["llama", "gpt2", "bert", "t5", "gemma2", "falcon, a key each"]


def stored() -> Any:
    return json.loads(made.FILE.read_text(encoding="utf-8"))


def test_the_file_says_what_the_source_of_transformers_says() -> None:
    assert stored()["transformers"] == transformers.__version__, "python tests/checkpoints/class_fields.py"
    of_all = made.common()
    assert stored()["of_all"] == sorted(of_all)
    for name in IN_EVERY_RUN:
        configuration = transformers.CONFIG_MAPPING[name]
        found = {"keys": made.keys_of(configuration, of_all), "parts": made.parts_of(configuration)}
        assert stored()["classes"][name] == found, "python tests/checkpoints/class_fields.py"


@pytest.mark.slow
def test_the_whole_file_says_what_the_source_of_transformers_says() -> None:
    assert made.FILE.read_text(encoding="utf-8") == made.made(), "python tests/checkpoints/class_fields.py"


def test_keys_are_those_of_the_record_that_is_read() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 8}
    whole = Settings({"model_type": "gemma3", "text_config": text}, "config.json")
    assert "query_pre_attn_scalar" in (known_keys(whole.below("text_config")) or ())
    del text["model_type"]  # which the whole then tells
    assert "query_pre_attn_scalar" in (known_keys(whole.below("text_config").over({"head_dim": 4})) or ())
    assert "rope_interleaved" not in (known_keys(Settings({"model_type": "llama"}, "config.json")) or ())
    assert known_keys(Settings({"model_type": "openelm"}, "config.json")) is None


def test_a_key_within_a_record_is_known_where_both_are() -> None:
    assert is_known("rope_parameters.factor", {"rope_parameters", "factor"})
    assert not is_known("rope_parameters.finetuned", {"rope_parameters", "factor"})


@contextmanager
def reads(record: set[tuple[str, str]]) -> Iterator[None]:
    """While entered, collect what is read of configurations, there or not, with their `model_type`.

    What checks, copies and writes whole configurations reads every field, and makes nothing of it.
    """
    own = transformers.PreTrainedConfig.__getattribute__

    def read(configuration: Any, name: str) -> Any:
        by = sys._getframe(1).f_globals["__name__"]
        if by.startswith("transformers.") and by not in OF_WHOLE_CONFIGURATIONS:
            record.add((type(configuration).model_type, name))
        return own(configuration, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.PreTrainedConfig, "__getattribute__", read)
        yield


@pytest.mark.parametrize("name", some(TINY, READS_IN_EVERY_RUN))
def test_all_that_a_model_reads_of_its_configuration_is_known(name: str, tmp_path: Path) -> None:
    found = set[tuple[str, str]]()
    configuration = TINY[name].configured()
    configuration.save_pretrained(tmp_path)
    with warnings.catch_warnings(), reads(found), torch.inference_mode():
        model_class = getattr(transformers, TINY[name].model)
        model = model_class(type(configuration).from_pretrained(tmp_path)).eval()
        ids = torch.tensor([[5, 6, 7, 8, 9]])
        if model.main_input_name == "input_ids" and not hasattr(configuration, "vision_config"):
            more = {"decoder_input_ids": ids} if configuration.is_encoder_decoder else {}
            model(ids, **more)
    unknown = {
        f"{key} of {model_type}"
        for model_type, key in found
        if (keys := known_keys(Settings({"model_type": model_type}, "config.json"))) is not None
        and {key, f"encoder_{key}", f"decoder_{key}"}.isdisjoint(keys)  # a half is asked without the word
        and not key.startswith("__")
        and not hasattr(transformers.PreTrainedConfig, key)
    }
    assert not {told for told in unknown if OF_NO_MODEL.isdisjoint((told, told.partition(" ")[0]))}
