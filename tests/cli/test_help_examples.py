"""The examples under `--help` run: on tiny models that have the names in them."""

import shlex
import shutil
from importlib import import_module
from pathlib import Path

import pytest

import triptych as package
from command import Command
from small_checkpoints import gpt2_that_runs, llama
from tiny_recipe import text_recipe, write_sides
from triptych.cli.main import COMMANDS
from triptych.cli.verbs import read_verb
from triptych.demonstration import Interrupted
from triptych.training import runs
from triptych.training.progress import LineDisplay

TINY = """
name = "mine"
[data]
cache = ""
train = { source = "train.de", target = "train.en" }
valid = { source = "test.de", target = "test.en" }
[tokenizer]
vocab_size = 400
[model]
preset = "tiny"
encoder.num_layers = 1
decoder.num_layers = 1
[training]
max_steps = 2
warmup_steps = 1
"""
EXAMPLES = {name: read_verb(name).examples for name in COMMANDS}


@pytest.fixture
def home(small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with what the examples name."""
    pytest.importorskip("transformers", reason="it comes with the extra [dev]")
    for part, count in (("train", 200), ("test", 3)):
        write_sides(tmp_path, part, count)
    (tmp_path / "test.txt").write_text("What a piece of work is a man!\n" * 8)
    (tmp_path / "train.txt").write_text("What a piece of work is a man!\n" * 8)
    (tmp_path / "prompts.txt").write_text("ROMEO:\nJULIET:\n")
    (tmp_path / "mine.toml").write_text(TINY)
    shutil.copytree(small_run, tmp_path / "runs" / "mine")
    gpt2_that_runs(tmp_path / "gpt2")
    (tmp_path / "meta-llama").mkdir()
    llama(tmp_path / "meta-llama" / "Llama-3.2-1B")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def prepare(name: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only one command needs."""
    if name in ("verify", "evaluate"):
        package.load("gpt2", device="cpu").rewrite("truncate(rank=4)", out="gpt2-half", text="test.txt")
    if name == "diff":
        gpt2 = package.load("gpt2", device="cpu")
        gpt2.rewrite("fold_value_bias", out="gpt2-rewritten", compare=False)
        gpt2.rewrite("truncate(rank=4)", out="gpt2-half", compare=False)
    if name == "new":
        (home / "mine.toml").unlink()
    if name == "train":
        shutil.rmtree("runs")
    if name == "demo":  # tests/cli/test_demo.py runs it
        monkeypatch.setattr(package, "demo", lambda *_, **__: Interrupted(2))
    if name in ("serve", "explore"):  # their own tests do; here they would never end
        import_module(f"triptych.cli.{name}")  # its options are read of the real one
        monkeypatch.setattr(package, "serve", lambda *_, **__: None)
    if name == "fill":
        recipe = text_recipe(home / "test.txt", "masked-language-model", context=64)
        for folder in ("runs/tatoeba-mlm", "bert-base-uncased"):
            runs.train(recipe, Path(folder), LineDisplay())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "compare"])
def test_the_examples_of_a_command_run_in_their_order(
    name: str, home: Path, triptych: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(name, home, monkeypatch)
    for line in EXAMPLES[name]:
        before, _, command = line.rpartition(" | ")
        typed = shlex.split(before)[1].encode() + b"\n" if before else b""
        answer = triptych(*shlex.split(command)[1:], stdin=typed)
        assert answer.code == (130 if name == "demo" else 0), f"{line}: {answer.err}"


def test_the_examples_of_compare_run(triptych: Command, stand_in: Path) -> None:
    pytest.importorskip("scipy")
    pytest.importorskip("vl_convert")
    for line in EXAMPLES["compare"]:
        triptych(*shlex.split(line)[1:]).done()
