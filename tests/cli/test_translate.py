import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from command import Command
from triptych import load

SENTENCES = ["Das Buch kostet drei Euro.", "", "Es ist halb vier.", "Heute ist Montag.", "Vier."]


def test_lines_come_out_in_order_and_an_empty_line_stays_empty(triptych: Command, small_run: Path) -> None:
    answer = triptych("translate", small_run, stdin="\n".join(SENTENCES).encode() + b"\n").done()
    expected = [translation.text for translation in load(small_run).translate(SENTENCES)]
    assert answer.out.split("\n")[:-1] == expected
    assert expected[1] == ""
    assert any(expected)


def test_a_file_translates_like_standard_input_and_an_output_file_holds_the_same(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    text = "\n".join(SENTENCES) + "\n"
    (tmp_path / "in.txt").write_text(text)
    piped = triptych("translate", small_run, stdin=text.encode())
    from_file = triptych("translate", small_run, tmp_path / "in.txt", "--out", tmp_path / "out.txt").done()
    assert from_file.out == ""
    assert (tmp_path / "out.txt").read_text() == piped.out


def test_windows_line_ends_are_not_part_of_the_text(triptych: Command, small_run: Path) -> None:
    unix = triptych("translate", small_run, stdin=b"Vier.\nHeute ist Montag.\n")
    windows = triptych("translate", small_run, stdin=b"Vier.\r\nHeute ist Montag.\r\n")
    assert windows == unix


def test_empty_input_gives_empty_output(triptych: Command, small_run: Path) -> None:
    assert triptych("translate", small_run, "--engine", "triptych", stdin=b"") == (0, "", "")


def test_a_paragraph_is_translated_sentence_by_sentence_and_keeps_its_white_space(
    triptych: Command, small_run: Path
) -> None:
    first, second = (one.text for one in load(small_run).translate(["Vier.", "Heute ist Montag."]))
    paragraph = b"  Vier.\t Heute ist Montag. \n"
    assert triptych("translate", small_run, stdin=paragraph).out == f"  {first}\t {second} \n"
    record = triptych("translate", small_run, "--json", "--attention", "cross.1.0", stdin=paragraph).record()
    assert record["pieces"] == 2
    assert "attention" not in record
    assert [part["source"] for part in record["sentences"]] == ["Vier.", "Heute ist Montag."]
    assert [part["text"] for part in record["sentences"]] == [first, second]
    assert all(len(part["attention"]) == 1 for part in record["sentences"])
    assert triptych("translate", small_run, "--json", "--no-split", stdin=paragraph).record()["pieces"] == 1


def test_a_sentence_past_the_limit_is_translated_in_pieces_and_reported(
    triptych: Command, small_run: Path
) -> None:
    long_line = ", ".join(["das Buch hat dreiundfünfzig Euro gekostet"] * 12)
    answer = triptych("translate", small_run, "--json", stdin=f"Vier.\n{long_line}\n".encode()).done()
    short, long = (json.loads(line) for line in answer.out.splitlines())
    assert short["pieces"] == 1
    assert long["pieces"] > 1
    said = f"line 2: longer than the limit of 40 tokens, translated in {long['pieces']} pieces"
    assert said in answer.err


def test_n_best_gives_that_many_different_translations_with_falling_scores(
    triptych: Command, small_run: Path
) -> None:
    answer = triptych("translate", small_run, "--n-best", 3, "--beam", 4, stdin=b"Vier.\n")
    rows = [line.split(" ||| ") for line in answer.out.splitlines()]
    assert [row[0] for row in rows] == ["1", "1", "1"]
    scores = [float(row[2]) for row in rows]
    assert scores == sorted(scores, reverse=True)


def test_an_empty_line_has_one_translation_among_n_best_and_in_json(
    triptych: Command, small_run: Path
) -> None:
    answer = triptych("translate", small_run, "--n-best", 2, stdin=b"\nVier.\n")
    lines = answer.out.splitlines()
    assert lines[0] == "1 |||  ||| 0.0000"
    assert [line.split(" ||| ")[0] for line in lines] == ["1", "2", "2"]
    record = triptych("translate", small_run, "--json", stdin=b"\n").record()
    assert record["candidates"] == [
        {"text": "", "score": 0.0, "log_prob": 0.0, "finish": "stop", "tokens": []}
    ]


def test_json_gives_scores_tokens_and_the_attention_asked_for(triptych: Command, small_run: Path) -> None:
    asked = [word for place in ("cross.1.0", "encoder.0", "decoder.0.1") for word in ("--attention", place)]
    record = triptych("translate", small_run, "--json", *asked, stdin=b"Es ist halb vier.\n").record()
    best = record["candidates"][0]
    assert record["text"] == best["text"]
    assert best["log_prob"] < 0
    assert "".join(best["tokens"]).replace("▁", " ").strip() == best["text"]
    kinds = [(entry["kind"], entry["layer"], entry["head"]) for entry in record["attention"]]
    assert kinds == [("encoder", 0, 0), ("encoder", 0, 1), ("decoder", 0, 1), ("cross", 1, 0)]
    for entry in record["attention"]:
        assert len(entry["weights"]) == len(entry["rows"])
        for row in entry["weights"]:
            assert len(row) == len(entry["columns"])
            assert sum(row) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--n-best 3 --beam 2", "num_best is 3: it must be between 1 and beam_size (2)"),
        ("--out no/such/out.txt", "make it first"),
        ("--json --attention cross:0:0", "is not a place in a model"),
        ("--json --attention 0.1", "layer 0 could be encoder.0, decoder.0, cross.0"),
        ("--json --attention cross.2.0", "no layer cross.2"),
        ("--json --attention cross.0.2", "no head 2: its heads are 0 to 1"),
    ],
)
def test_what_cannot_be_asked_for_is_a_usage_error(
    triptych: Command, small_run: Path, options: str, message: str
) -> None:
    triptych("translate", small_run, *options.split(), stdin=b"Vier.\n").refused(message)


def test_bad_bytes_are_named_with_their_line_after_the_lines_before_them(
    triptych: Command, small_run: Path
) -> None:
    engine = "--engine", "triptych"
    answer = triptych("translate", small_run, *engine, stdin=b"Vier.\nHeute.\n\xff\xfe\xfd\nVier.\n")
    assert answer.code == 1
    assert len(answer.out.splitlines()) == 2
    assert "standard input, line 3" in answer.err
    assert answer.err.count("\n") == 1


def test_a_failed_translation_leaves_no_output_file(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_bytes(b"Vier.\nNull\x00byte\n")
    answer = triptych("translate", small_run, tmp_path / "in.txt", "--out", tmp_path / "out.txt")
    answer.refused("line 2", code=1)
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


@pytest.mark.slow
def test_a_closed_pipe_ends_quietly(small_run: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("Heute ist Montag.\n" * 2000)
    options = "--beam 1 --engine triptych"
    command = (
        f"{sys.executable} -m triptych translate {small_run} {tmp_path / 'in.txt'} {options} | head -n 1"
    )
    shell = ["bash", "-c", f"set -o pipefail; {command}"]
    result = subprocess.run(shell, capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout.count("\n") == 1
    assert (result.returncode, result.stderr) == (0, "")


# Whoever is started in the background by a shell ignores interrupts, and so do its children: not here.
_INTERRUPTIBLE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from triptych.cli.main import run; run()"
)


def test_a_line_typed_is_answered_before_the_next_and_an_interrupt_is_no_crash(small_run: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTIBLE, "translate", str(small_run)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            for _ in range(2):
                process.stdin.write("Vier.\n")
                process.stdin.flush()
                # Blocks for ever, and fails by the suite's limit, if the answer waits for more input.
                assert process.stdout.readline().endswith("\n")
            process.send_signal(signal.SIGINT)
            # The input stays open: only the signal can end it.
            code = process.wait(timeout=30)
            _, errors = process.communicate()
        finally:
            process.kill()  # nothing happens to one that has ended
    assert code == 130
    assert "Fatal" not in errors
    assert "Traceback" not in errors


def test_a_tokenizer_that_is_missing_is_not_taken_for_a_joint_one(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(small_run, copy)
    recipe = (copy / "recipe.toml").read_text().replace("joint = true", "joint = false")
    (copy / "recipe.toml").write_text(recipe.replace('tie_embeddings = "all"', 'tie_embeddings = "target"'))
    triptych("translate", copy, stdin=b"Vier.\n").refused("tokenizer.target.json is missing", code=1)


def test_another_engine_takes_the_same_options(
    triptych: Command, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ctranslate2", reason="needs CTranslate2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = ("\n".join(SENTENCES) + "\n").encode()
    options = ("--beam", 3, "--n-best", 2, "--alpha", 1, "--max-extra-tokens", 3, "--json", "--workers", 1)
    ours = triptych("translate", small_run, *options, "--stop", "full", stdin=text)
    theirs = triptych("translate", small_run, *options, "--engine", "ctranslate2", stdin=text)
    assert (theirs.code, theirs.err) == (0, "")
    for expected, found in zip(ours.out.splitlines(), theirs.out.splitlines(), strict=True):
        one, other = json.loads(expected), json.loads(found)
        assert [c["tokens"] for c in other["candidates"]] == [c["tokens"] for c in one["candidates"]]
        assert other["candidates"][0]["score"] == pytest.approx(one["candidates"][0]["score"], abs=1e-4)


def test_a_page_shows_the_attention_of_the_lines_that_are_translated(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    arguments = ("translate", small_run, "--attention-html", page)
    plain = triptych("translate", small_run, stdin=b"Vier.\n\nHeute ist Montag.\n")
    for _ in range(2):
        assert triptych(*arguments, stdin=b"Vier.\n\nHeute ist Montag.\n").out == plain.out
    text = page.read_text(encoding="utf-8")
    assert '"kind":"cross"' in text
    assert text.count('"kind":"encoder"') == 2
    assert triptych(*arguments, stdin=b"\n").code == 2


def test_another_engine_has_no_attention_and_no_certain_end(triptych: Command, small_run: Path) -> None:
    engine = ("translate", small_run, "--engine", "ctranslate2")
    triptych(*engine, "--json", "--attention", "cross.0.0", stdin=b"Vier.\n").refused(
        "--attention goes with --engine triptych: ctranslate2 gives no attention weights"
    )
    pytest.importorskip("ctranslate2", reason="needs CTranslate2")
    triptych(*engine, "--beam", 3, "--stop", "certain", stdin=b"Vier.\n").refused('stop must be "full"')


def test_a_glossary_forces_its_terms_and_leaves_other_lines_alone(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "terms.tsv").write_text("Buch\tblue notebook\nEuro\tdollars\n")
    lines = "\n".join(SENTENCES).encode()
    plain = triptych("translate", small_run, stdin=lines).out.splitlines()
    answer = triptych("translate", small_run, "--glossary", tmp_path / "terms.tsv", stdin=lines)
    held = answer.out.splitlines()
    assert (answer.code, held[1:]) == (0, plain[1:])
    assert " blue notebook" in f" {held[0]}"
    assert " dollars" in f" {held[0]}"
    terms = {"Buch": "blue notebook", "Euro": "dollars"}
    assert load(small_run).translate(SENTENCES[0], glossary=terms).text == held[0]
    (tmp_path / "terms.tsv").write_text("Buch\tbook\nEuro dollars\n")
    answer = triptych("translate", small_run, "--glossary", tmp_path / "terms.tsv", stdin=lines)
    answer.refused("terms.tsv:2: write a term, a tab and its translation", code=1)


def test_the_engine_is_chosen_by_what_is_asked_and_a_line_says_why(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    terms = tmp_path / "terms.tsv"
    terms.write_text("Vier\tfour\n")
    asked = {
        ("--beam", 2): "CTranslate2 translates: it is faster on CPUs",
        ("--n-best", 2): "triptych translates: lists of the best translations are triptych's",
        ("--glossary", terms): "triptych translates: CTranslate2 takes no glossary",
        ("--stop", "certain"): "triptych translates: CTranslate2 ends a search",
        ("--json",): "triptych translates: --json needs its own search",
        ("--without", "cross.0.1"): "triptych translates: --without needs its own search",
    }
    for options, said in asked.items():
        answer = triptych("translate", small_run, *options, stdin=b"Vier.\n").done()
        (line,) = answer.err.splitlines()
        assert line.startswith(f"triptych: engine auto: {said}")
    own = triptych("translate", small_run, "--beam", 2, "--engine", "triptych", stdin=b"Vier.\n")
    assert (own.code, own.err) == (0, "")
