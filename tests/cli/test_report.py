"""`triptych report`: the page of a run."""

from pathlib import Path

from command import Command
from triptych import load

LANGUAGE = """
name = "words"
task = "language-model"
[data]
train = {files = "train.txt"}
valid = {files = "valid.txt"}
[tokenizer]
vocab_size = 300
[model]
num_layers = 1
d_model = 16
num_heads = 2
context = 8
[training]
max_steps = 3
batch_size = 4
[validation]
every_steps = 3
"""


def test_the_page_of_a_translator_shows_its_translations_heads_and_attention(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    answer = triptych("report", small_run, "--html", page)
    assert (answer.code, answer.err) == (0, f"written: {page}\n")
    text = page.read_text(encoding="utf-8")
    for part in ("Learning", "Translations", "Attention", "Averages", "overlap of W_Q and W_K", "40 steps"):
        assert part in text


def test_the_page_of_a_language_model_continues_validation_texts(triptych: Command, cwd: Path) -> None:
    lines = [f"{number} apples and {number + 1} pears\n" for number in range(80)]
    Path("train.txt").write_text("".join(lines), encoding="utf-8")
    Path("valid.txt").write_text("The beginning of a validation text. " * 8, encoding="utf-8")
    Path("words.toml").write_text(LANGUAGE, encoding="utf-8")
    triptych("train", "words.toml", "-q").done()
    triptych("report", "runs/words").done()
    text = Path("runs/words/report.html").read_text(encoding="utf-8")
    assert "Validation texts, continued greedily" in text
    assert "the text goes on" in text
    assert "Attention" in text  # the text is cut to what the model reads
    assert load("runs/words").name == "runs/words"  # the page is in nobody's way
    Path("valid.txt").unlink()
    triptych("report", "runs/words").done()
    text = Path("runs/words/report.html").read_text(encoding="utf-8")
    assert "The validation text cannot be read, so there are no samples: valid.txt does not exist" in text


def test_what_is_no_run_is_said_in_one_line(triptych: Command, tmp_path: Path) -> None:
    triptych("report", tmp_path).refused("holds no run of triptych")
