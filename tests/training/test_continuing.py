"""Runs that go on with the language model of a checkpoint."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from checkpoints.tiny_models import TINY
from interrupting import SignalAt, assert_same_run
from small_checkpoints import gpt2_that_runs
from tiny_recipe import text_tree
from triptych.converting.engines import evaluate_text
from triptych.core.checkpoints.stored_models import load_language_model
from triptych.errors import DataError, TriptychError, UsageError
from triptych.running.opening import open_language_model
from triptych.training import ContinuedRecipe, read_recipe, resolve, runs
from triptych.training.metrics import read_metrics
from triptych.training.progress import LineDisplay
from triptych.training.recipe import with_values

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

LINES = [f"the {c} {a} sat on the mat" for c in ("red", "old", "tiny") for a in ("cat", "dog", "owl")] * 8


def recipe_of(
    folder: Path, checkpoint: Path, task: str = "language-model", **sections: dict[str, object]
) -> ContinuedRecipe:
    training = {
        "max_steps": 6, "batch_size": 4, "warmup_steps": 1, "save_every_steps": 2, "log_every_steps": 2,
    }  # fmt: skip
    tree = text_tree(folder, LINES, task, training=training, validation={"every_steps": 3})
    tree["model"] = {"checkpoint": str(checkpoint), "context": 16, **sections.get("model", {})}
    del tree["tokenizer"]
    recipe = resolve(tree)
    assert isinstance(recipe, ContinuedRecipe)
    return recipe


def small(name: str, folder: Path, **settings: Any) -> Path:
    """A tiny model of a family with a tokenizer of bytes and a few special tokens."""
    letters = ["<pad>", "<s>", "</s>", "<mask>", *sorted(ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), Decoder()
    torch.manual_seed(5)
    model_class = getattr(transformers, settings.pop("model", TINY[name].model))
    config = TINY[name].config(
        **{**TINY[name].settings, "vocab_size": len(letters) + 3, "tie_word_embeddings": True, **settings}
    )
    model_class(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "mask_token": "<mask>"}
    named |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run that went on with a GPT-2, beside it."""
    folder = tmp_path_factory.mktemp("continued")
    gpt2_that_runs(folder / "gpt2")
    (folder / "gpt2" / "README.md").write_text("of the checkpoint\n")
    runs.train(recipe_of(folder, folder / "gpt2"), folder / "run", LineDisplay())
    return folder / "run"


def test_the_run_is_a_checkpoint_of_its_family_that_transformers_reads(finished: Path) -> None:
    model, ids = load_language_model(finished), torch.arange(24).view(2, 12)
    other = transformers.AutoModelForCausalLM.from_pretrained(finished)
    with torch.no_grad():
        assert float((model(ids).logits - other(ids).logits).abs().max()) < 1e-5
    before = load_language_model(finished.parent / "gpt2")
    differing = [
        name
        for (name, one), other in zip(before.named_parameters(), model.parameters(), strict=True)
        if not torch.equal(one, other)
    ]
    assert "embeddings.table.weight" in differing
    assert "blocks.0.self_attention.projections.q_proj.weight" in differing
    assert "of the checkpoint" not in (finished / "README.md").read_text()


def test_the_run_learns_and_is_scored_as_its_last_validation_was(finished: Path) -> None:
    losses = [line["valid_loss"] for line in read_metrics(finished / "metrics.jsonl") if "valid_loss" in line]
    begun = evaluate_text(open_language_model(finished.parent / "gpt2", "cpu"), LINES[:9]).nats_per_token
    ended = evaluate_text(open_language_model(finished, "cpu"), LINES[:9]).nats_per_token
    assert losses[0] > losses[-1]
    assert ended < 0.8 * begun


def test_a_run_stopped_by_a_signal_and_resumed_is_bit_identical(finished: Path, tmp_path: Path) -> None:
    recipe = recipe_of(finished.parent, finished.parent / "gpt2")
    assert runs.train(recipe, tmp_path / "run", SignalAt(4, signal.SIGINT)).outcome.counters.step == 4
    runs.resume(tmp_path / "run", (), LineDisplay())
    assert_same_run(tmp_path / "run", finished)


def test_a_run_needs_its_checkpoint_no_longer_once_it_has_begun(finished: Path, tmp_path: Path) -> None:
    gpt2_that_runs(tmp_path / "gpt2")
    recipe = recipe_of(finished.parent, tmp_path / "gpt2")
    runs.train(recipe, tmp_path / "run", SignalAt(1, signal.SIGINT))
    (tmp_path / "gpt2").rename(tmp_path / "gone")
    runs.resume(tmp_path / "run", (), LineDisplay())
    assert_same_run(tmp_path / "run", finished)


def test_a_changed_configuration_is_another_model_and_not_gone_on_with(
    checkpoint: Path, tmp_path: Path
) -> None:
    runs.train(recipe_of(tmp_path, checkpoint), tmp_path / "run", SignalAt(1, signal.SIGINT))
    config = tmp_path / "run" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "layer_norm_epsilon": 1e-3}))
    with pytest.raises(TriptychError, match="changed since the run began: the model"):
        runs.resume(tmp_path / "run", (), LineDisplay())


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("language-model", {}),
    "gemma3, text": ("language-model", {}),
    "deepseek_v3": ("language-model", {}),
    "bert": ("masked-language-model", {"model": "BertForMaskedLM"}),
    "mpnet": ("masked-language-model", {"model": "MPNetForMaskedLM"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_models_of_other_families_and_encoders_are_gone_on_with(name: str, tmp_path: Path) -> None:
    task, settings = CASES[name]
    small(name, tmp_path / "made", **settings)
    runs.train(recipe_of(tmp_path, tmp_path / "made", task), tmp_path / "run", LineDisplay())
    runs.train(recipe_of(tmp_path, tmp_path / "made", task), tmp_path / "other", SignalAt(3, signal.SIGINT))
    runs.resume(tmp_path / "other", (), LineDisplay())
    assert_same_run(tmp_path / "other", tmp_path / "run")
    model, ids = load_language_model(tmp_path / "run"), torch.arange(4, 28).view(2, 12)
    class_name = settings.get("model", TINY[name].model)
    other = getattr(transformers, class_name).from_pretrained(tmp_path / "run").eval()
    with torch.no_grad():
        assert float((model(ids).logits - other(ids).logits).abs().max()) < 1e-4


@pytest.mark.slow
def test_a_checkpoint_in_bfloat16_is_trained_and_kept_in_float32(tmp_path: Path) -> None:
    small("llama", tmp_path / "made")
    transformers.LlamaForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.bfloat16).save_pretrained(
        tmp_path / "made"
    )
    runs.train(recipe_of(tmp_path, tmp_path / "made"), tmp_path / "run", LineDisplay())
    tensors = load_file(tmp_path / "run" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert other.dtype == torch.float32


@pytest.mark.parametrize(
    ("task", "changed", "error", "said"),
    [
        ("masked-language-model", {}, UsageError, "it needs a model of another kind"),
        ("language-model", {"context": 100}, UsageError, "model.context is 100, and .* has 64 positions"),
        ("language-model", {"checkpoint": "nowhere"}, DataError, "nowhere"),
        ("language-model", {"num_layers": 3}, UsageError, "unknown key model.num_layers"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line_and_leaves_no_run(
    task: str, changed: dict[str, object], error: type[Exception], said: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said) as raised:
        runs.train(recipe_of(tmp_path, checkpoint, task, model=changed), tmp_path / "run", LineDisplay())
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_a_sample_needs_a_prompt_where_no_token_begins_a_text(checkpoint: Path, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, checkpoint)
    with_sample = with_values(recipe, {"validation.sample_tokens": 4})
    with pytest.raises(UsageError, match=r"no token that begins a text: set validation.sample_prompt"):
        runs.train(with_sample, tmp_path / "run", LineDisplay())
    assert not (tmp_path / "run").exists()


def test_the_command_puts_a_checkpoint_in_the_place_of_a_recipes_model(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'task = "language-model"\n[data.train]\nfiles = ["a.txt"]\n[tokenizer]\nkind = "characters"\n'
        "[model]\nnum_layers = 3\ncontext = 64\n"
    )
    found = read_recipe(recipe, ["seed=7"], "gpt2")
    assert isinstance(found, ContinuedRecipe)
    assert (found.model.checkpoint, found.model.context, found.seed) == ("gpt2", 64, 7)
