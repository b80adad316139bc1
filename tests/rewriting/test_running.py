"""Models that are run: what they read of a text, and which can be run here."""

import os
from pathlib import Path

import pytest
import torch

from checkpoints.tiny_marian import write_marian
from checkpoints.tiny_translators import translator_folder
from edited import set_fields
from rewriting.pairs_of_models import save_model, small_llama, tensors_of
from rewriting.test_calibration import bert, text_in
from small_checkpoints import cannot_be_run, gpt2_that_runs
from tolerances import assert_same
from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.core.checkpoints.stored_layers import AttentionSource
from triptych.core.models import EncoderDecoder, LanguageModel, ModelConfig, write_model
from triptych.errors import DataError, UsageError
from triptych.rewriting.functions import FoldOtherNorms
from triptych.rewriting.recipe import RewriteRecipe
from triptych.rewriting.whole_checkpoint import rewrite_checkpoint
from triptych.rewriting.whole_models import Original, open_original
from triptych.running.opening import TextReader, TransformersReader, Window, open_text_reader, why_not_run

transformers = pytest.importorskip("transformers", reason="it comes with the extra [dev]")


@pytest.mark.parametrize("most_tokens", [1, 63, 64, 65, 100, 150])
def test_a_language_model_predicts_so_many_tokens_of_a_text_each_from_all_before_it_in_its_window(
    most_tokens: int, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("What a piece of work is a man! " * 5, encoding="utf-8")
    model = open_text_reader(gpt2_that_runs(tmp_path / "gpt2"))
    windows = list(model.windows(text, most_tokens))
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "gpt2")(text.read_text())["input_ids"]
    assert [len(window.targets) for window in windows if window.targets is not None] == [
        min(64, most_tokens - start) for start in range(0, most_tokens, 64)
    ]
    for number, window in enumerate(windows):
        given, wanted = window.inputs["input_ids"][0].tolist(), window.targets
        assert wanted is not None
        assert given == ids[64 * number : 64 * number + len(given)]
        assert wanted.tolist() == ids[64 * number + 1 : 64 * number + 1 + len(given)]


def test_an_encoder_reads_lines_until_they_have_so_many_tokens(tmp_path: Path) -> None:
    model, text = open_text_reader(bert(tmp_path / "bert")), text_in(tmp_path)
    lengths = [len(line.split()) for line in text.read_text(encoding="utf-8").splitlines()]
    for lines in range(1, 5):
        most_tokens = sum(lengths[:lines])
        for tokens, expected in ((most_tokens, lines), (most_tokens + 1, lines + 1)):
            assert len(list(model.windows(text, tokens))) == expected


def test_without_transformers_what_we_run_ourselves_can_be_run_and_no_other_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    stack = {"num_layers": 1}
    config = ModelConfig.model_validate(
        {"d_model": 8, "d_ff": 8, "num_heads": 2, "encoder": stack, "decoder": stack}
    )
    (tmp_path / "ours").mkdir()
    write_model(EncoderDecoder.of(config, 9, 9), tmp_path / "ours")
    gpt2_that_runs(tmp_path / "gpt2")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert why_not_run(tmp_path / "ours") == why_not_run(tmp_path / "gpt2") == ""
    assert open_text_reader(tmp_path / "gpt2").by == "triptych"
    monkeypatch.setattr("triptych.core.checkpoints.stored_models.read_language_model", cannot_be_run)
    assert why_not_run(tmp_path / "ours") == ""
    said = "this family cannot be run; transformers, which would run it, is not installed: pip install"
    assert said in why_not_run(tmp_path / "gpt2")
    with pytest.raises(UsageError, match=said):
        open_text_reader(tmp_path / "gpt2")


def test_a_fault_of_ours_is_not_taken_for_a_model_that_cannot_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("shapes differ")

    folder = gpt2_that_runs(tmp_path / "gpt2")
    monkeypatch.setattr(LanguageModel, "hidden", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        open_original(folder, None)
    monkeypatch.setattr("triptych.core.checkpoints.stored_models.read_language_model", cannot_be_run)
    monkeypatch.setattr("transformers.GPT2LMHeadModel.forward", fail)
    said = "GPT2LMHeadModel does not run on token ids alone: shapes differ"
    assert open_original(folder, None) == f"the original cannot be run: {folder}: {said}"
    opened = open_original(folder, text_in(tmp_path))
    assert isinstance(opened, Original)
    with pytest.raises(DataError, match=said):
        opened.model.outputs(opened.windows[0])


def test_random_tokens_of_a_translator_whose_padding_comes_last_are_in_its_vocabulary(tmp_path: Path) -> None:
    write_marian(tmp_path, dtype=torch.float32)
    assert isinstance(open_original(tmp_path, None), Original)


def test_a_pipe_in_the_folder_of_a_model_is_not_opened_by_transformers(tmp_path: Path) -> None:
    folder = gpt2_that_runs(tmp_path / "gpt2")
    (folder / "generation_config.json").unlink(missing_ok=True)
    os.mkfifo(folder / "generation_config.json")
    with pytest.raises(DataError, match=r"not a regular file: .*generation_config\.json"):
        TransformersReader(folder)


def assert_outputs_and_inputs_agree(
    ours: TextReader, theirs: TextReader, window: Window, source: AttentionSource
) -> None:
    """What two models put out, and what their layers read."""
    assert_same(ours.outputs(window), theirs.outputs(window), kind="output")
    read = [model.inputs(window, source, source.sites) for model in (ours, theirs)]
    for site in source.sites:
        found, expected = (seen[site.name][-1] for seen in read)
        assert_same(found.x, expected.x, kind="output")
        assert (found.memory is None) == (expected.memory is None)
        if found.memory is not None and expected.memory is not None:
            assert_same(found.memory, expected.memory, kind="output")


def test_our_own_run_puts_out_what_transformers_does(tmp_path: Path) -> None:
    folder, text = gpt2_that_runs(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("What a piece of work is a man! " * 7, encoding="utf-8")
    ours, theirs = open_text_reader(folder), TransformersReader(folder)
    assert (ours.by, ours.kind) == ("triptych", theirs.kind)
    source = open_checkpoint(folder)
    pairs = [*zip(ours.windows(text, 200), theirs.windows(text, 200), strict=True)]
    pairs += zip(ours.random_windows(3), theirs.random_windows(3), strict=True)
    assert len(pairs) > 4
    for one, other in pairs:
        assert torch.equal(one.inputs["input_ids"], other.inputs["input_ids"])
        assert (one.targets is None) == (other.targets is None)
        assert_outputs_and_inputs_agree(ours, theirs, one, source)
    attended = [model.attention_outputs(source, pairs[0][0]) for model in (ours, theirs)]
    for (name, a), (same, b) in zip(*attended, strict=True):
        assert name == same
        assert_same(a, b, kind="output")


def test_an_encoder_decoder_puts_out_what_transformers_does(tmp_path: Path) -> None:
    folder, text = tmp_path / "model", tmp_path / "text.tsv"
    translator_folder(folder, "bart", forced_bos_token_id=1)
    text.write_text("w5 w9 w4\tw7\nw8\tw6 w6 w5\n", encoding="utf-8")
    ours, theirs = open_text_reader(folder), TransformersReader(folder)
    assert (ours.by, ours.kind) == ("triptych", theirs.kind)
    source = open_checkpoint(folder)
    for one, other in zip(ours.windows(text, 200), theirs.windows(text, 200), strict=True):
        assert torch.equal(one.inputs["input_ids"], other.inputs["input_ids"])
        assert torch.equal(one.inputs["decoder_input_ids"], other.inputs["decoder_input_ids"])
        assert one.targets is not None
        assert other.targets is not None
        assert torch.equal(one.targets, other.targets)
        assert_outputs_and_inputs_agree(ours, theirs, one, source)


@pytest.mark.parametrize(
    ("name", "read_as", "output"),
    [
        ("llama", "LlamaForCausalLM", "tokens"),
        ("bert", "BertForMaskedLM", "tokens"),
        ("bert, classes", "BertModel", "hidden states"),
        ("gpt2", "GPT2LMHeadModel", "tokens"),
    ],
)
def test_without_a_named_class_the_head_in_the_files_is_read(
    name: str, read_as: str, output: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
    bert = transformers.BertConfig(**sizes, vocab_size=40)
    gpt2 = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=40, tie_word_embeddings=False)
    made = {
        "llama": lambda: small_llama(tmp_path / name),
        "bert": lambda: save_model(tmp_path / name, bert, model="BertForMaskedLM"),
        "bert, classes": lambda: save_model(tmp_path / name, bert, model="BertForSequenceClassification"),
        "gpt2": lambda: save_model(tmp_path / name, gpt2, model="GPT2LMHeadModel"),
    }
    folder = made[name]()
    set_fields(folder / "config.json", architectures=None)
    model = open_text_reader(folder)
    assert isinstance(model, TransformersReader)
    assert type(model.model).__name__ == read_as
    assert model.output == output


def test_an_exact_fold_into_the_output_table_needs_no_named_class(tmp_path: Path) -> None:
    folder = small_llama(tmp_path / "a")
    set_fields(folder / "config.json", architectures=None)
    recipe = RewriteRecipe(step=(FoldOtherNorms(),))
    certificate = rewrite_checkpoint(str(folder), tmp_path / "b", recipe)
    assert certificate.tier == "rounding-exact"
    tables = [tensors_of(tmp_path / name)["lm_head.weight"] for name in ("a", "b")]
    assert not torch.equal(*tables)
