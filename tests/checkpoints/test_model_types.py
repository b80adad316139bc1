"""Configurations without a `model_type`: it is worked out from the class or the tensors, and said."""

from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from checkpoints.oracle import apart  # noqa: E402
from checkpoints.runs import made, outputs, some_ids, theirs  # noqa: E402
from edited import drop_fields, set_fields  # noqa: E402
from triptych.core.checkpoints.source import find_source  # noqa: E402
from triptych.core.checkpoints.stored_models import load_language_model  # noqa: E402
from triptych.errors import ConfigurationWarning, DataError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
BOTH = ["model_type", "architectures"]


@pytest.mark.parametrize(
    ("name", "fields", "by"),
    [
        ("llama", ["model_type"], "read as llama, by architectures (LlamaForCausalLM)"),
        ("gemma3, text", ["model_type"], "read as gemma3_text, by architectures (Gemma3ForCausalLM)"),
        ("roberta", ["model_type"], "read as roberta, by architectures (RobertaForMaskedLM)"),
        *(
            (name, BOTH, f"read as {name.partition(',')[0]}, by the names of its tensors")
            for name in ("gpt2", "bert", "bert, no head", "electra, generator", "distilbert")
        ),
    ],
)
@torch.no_grad()
def test_a_missing_model_type_is_worked_out_and_said(
    name: str, fields: list[str], by: str, tmp_path: Path
) -> None:
    other = made(name, tmp_path)
    drop_fields(tmp_path / "config.json", *fields)
    with pytest.warns(ConfigurationWarning) as said:
        model = load_language_model(tmp_path)
    assert [str(warning.message) for warning in said] == [
        f"{tmp_path / 'config.json'}: there is no model_type; {by}"
    ]
    ids = some_ids(first=4)
    assert apart(outputs(model(ids)), outputs(theirs(other, ids))) < 1e-10


def test_a_table_of_514_positions_is_that_of_roberta(tmp_path: Path) -> None:
    config = transformers.RobertaConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32, vocab_size=40,
        max_position_embeddings=514, type_vocab_size=1,
    )  # fmt: skip
    transformers.RobertaModel(config).save_pretrained(tmp_path)
    drop_fields(tmp_path / "config.json", *BOTH)
    assert find_source(tmp_path).record["model_type"] == "roberta"


def test_a_type_that_several_families_may_have_is_asked_for(tmp_path: Path) -> None:
    made("llama", tmp_path)
    drop_fields(tmp_path / "config.json", *BOTH)
    with pytest.raises(DataError, match=r"there is no model_type, .*llama, .* have such tensors\): add it"):
        load_language_model(tmp_path)


def test_code_that_a_configuration_names_is_not_run(tmp_path: Path) -> None:
    made("llama", tmp_path)
    (tmp_path / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    set_fields(tmp_path / "config.json", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    assert load_language_model(tmp_path).causal
    assert not (tmp_path / "ran").exists()
