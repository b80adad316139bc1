"""`triptych shortlist`, and the commands that take what it writes."""

from pathlib import Path

import pytest

from command import Command
from tiny_recipe import write_sides
from triptych import load
from triptych.errors import UsageError
from triptych.running.text.shortlists import read_shortlist

MARIAN = Path(__file__).parents[3] / "shared" / "checkpoints" / "marian-multi30k"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a text of forty pairs."""
    monkeypatch.chdir(tmp_path)
    write_sides(tmp_path, "train", 40)
    return tmp_path


def write_all_tokens(model: Path) -> None:
    """A shortlist that forbids nothing."""
    tokens = load(model).reader.tokenizers.target.vocabulary
    Path("all.txt").write_text(f"\t{' '.join(tokens)}\n", encoding="utf-8")


def test_a_run_is_listed_from_its_own_text_or_another_and_translates_within_the_list(
    triptych: Command, small_run: Path
) -> None:
    triptych("shortlist", small_run, "--out", "own.txt", "--most", "5", "--json").done()
    answer = triptych(
        "shortlist", small_run, "--source", "train.de", "--target", "train.en", "-o", "list.txt"
    )
    assert "written: list.txt. A held-out sentence may use" in answer.err
    triptych("translate", small_run, "train.de", "--shortlist", "list.txt", "--json").done()
    run = load(small_run, shortlist="list.txt")
    tokenizers = run.reader.tokenizers
    listed = read_shortlist(Path("list.txt"), tokenizers)
    for line in run.translate(Path("train.de").read_text().splitlines()):
        (ids,) = tokenizers.source.encode([line.source])
        allowed = set(tokenizers.target.pieces(listed.of([*ids, tokenizers.source.eos_id]).tolist()))
        assert set(line.candidates[0].pieces) <= allowed


@pytest.mark.slow  # translates four times
def test_a_list_of_all_tokens_changes_no_text_in_either_engine(triptych: Command, small_run: Path) -> None:
    write_all_tokens(small_run)
    for engine in ("triptych", "ctranslate2"):
        if engine == "ctranslate2":
            pytest.importorskip("ctranslate2", reason="needs CTranslate2")
        asked = "translate", small_run, "train.de", "--engine", engine
        assert triptych(*asked, "--shortlist", "all.txt").out == triptych(*asked).out


def test_ctranslate2_uses_the_list_that_convert_writes(triptych: Command, small_run: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2", reason="needs CTranslate2")
    tokenizers = load(small_run).reader.tokenizers
    some = [tokenizers.target.vocabulary[i] for i in (70, 80, 90, tokenizers.target.eos_id)]
    Path("some.txt").write_text(f"\t{' '.join(some)}\n", encoding="utf-8")
    asked = "convert", small_run, "--shortlist", "some.txt", "--out", "converted", "--to"
    triptych(*asked, "hf").refused("no place for a shortlist")
    triptych(*asked, "ctranslate2").done()
    assert "use_vmap=True" in Path("converted/README.md").read_text()
    source = [tokenizers.source.vocabulary[i] for i in tokenizers.source.encode(["Vier Euro."])[0]]
    (found,) = ctranslate2.Translator("converted").translate_batch([source], use_vmap=True, beam_size=1)
    assert set(found.hypotheses[0]) <= set(some)
    # CTranslate2 gives all sentences of a batch the tokens of each: here a line is alone in its batch.
    load(small_run).shortlist("list.txt", "train.de", "train.en", most=4, frequent=9)
    engine, ours = (
        load(small_run, engine=name, shortlist="list.txt") for name in ("ctranslate2", "triptych")
    )
    for line in Path("train.de").read_text().splitlines()[:8]:
        assert engine.translate(line).text == ours.translate(line, stop="full").text


@pytest.mark.skipif(not MARIAN.is_dir(), reason="no trained checkpoints here")
def test_ctranslate2_takes_no_list_where_it_would_mix_up_the_start_of_outputs() -> None:
    pytest.importorskip("ctranslate2", reason="needs CTranslate2")
    write_all_tokens(MARIAN)
    with pytest.raises(UsageError, match="mixes up special tokens"):
        load(MARIAN, engine="ctranslate2", shortlist="all.txt").translate("A man.")
    assert load(MARIAN, shortlist="all.txt").translate("A man.").text == load(MARIAN).translate("A man.").text


def test_what_does_not_go_together_is_refused(small_run: Path) -> None:
    with pytest.raises(UsageError, match="belong together"):
        load(small_run).shortlist("list.txt", "train.de")
    with pytest.raises(UsageError, match=r"train\.tsv and train\.txt must be files of lines"):
        load(small_run).shortlist("list.txt", "train.tsv", "train.txt")
    write_all_tokens(small_run)
    with pytest.raises(UsageError, match="without a shortlist"):
        load(small_run, shortlist="all.txt").edit("cross.*", "z", lambda z: z).translate("Vier.")
    assert not Path("list.txt").exists()
