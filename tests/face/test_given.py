"""What is given to `load` besides a model is used by everything that opens it, or refused."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from face.tiny import write_checkpoint
from small_checkpoints import byte_tokenizer
from triptych import DataError, UsageError, load
from triptych.core.models import LanguageModel, LanguageModelConfig

transformers = pytest.importorskip("transformers")
TEXT = "two young men are playing"
FAMILIES = Path(__file__).parents[2] / "src" / "triptych" / "core" / "checkpoints" / "families"


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    write_checkpoint("gpt2", tmp_path / "gpt2")
    return tmp_path / "gpt2"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A tokenizer that puts a token behind every text."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<end>"}
    byte_tokenizer(folder, "<pad>", "<end>", end="<end>", **names)
    return folder


def test_a_given_tokenizer_reads_texts_in_the_place_of_the_files(gpt2: Path, other: Path) -> None:
    own = [*load(gpt2).run(TEXT).ids]
    theirs = transformers.AutoTokenizer.from_pretrained(other)
    wanted = theirs(TEXT).input_ids
    assert wanted != own
    assert [*load(gpt2, tokenizer=other).run(TEXT).ids] == wanted
    assert [*load(gpt2, tokenizer=theirs).run(TEXT).ids] == wanted
    rewritten = load(gpt2, tokenizer=other).rewrite("truncate(rank=3)", compare=False)
    assert [*rewritten.run(TEXT).ids] == wanted
    assert [*load(gpt2, tokenizer=other).ablate("0.1").run(TEXT).ids] == wanted
    assert load(gpt2, tokenizer=other).check(TEXT).same_tokens


def test_a_folder_without_a_tokenizer_is_read_with_a_given_one(gpt2: Path, other: Path) -> None:
    for file in gpt2.glob("tokenizer*"):
        file.unlink()
    assert load(gpt2, tokenizer=other).run(TEXT).logits.isfinite().all()


@pytest.mark.parametrize(
    ("given", "said"),
    [("nowhere", "tokenizer: nowhere is no folder"), (5, "tokenizer: a int is none: give the folder of one")],
)
def test_what_is_no_tokenizer_is_refused(given: object, said: str, gpt2: Path) -> None:
    with pytest.raises(UsageError, match=said):
        load(gpt2, tokenizer=given)


def test_a_module_that_was_rewritten_reads_texts(gpt2: Path) -> None:
    torch.manual_seed(0)
    config = LanguageModelConfig(d_model=24, num_heads=4, num_layers=2, d_ff=32, context=32)
    model = load(LanguageModel.of(config, "decoder", 258).eval(), tokenizer=gpt2)
    before = model.run(TEXT).logits
    torch.testing.assert_close(model.rewrite("fold_value_bias").run(TEXT).logits, before)


def test_a_given_family_file_is_what_a_model_is_run_by(gpt2: Path, tmp_path: Path) -> None:
    said = (FAMILIES / "gpt2.toml").read_text()
    said = said.replace('model_types = ["gpt2"]\n', "").partition("[export]")[0]
    (tmp_path / "mine.toml").write_text(said)
    wanted = load(gpt2).run(TEXT).logits
    record = json.loads((gpt2 / "config.json").read_text())
    (gpt2 / "config.json").write_text(json.dumps({**record, "model_type": "nanogpt"}))
    model = load(gpt2, family=tmp_path / "mine.toml")
    assert torch.equal(model.run(TEXT).logits, wanted)
    rewritten = model.rewrite("fold_value_bias")
    assert rewritten.certificate is not None
    assert rewritten.certificate.end_to_end is not None
    torch.testing.assert_close(rewritten.run(TEXT).logits, wanted, rtol=1e-4, atol=1e-4)
    changed = model.ablate("0.1").rewrite("fold_value_bias", compare=False)
    assert torch.equal(changed[1, 0].W_Q, model[1, 0].W_Q)


def test_a_key_that_transformers_does_not_know_is_one_line_and_strict_refuses_it(gpt2: Path) -> None:
    wanted = load(gpt2).run(TEXT).logits
    record = json.loads((gpt2 / "config.json").read_text())
    strange = {f"note_{number}": number for number in range(9)}
    (gpt2 / "config.json").write_text(json.dumps({**record, **strange}))
    said = r"config\.json: note_0, .*, note_8 are not read by GPT-2 in transformers: they change nothing"
    with pytest.warns(UserWarning, match=said):
        found = load(gpt2).run(TEXT).logits
    assert torch.equal(found, wanted)
    with pytest.raises(UsageError, match=r"note_8 are not read .*; strict takes this for an error"):
        load(gpt2, strict=True).run(TEXT)


def test_notes_on_a_model_in_a_temporary_folder_name_its_source(gpt2: Path, tmp_path: Path) -> None:
    record = json.loads((gpt2 / "config.json").read_text())
    (gpt2 / "config.json").write_text(json.dumps({**record, "note_of_mine": 1}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rewritten = load(gpt2).rewrite("truncate(rank=3)")
        rewritten.run(TEXT)
        rewritten.rewrite("fold_value_bias", compare=False).inspect()
        load(gpt2).ablate("0.1").rewrite("truncate(rank=3)")
        at_first = len(caught)
        load(gpt2).rewrite("truncate(rank=3)", out=tmp_path / "out").run(TEXT)
    said = [str(one.message).partition(": note_of_mine")[0] for one in caught]
    assert {*said[:at_first]} == {str(gpt2 / "config.json")}
    assert {*said[at_first:]} == {str(gpt2 / "config.json"), str(tmp_path / "out" / "config.json")}


def test_a_key_that_the_class_reads_and_we_do_not_is_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path / "llama")
    record = json.loads((tmp_path / "llama" / "config.json").read_text())
    record["per_layer_config"] = {"0": {"num_attention_heads": 2}}
    (tmp_path / "llama" / "config.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match="per_layer_config may change what a model of Llama computes"):
        load(tmp_path / "llama").run(TEXT)


@pytest.mark.parametrize("kind", ["BertForQuestionAnswering", "BertForPreTraining"])
def test_heads_for_spans_and_for_pre_training_are_compared(kind: str, gpt2: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
    config = transformers.BertConfig(vocab_size=260, max_position_embeddings=130, **sizes)
    getattr(transformers, kind)(config).eval().save_pretrained(tmp_path / "bert")
    for file in gpt2.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "bert")
    rewritten = load(tmp_path / "bert").rewrite("truncate(rank=4)")
    assert rewritten.certificate is not None
    assert rewritten.certificate.end_to_end is not None
    if kind == "BertForPreTraining":
        assert load(tmp_path / "bert").check().logits < 1e-4
