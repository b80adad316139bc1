"""`triptych attend --over`: what it prints, writes and refuses."""

from pathlib import Path

from command import Command


def test_the_command_prints_tables_or_one_json_object(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    text, table = tmp_path / "text.txt", tmp_path / "heads.csv"
    text.write_text("eins zwei\nzwei drei vier\nvier eins\n")
    call = ["attend", small_run, "--over", text, "--worth", "mean"]
    answer = triptych(*call, "--csv", table).done()
    assert "What heads are worth" in answer.out
    record = triptych(*call, "--json").record()
    assert len(record["worth"]["order"]) == len(record["heads"])
    assert [row["head"] for row in record["heads"]] == [
        int(line.split(",")[2]) for line in table.read_text().splitlines()[1:]
    ]
    for wrong in (["--over", text, "a text"], ["a text", "--worth", "mean"]):
        triptych("attend", small_run, *wrong).refused("--over")


def test_pages_have_a_row_for_every_head_or_the_heads_of_a_text_with_what_they_do(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    text, page = tmp_path / "text.txt", tmp_path / "page.html"
    text.write_text("eins zwei\nzwei drei vier\nvier eins\n")
    for given, expected in (([], "<h2>Heads of cross attention"), (["Vier."], '["diagonal","0.')):
        answer = triptych("attend", small_run, *given, "--over", text, "--html", page).done()
        assert f"written: {page}" in answer.out
        assert expected in page.read_text(encoding="utf-8")
    picture = ("--svg", tmp_path / "head.svg")
    triptych("attend", small_run, "--over", text, *picture).refused("--csv, --html and --json")


def test_a_text_that_cannot_be_measured_is_one_line(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    for text, more in ((tmp_path / "none.txt", []), (tmp_path, []), (empty, []), (empty, ["--context", "9"])):
        answer = triptych("attend", small_run, "--over", text, *more)
        assert answer.code in (1, 2), answer.out
        assert len(answer.err.splitlines()) == 1, answer.err
