"""`triptych explore`: a page of a server, and a page that is a file."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from browser import Page, wait_for
from command import Command
from explorer_page import SETTLED, text_of
from served import free_port
from triptych.model import Model, load
from triptych.seeing.attending.held_out import HeldOutText
from triptych.training import Recipe, read_recipe
from triptych.training.translation import validation_pairs
from web_engine import parts_of


@pytest.mark.slow
@pytest.mark.usefixtures("too_large")
def test_a_run_is_measured_on_its_validation_text(triptych: Command, small_run: Path, tmp_path: Path) -> None:
    text, page = ["explore", small_run, "--text", "twelve"], tmp_path / "page.html"
    done = triptych(*text, "--html", page)
    assert (done.code, done.out) == (0, f"written: {page}\n")
    recipe = read_recipe(small_run / "recipe.toml")
    assert isinstance(recipe, Recipe)
    pairs = validation_pairs(recipe, Path())
    model = load(small_run)
    own = HeldOutText(model.reader, pairs.source, pairs.target)
    assert f"held-out text: {own.num_tokens:,} tokens that the run was validated on" in done.err
    answers = recorded_answers(page)
    calls = {key: value for key, value in answers.items() if key.startswith("held_out ")}
    (tied,) = [value for key, value in calls.items() if "tie(cross.0, W_K, W_V)" in key]
    found = own.compare(model.tie("cross.0", "W_K", "W_V").reader)
    assert tied["loss"] == pytest.approx([found.before, found.after], rel=1e-3)
    for name, lines in (("source", pairs.source[:9]), ("target", pairs.target[:9])):
        (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
    given = ["--held-out", tmp_path / "source", "--held-out-targets", tmp_path / "target"]
    triptych(*text, "--html", page, *given).done()
    (about,) = recorded_answers(page)["models {}"]["models"]
    assert (about["held_out"]["name"], about["held_out"]["units"]) == ("source", "documents")
    for wrong, says in (
        (["--held-out", tmp_path / "source"], "give the translations of the held-out sentences"),
        (["--held-out-targets", tmp_path / "target"], "give both"),
        (["--held-out", tmp_path / "none", *given[2:]], "none"),
    ):
        triptych(*text, "--html", page, *wrong).refused(says)


@pytest.mark.slow
@pytest.mark.usefixtures("too_large")
def test_a_run_whose_text_has_gone_is_explored_without_it(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    folder, page = tmp_path / "run", tmp_path / "page.html"
    shutil.copytree(small_run, folder)
    recipe = (folder / "recipe.toml").read_text(encoding="utf-8")
    moved = re.sub(r"\[data\.valid\][^\[]*", '[data.valid]\nfile = "gone.tsv"\n\n', recipe)
    assert moved != recipe
    (folder / "recipe.toml").write_text(moved, encoding="utf-8")
    done = triptych("explore", folder, "--text", "twelve", "--html", page)
    assert (done.code, "no held-out text: the validation text of" in done.err) == (0, True), done
    assert not [key for key in recorded_answers(page) if key.startswith("held_out ")]


@pytest.fixture
def too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model fits into a page."""
    monkeypatch.setattr("triptych.converting.web.MOST_BYTES", 0)


def recorded_answers(page: Path) -> dict[str, Any]:
    """What a page has in place of a server."""
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="answers">(.*?)</script>', text, re.S)
    assert found is not None
    return dict(json.loads(found[1]))


def test_a_file_has_a_small_model_itself(triptych: Command, small_run: Path, tmp_path: Path) -> None:
    page, texts = tmp_path / "page.html", [tmp_path / "source", tmp_path / "target"]
    for path, text in zip(texts, ("twelve\nseven\n", "zwölf\nsieben\n"), strict=True):
        path.write_text(text, encoding="utf-8")
    given = ["--text", "twelve", "--held-out", texts[0], "--held-out-targets", texts[1]]
    done = triptych("explore", small_run, *given, "--html", page)
    assert (done.code, done.out) == (0, f"written: {page}\n")
    record, _ = parts_of(page)
    assert (record["example"], record["held_out"]["name"]) == ("twelve", "source")
    assert len(record["held_out"]["windows"]) == 2


@pytest.mark.usefixtures("too_large")
def test_a_file_of_one_text_answers_without_a_server(
    tab: Page, triptych: Command, language_model: Model, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    done = triptych("explore", language_model.name, "--text", "The cat sat", "--html", page)
    assert (done.code, done.out) == (0, f"written: {page}\n")
    why, cost = done.err.splitlines()[-2:]
    assert "0 MiB of weights" in why
    assert re.fullmatch(r"recording 3 layers and \d+ switches: about \d+ s and \d+\.\d MB", cost)
    tab.visit("about:blank")  # what the page before this one asks its server is no business of the file
    tab.complaints.clear()
    tab.requests.clear()
    tab.open(page)
    wait_for(tab, SETTLED)
    place = text_of(tab, "#row-name").split()[6]
    tab.point_at(f"[data-calls='[\"ablate({place})\"]']", click=True)
    wait_for(tab, "document.getElementById('after-text') !== null && " + SETTLED)
    assert f'model.ablate("{place}")' in text_of(tab, "#effect")
    tab.point_at("[data-remove]", click=True)
    wait_for(tab, "document.querySelector('[data-remove]') === null && " + SETTLED)
    other = '.glance a[data-at]:not([aria-current]):not([data-at$="-1"])'
    tab.point_at(other, click=True)
    wait_for(tab, f"!document.getElementById('row-name').textContent.includes('head {place} ')")
    assert (text_of(tab, "#problem"), tab.complaints) == ("", [])
    assert {url.split(":")[0] for url in tab.requests} <= {"file", "data"}
    missing = triptych("explore", language_model.name, "--html", page)
    assert (missing.code, "give --text" in missing.err) == (2, True)


def test_the_command_serves_its_page_and_says_where(language_model: Model) -> None:
    port = free_port()
    command = [sys.executable, "-m", "triptych", "explore", language_model.name, "--no-open"]
    process = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert f"http://127.0.0.1:{port}/ (Ctrl-C ends it)" in process.stderr.readline()
        with urlopen(f"http://127.0.0.1:{port}/") as answer:
            assert "connect-src 'self'" in answer.headers["Content-Security-Policy"]
            assert b'id="explore"' in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130)
    finally:
        process.kill()
        process.communicate()
