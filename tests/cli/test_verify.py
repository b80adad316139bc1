"""`triptych verify`: what holds, what does not, and how that is said."""

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from command import Command
from small_checkpoints import LAYERS, cannot_be_run, gpt2, gpt2_that_runs
from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.errors import DataError
from triptych.rewriting.calibration import MOST_TOKENS
from triptych.rewriting.certificate import card, read_certificate
from triptych.rewriting.functions import FoldNorm, Truncate
from triptych.rewriting.on_text import Deviations, compare_outputs
from triptych.rewriting.recipe import RewriteRecipe
from triptych.rewriting.verification import check_models
from triptych.rewriting.whole_checkpoint import rewrite_checkpoint
from triptych.running.opening import open_text_reader


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
    answer = triptych("verify", rewritten / "out", "--against", rewritten / "source").done()
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
    certificate = read_certificate(rewritten / "out")
    assert answer.out.splitlines()[0] == certificate.outcome
    assert card(certificate).splitlines()[2] == f"**{certificate.outcome}**"


def test_a_card_of_an_older_version_holds_and_a_changed_figure_in_it_does_not(
    triptych: Command, rewritten: Path, place: Path
) -> None:
    certificate = read_certificate(rewritten / "out")
    heading, _, *paragraphs = card(certificate).split("\n\n")
    older = "\n\n".join([heading, *paragraphs])
    for now, then in (
        ("another function; the first line says how far from the first", "another function, near the first"),
        (
            "Without them, each layer with widths of its own, the attention would have",
            "As a run of triptych, where each layer has its own widths, the attention would have",
        ),
    ):
        assert now in older
        older = older.replace(now, then)
    readme = place / "out" / "README.md"
    readme.write_text(f"# A model\n\n{older}", encoding="utf-8")
    triptych("verify", place / "out").done()
    readme.write_text(older.replace("of its size", "of twice its size"), encoding="utf-8")
    checks = triptych("verify", place / "out", "--json").record(code=1)["checks"]
    assert [(one["claim"], one["found"]) for one in checks if one["held"] is False] == [
        ("other files as written", "README.md does not say what the certificate does")
    ]


def test_the_certificate_itself_may_be_named(triptych: Command, rewritten: Path) -> None:
    record = triptych("verify", rewritten / "out" / "certificate.json", "--json").record()
    claims = [check["claim"] for check in record["checks"]]
    assert len(claims) == len(set(claims)) > 10


def test_the_original_is_found_where_the_certificate_says(triptych: Command, rewritten: Path) -> None:
    record = triptych("verify", rewritten / "out", "--json").record()
    assert record["held"] is True
    assert {frozenset(check) for check in record["checks"]} == {frozenset({"claim", "held", "found"})}
    assert f"tensors of {rewritten / 'source'}" in [check["claim"] for check in record["checks"]]


def test_without_an_original_what_is_there_is_checked(triptych: Command, tmp_path: Path) -> None:
    recipe = RewriteRecipe(step=(FoldNorm(),))
    rewrite_checkpoint(str(gpt2(tmp_path / "source")), tmp_path / "out", recipe)
    (tmp_path / "source").rename(tmp_path / "elsewhere")
    record = triptych("verify", tmp_path / "out", "--json").record()
    assert record["held"] is True
    assert [check["held"] for check in record["checks"]] == [True, True, True, None]
    (tmp_path / "text.txt").write_text("text")
    answer = triptych("verify", tmp_path / "out", "--text", tmp_path / "text.txt")
    answer.refused("--text needs the original: give it with --against")
    triptych("verify", tmp_path / "out", "--against", tmp_path / "elsewhere").done()


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
    assert "1 of 5 claims do not hold: tensors as written" in answer.err
    assert answer.err.count("\n") == 1


def test_a_claim_that_fails_is_exit_code_1_as_json_too(triptych: Command, place: Path) -> None:
    flip_a_bit(place / "source" / "model.safetensors")
    answer = triptych("verify", place / "out", "--against", place / "source", "--json")
    assert answer.err == ""
    record = answer.record(code=1)
    assert record["held"] is False
    assert [check["claim"] for check in record["checks"] if check["held"] is False] == [
        f"tensors of {place / 'source'}"
    ]


def test_a_changed_certificate_is_one_line(triptych: Command, place: Path) -> None:
    path = place / "out" / "certificate.json"
    path.write_text(path.read_text().replace('"tier": "bounded"', '"tier": "bit-exact"', 1))
    triptych("verify", place / "out").refused("was changed after it was written", code=1)


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["source"], 2, "certificate.json"),
        (["nothing"], 2, "nothing"),
        (["out", "--against", "nothing"], 1, "nothing"),
        (["out", "--against", "source", "--text", "no.txt"], 2, "no.txt does not exist"),
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


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `source`, `text.txt`, and `out` and `drawn`: compared on that, and on random tokens."""
    pytest.importorskip("transformers", reason="it comes with the extra [dev]")
    folder = tmp_path_factory.mktemp("compared")
    source = str(gpt2_that_runs(folder / "source"))
    (folder / "text.txt").write_text("To be, or not to be, that is the question.\n" * 5)
    recipe = RewriteRecipe(step=(Truncate(rank=5),))
    rewrite_checkpoint(source, folder / "out", recipe, text=folder / "text.txt")
    rewrite_checkpoint(source, folder / "drawn", recipe)
    return folder


def text_of(compared: Path, kind: str) -> Path | None:
    """What the models were compared on; None for random tokens."""
    return compared / "text.txt" if kind == "out" else None


@pytest.fixture(scope="module")
def measured(compared: Path) -> dict[str, Deviations]:
    """What both models give now, on the text and on random tokens."""
    found = {}
    for kind in ("out", "drawn"):
        one, other = open_text_reader(compared / "source"), open_text_reader(compared / kind)
        text, seed = text_of(compared, kind), read_certificate(compared / kind).probes.seed
        windows = one.random_windows(seed) if text is None else one.windows(text, MOST_TOKENS)
        found[kind] = compare_outputs(one, other, windows)
    return found


def whole_models(triptych: Command, *arguments: object) -> dict[str, Any]:
    """The last claim of all, as JSON."""
    answer = triptych("verify", *arguments, "--json")
    found: dict[str, Any] = json.loads(answer.out)["checks"][-1]
    assert found["claim"] == "whole models compared"
    assert answer.code == (1 if found["held"] is False else 0)
    return found


def test_whole_models_are_compared_again_on_the_text(
    triptych: Command, compared: Path, tmp_path: Path
) -> None:
    certified = read_certificate(compared / "out").end_to_end
    assert certified is not None
    # The same text by another name.
    text = Path(shutil.copy(compared / "text.txt", tmp_path / "other.txt"))
    record = triptych("verify", compared / "out", "--text", text, "--json").record()
    assert record["held"] is True
    assert record["checks"][-1]["claim"] == "whole models compared"
    assert f"{certified.tokens:,} tokens" in record["checks"][-1]["found"]


def test_a_text_that_models_were_not_compared_on_is_refused(
    triptych: Command, compared: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(f"{(compared / 'text.txt').read_text()}one more line\n")
    said = f"{text} is another text than both models were compared on: that was text.txt"
    triptych("verify", compared / "out", "--text", text).refused(said)
    said = "the models were compared on random tokens: leave out --text"
    triptych("verify", compared / "drawn", "--text", compared / "text.txt").refused(said)


def test_a_comparison_that_nobody_gave_the_text_of_is_said_not_to_be_tried(
    triptych: Command, compared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = whole_models(triptych, compared / "out")
    assert found["held"] is None
    assert found["found"] == "not tried again: give the text, text.txt, with --text"
    monkeypatch.setenv("COLUMNS", "160")
    answer = triptych("verify", compared / "out").done()
    (row,) = [line for line in answer.out.splitlines() if "whole models compared" in line]
    assert "not tried" in row
    assert "yes" not in row


def test_a_comparison_without_the_original_is_said_not_to_be_tried(
    triptych: Command, compared: Path, tmp_path: Path
) -> None:
    out = sealed_anew(compared / "drawn", tmp_path / "out", source="nowhere")
    found = whole_models(triptych, out)
    assert found["held"] is None
    assert found["found"] == "not tried again: give the original with --against"


def test_random_tokens_are_drawn_again_without_being_asked_for(triptych: Command, compared: Path) -> None:
    certified = read_certificate(compared / "drawn").end_to_end
    assert certified is not None
    assert certified.text_sha256 is None
    found = whole_models(triptych, compared / "drawn")
    assert found["held"] is True
    assert f"{certified.tokens:,} tokens" in found["found"]
    assert f"logits within {certified.worst_logit:.3g}" in found["found"]


def test_what_cannot_be_run_here_is_said_not_to_be_tried(
    triptych: Command, compared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert whole_models(triptych, compared / "drawn")["held"]  # by ourselves
    monkeypatch.setattr("triptych.core.checkpoints.stored_models.read_language_model", cannot_be_run)
    found = whole_models(triptych, compared / "drawn")
    assert found["held"] is None
    assert "transformers, which would run it, is not installed" in found["found"]


def test_an_original_that_cannot_be_loaded_is_said_not_to_be_tried(
    triptych: Command, compared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise DataError("it cannot be loaded")

    monkeypatch.setattr("triptych.rewriting.verification.open_text_reader", refuse)
    found = whole_models(triptych, compared / "drawn")
    assert (found["held"], "it cannot be loaded" in found["found"]) == (None, True)
    triptych("verify", compared / "out", "--text", compared / "text.txt").refused(
        "it cannot be loaded", code=1
    )


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("out", "worst_logit", "logits"),
        ("out", "divergence_nats", "divergence"),
        ("out", "loss_before_nats", "loss before"),
        ("out", "loss_after_nats", "loss after"),
        ("out", "tokens", "tokens"),
        ("drawn", "worst_logit", "logits"),
        ("drawn", "divergence_nats", "divergence"),
        ("drawn", "tokens", "tokens"),
    ],
)
@pytest.mark.parametrize("way", [1, -1])
def test_a_digit_of_what_was_measured_of_whole_models_is_noticed(
    compared: Path,
    measured: dict[str, Deviations],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    name: str,
    said: str,
    way: int,
) -> None:
    certificate = read_certificate(compared / kind)
    certified = certificate.end_to_end
    assert certified is not None
    value = getattr(certified, name)
    # The second digit that counts; of a number of tokens the last.
    changed = value + way * (1 if name == "tokens" else 10 ** (math.floor(math.log10(value)) - 1))
    assert value > 0
    told = certificate.model_copy(update={"end_to_end": certified.model_copy(update={name: changed})})
    # Both models ran once; what they gave is held against each certificate.
    monkeypatch.setattr("triptych.rewriting.verification.compare_outputs", lambda *_: measured[kind])
    source = open_checkpoint(compared / "source")
    (found,) = check_models(told, compared / "source", compared / kind, source, text_of(compared, kind))
    assert found.held is False
    assert said in found.found
    assert "certified" in found.found
    assert ";" not in found.found


@pytest.mark.parametrize("name", ["loss_before_nats", "loss_after_nats"])
def test_a_loss_that_was_left_out_is_noticed(
    triptych: Command, compared: Path, tmp_path: Path, name: str
) -> None:
    certified = read_certificate(compared / "out").end_to_end
    assert certified is not None
    out = sealed_anew(
        compared / "out", tmp_path / "out", end_to_end=certified.model_copy(update={name: None})
    )
    found = whole_models(triptych, out, "--text", compared / "text.txt")
    assert found["held"] is False
    assert "certified none" in found["found"]


def test_rounding_where_nothing_else_moves_is_held_against_by_its_size(
    triptych: Command, compared: Path, tmp_path: Path
) -> None:
    rewrite_checkpoint(str(compared / "source"), tmp_path / "exact", RewriteRecipe(step=(FoldNorm(),)))
    certified = read_certificate(tmp_path / "exact").end_to_end
    assert certified is not None
    for worst, held in ((certified.worst_logit * 1.2, True), (certified.worst_logit + 1e-3, False)):
        told = certified.model_copy(update={"worst_logit": worst})
        out = sealed_anew(tmp_path / "exact", tmp_path / f"{held}", end_to_end=told)
        assert whole_models(triptych, out)["held"] is held


def test_a_certificate_from_before_texts_had_hashes_is_still_read(
    triptych: Command, compared: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(compared / "out", out)
    record = json.loads((out / "certificate.json").read_text())
    del record["sha256"], record["end_to_end"]["text_sha256"]
    plain = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    record["sha256"] = hashlib.sha256(plain.encode()).hexdigest()
    (out / "certificate.json").write_text(json.dumps(record))
    assert whole_models(triptych, out, "--text", compared / "text.txt")["held"] is True
    other = tmp_path / "other.txt"
    other.write_text("Whether 'tis nobler in the mind to suffer\n" * 6)
    assert whole_models(triptych, out, "--text", other)["held"] is False


def sealed_anew(folder: Path, place: Path, **changed: object) -> Path:
    """A copy whose certificate has other entries, with a seal that fits them."""
    shutil.copytree(folder, place)
    forged = read_certificate(folder).model_copy(update=changed).sealed()
    (place / "certificate.json").write_bytes(forged.as_json())
    (place / "README.md").write_text(card(forged))
    return place
