"""`triptych diff`: its exit code, its lines, and the files that it writes."""

import json
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from xml.etree import ElementTree

import pytest

from command import Command
from face.tiny import write_checkpoint
from small_checkpoints import gpt2_that_runs
from triptych import DataError, Difference, UsageError, diff, load
from triptych.testing import assert_same_function

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2, the same function in another writing, and another function."""
    base = tmp_path_factory.mktemp("diff")
    write_checkpoint("gpt2", base / "gpt2")
    gpt2 = load(base / "gpt2", device="cpu")
    gpt2.rewrite("fold_value_bias", out=base / "folded", compare=False)
    gpt2.rewrite("truncate(rank=2)", out=base / "cut", compare=False)
    return base


def test_the_exit_code_says_whether_what_is_required_holds(models: Path, triptych: Command) -> None:
    same = triptych("diff", models / "gpt2", models / "folded").done()
    assert same.out.startswith("same function: ")
    near = triptych("diff", models / "gpt2", models / "cut")
    assert near.code == 1
    assert near.out.startswith("near: ")
    assert "first in 0 attention" in near.out
    assert "the verdict is near, first in 0 attention; required is same function" in near.err
    triptych("diff", models / "gpt2", models / "cut", "--require", "near").done()
    assert triptych("diff", models / "gpt2", models / "folded", "--require", "numbers").code == 1
    triptych("diff", models / "gpt2", models / "gpt2", "--require", "numbers").done()


def test_what_cannot_be_asked_is_a_usage_error(models: Path, triptych: Command) -> None:
    one, other = models / "gpt2", models / "cut"
    for words, said in (
        ([one, models / "nowhere"], "nowhere: there is no such file or folder"),
        ([one, other, "--require", "bytes"], "bytes"),
        ([one, other, "--within", "0.1"], "--within goes with --require near and --text"),
    ):
        triptych("diff", *words).refused(said)


def test_json_and_junit_have_every_part(models: Path, triptych: Command, tmp_path: Path) -> None:
    junit = tmp_path / "diff.xml"
    record = triptych("diff", models / "gpt2", models / "cut", "--json", "--junit", junit).record(code=1)
    assert (record["held"], record["verdict"]) == (False, "near")
    parts = [part["name"] for part in record["parts"]]
    cases = ElementTree.parse(junit).findall(".//testcase")
    assert [case.get("name") for case in cases] == [*parts, "whole model"]
    failed = [case.get("name") for case in cases if case.find("failure") is not None]
    assert "0 attention" in failed
    assert "embeddings" not in failed
    assert "whole model" in failed
    # A report of ours is written anew; a file of the user is not.
    triptych("diff", models / "gpt2", models / "gpt2", "--junit", junit).done()
    assert ElementTree.parse(junit).find(".//failure") is None
    junit.write_text("mine")
    assert triptych("diff", models / "gpt2", models / "gpt2", "--junit", junit).code == 2


def test_the_page_has_a_row_for_each_layer_and_a_cell_for_each_head(
    models: Path, triptych: Command, tmp_path: Path
) -> None:
    page = tmp_path / "diff.html"
    triptych("diff", models / "gpt2", models / "cut", "--html", page)
    text = page.read_text(encoding="utf-8")
    model = load(models / "gpt2")
    for layer in model.layers:
        for head in range(layer.num_heads):
            assert f'title="{layer.name}.{head}: near' in text


def test_another_chat_template_is_said_and_the_exit_code_is_of_the_weights(
    triptych: Command, tmp_path: Path
) -> None:
    one = gpt2_that_runs(tmp_path / "a", layers=1)
    other = shutil.copytree(one, tmp_path / "b")
    (one / "chat_template.jinja").write_text("<b>")
    (other / "chat_template.jinja").write_text("<i>")
    said = "the chat template differs, from line 1 on"
    answer = triptych("diff", one, other, "--html", tmp_path / "page.html")
    assert answer.code == 0
    assert f"\n  texts: {said}\n" in answer.out
    assert f"<li>{said}</li>" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert json.loads(triptych("diff", one, other, "--json").out)["texts"] == [said]


def test_models_and_paths_are_compared_alike(models: Path) -> None:
    found = diff(load(models / "gpt2"), models / "cut")
    assert isinstance(found, Difference)
    assert found.record()["parts"] == diff(models / "gpt2", models / "cut").record()["parts"]
    assert [part.layer for part in found.layers] == ["0", "0", "1", "1"]
    assert found.first == "0 attention"
    assert len(repr(found).splitlines()) <= 8
    assert found._repr_html_().startswith("<p>near")
    with pytest.raises(UsageError, match="--within bounds"):
        found.why_not("function", within=0.1)
    with pytest.raises(UsageError, match="needs a text"):
        found.why_not("near", within=0.1)
    with pytest.raises(UsageError, match="from 0 on"):
        found.why_not("near", within=-1.0)


def test_an_assertion_of_the_same_function_says_where_models_part(models: Path) -> None:
    assert_same_function(models / "gpt2", models / "folded")
    with pytest.raises(AssertionError, match=r"required is same numbers\nDifference, same function"):
        assert_same_function(models / "gpt2", models / "folded", require="numbers")
    with pytest.raises(AssertionError, match="the verdict is near, first in 0 attention"):
        assert_same_function(models / "gpt2", models / "cut")
    with pytest.raises((UsageError, DataError)):
        assert_same_function(models / "gpt2", models / "nowhere")


TEST = """
def test_same(same_function):
    same_function({one!r}, {one!r})

def test_other(same_function):
    same_function({one!r}, {other!r})
"""
HEAVY = "import sys, triptych.pytest_plugin; print([n for n in ('torch', 'numpy') if n in sys.modules])"


def test_the_plugin_of_pytest_imports_nothing_at_the_start() -> None:
    done = subprocess.run([sys.executable, "-c", HEAVY], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_the_plugin_of_pytest_gives_a_fixture(models: Path, tmp_path: Path) -> None:
    one, other = str(models / "gpt2"), str(models / "cut")
    (tmp_path / "test_export.py").write_text(TEST.format(one=one, other=other))
    # An installed package names its plugin to pytest; a tree on the path does not.
    is_named = any(one.name == "triptych" for one in entry_points(group="pytest11"))
    plugin = [] if is_named else ["-p", "triptych.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", "-q", *plugin, "-p", "no:cacheprovider"]
    done = subprocess.run([*command, "."], cwd=tmp_path, capture_output=True, text=True)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "the verdict is near, first in 0 attention; required is same function" in done.stdout
