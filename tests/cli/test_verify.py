"""`triptych verify`: what holds, what does not, and how that is said."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from command import Command
from small_checkpoints import LAYERS, gpt2, gpt2_that_runs
from triptych.rewriting.checkpoint import rewrite_checkpoint
from triptych.rewriting.recipe import RewriteRecipe
from triptych.rewriting.steps import FoldNorm
from triptych.rewriting.truncation import Truncate


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `source` and what was made of it, `out`."""
    folder = tmp_path_factory.mktemp("rewritten")
    recipe = RewriteRecipe(step=(FoldNorm(), Truncate(rank=5)))
    rewrite_checkpoint(str(gpt2(folder / "source")), folder / "out", recipe)
    return folder


@pytest.fixture
def place(rewritten: Path, tmp_path: Path) -> Path:
    """The same, to be spoiled; the certificate still names the source where it was."""
    shutil.copytree(rewritten, tmp_path / "place")
    return tmp_path / "place"


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


def test_what_holds_is_said_claim_by_claim(
    triptych: Command, rewritten: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    answer = triptych("verify", rewritten / "out", "--against", rewritten / "source")
    assert answer.code == 0
    assert answer.err == ""
    for claim in (
        "the certificate is as it was written",
        "other files as written",
        "tensors as written",
        "tensors of ",
        "errors measured on the probes",
        "of its tier, and within its bounds",
    ):
        assert claim in answer.out
    assert "NO" not in answer.out
    assert f"{LAYERS} layers" in answer.out


def test_the_certificate_itself_may_be_named(triptych: Command, rewritten: Path) -> None:
    answer = triptych("verify", rewritten / "out" / "certificate.json", "--json")
    assert answer.code == 0, answer.out
    assert len(json.loads(answer.out)["checks"]) == 7


def test_the_original_is_found_where_the_certificate_says(triptych: Command, rewritten: Path) -> None:
    record = json.loads(triptych("verify", rewritten / "out", "--json").out)
    assert record["held"] is True
    assert {frozenset(check) for check in record["checks"]} == {frozenset({"claim", "held", "found"})}
    assert f"tensors of {rewritten / 'source'}" in [check["claim"] for check in record["checks"]]


def test_without_an_original_what_is_there_is_checked(triptych: Command, tmp_path: Path) -> None:
    recipe = RewriteRecipe(step=(FoldNorm(),))
    rewrite_checkpoint(str(gpt2(tmp_path / "source")), tmp_path / "out", recipe)
    (tmp_path / "source").rename(tmp_path / "elsewhere")
    record = json.loads(triptych("verify", tmp_path / "out", "--json").out)
    assert record["held"] is True
    assert len(record["checks"]) == 3
    (tmp_path / "text.txt").write_text("text")
    answer = triptych("verify", tmp_path / "out", "--text", tmp_path / "text.txt")
    assert answer.code == 2
    assert "--text compares two models: give the original with --against" in answer.err
    assert triptych("verify", tmp_path / "out", "--against", tmp_path / "elsewhere").code == 0


def test_a_flipped_bit_is_exit_code_1_and_named(
    triptych: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    path = place / "out" / "model.safetensors"
    before = {name: tensor.clone() for name, tensor in load_file(path).items()}
    flip_a_bit(path)
    answer = triptych("verify", place / "out")
    assert answer.code == 1
    assert "NO" in answer.out
    (changed,) = (name for name, tensor in load_file(path).items() if not tensor.equal(before[name]))
    assert f"{changed} was changed" in answer.out
    assert "1 of 4 claims do not hold: tensors as written" in answer.err
    assert answer.err.count("\n") == 1


def test_a_claim_that_fails_is_exit_code_1_as_json_too(triptych: Command, place: Path) -> None:
    flip_a_bit(place / "source" / "model.safetensors")
    answer = triptych("verify", place / "out", "--against", place / "source", "--json")
    assert answer.code == 1
    assert answer.err == ""
    record = json.loads(answer.out)
    assert record["held"] is False
    assert [check["claim"] for check in record["checks"] if not check["held"]] == [
        f"tensors of {place / 'source'}"
    ]


def test_a_changed_certificate_is_one_line(triptych: Command, place: Path) -> None:
    path = place / "out" / "certificate.json"
    path.write_text(path.read_text().replace('"tier": "bounded"', '"tier": "bit-exact"', 1))
    answer = triptych("verify", place / "out")
    assert answer.code == 1
    assert "changed since it was written" in answer.err
    assert answer.err.count("\n") == 1
    assert answer.out == ""


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["source"], 1, "certificate.json"),
        (["nothing"], 1, "nothing"),
        (["out", "--against", "nothing"], 1, "nothing"),
        (["out", "--against", "source", "--text", "no.txt"], 2, "no.txt: No such file"),
        (["out", "--family", "no.toml"], 2, "no.toml: No such file"),
    ],
)
def test_what_cannot_be_tried_is_one_line(
    triptych: Command,
    rewritten: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    reason: str,
) -> None:
    monkeypatch.chdir(rewritten)
    answer = triptych("verify", *arguments)
    assert answer.code == code, answer
    assert reason in answer.err
    assert answer.err.count("\n") == 1
    assert answer.out == ""


def test_whole_models_are_compared_again_on_the_text(triptych: Command, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="it comes with the extra [dev]")
    source, text = gpt2_that_runs(tmp_path / "source"), tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 5)
    recipe = RewriteRecipe(step=(Truncate(rank=5),))
    found = rewrite_checkpoint(str(source), tmp_path / "out", recipe, text=text)
    assert found.end_to_end is not None
    record = json.loads(triptych("verify", tmp_path / "out", "--text", text, "--json").out)
    assert record["held"] is True
    assert record["checks"][-1]["claim"] == "whole models compared"
    assert f"{found.end_to_end.tokens:,} tokens" in record["checks"][-1]["found"]
    other = tmp_path / "other.txt"
    other.write_text("Whether 'tis nobler in the mind to suffer\n" * 5)
    answer = triptych("verify", tmp_path / "out", "--text", other)
    assert answer.code == 1
    assert "do not hold: inputs kept of the text" in answer.err
    assert "whole models compared" in answer.out
