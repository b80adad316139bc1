"""The first screen, the first pages, and the model that comes with the package."""

import re
from pathlib import Path

import pytest

import triptych
from blocks import assert_shown, run_blocks
from triptych.model import load
from triptych.training.corpora.generated import generate_pairs

ROOT = Path(__file__).parents[2]
SHIPPED = Path(triptych.__file__).with_name("demo_model")


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/start/head.md"])
def test_the_first_pages_print_what_they_show_without_a_network(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    for one in run_blocks(ROOT / page):
        assert_shown(one, page)


def test_the_first_screen_is_one_screen() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before = text.partition("## Documentation")[0]
    assert len(text.splitlines()) <= 60
    assert len(before.split()) <= 350
    (block,) = re.findall(r"```python\n(.*?)```", before, re.S)
    assert len(block.splitlines()) <= 8


def test_the_model_that_comes_with_the_package_is_small_and_named_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 2_000_000
    assert "cache" not in (SHIPPED / "recipe.toml").read_text(encoding="utf-8")  # a path of one machine
    monkeypatch.chdir(tmp_path)
    assert load("demo").name == "demo"
    # A folder of this name comes first.
    (tmp_path / "demo").mkdir()
    with pytest.raises(triptych.UsageError, match=r"demo is not a run folder"):
        load("demo")


@pytest.mark.slow
def test_the_model_that_comes_with_the_package_translates_unseen_sentences() -> None:
    pytest.importorskip("num2words", reason="it comes with the extra [demo]")
    pairs = generate_pairs(500, "test", seed=1)
    found = load(SHIPPED).translate([german for german, _ in pairs])
    same = sum(one.text == english for one, (_, english) in zip(found, pairs, strict=True))
    assert same >= 495
