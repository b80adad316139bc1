"""The site builds without a warning, and needs no network."""

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import triptych

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
# What a page loads as it is opened, the addresses of its own links aside.
_LOADED = re.compile(r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="(https?:[^"]+)"')


@pytest.fixture(scope="module")
def site(demo_page: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built by what `make docs` runs; a link or an anchor that leads nowhere is a warning."""
    pytest.importorskip("zensical", reason="it comes with the extra [docs]")
    folder = tmp_path_factory.mktemp("site")
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    config = config.replace("paths: [src]", f"paths: [{ROOT / 'src'}]")
    (folder / "mkdocs.yml").write_text(config)
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(demo_page, folder / "docs" / "demo.html")  # as docs/demo_page.py makes it
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_every_page_is_built_and_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in PAGES:
        name = page.relative_to(ROOT / "docs").with_suffix(".html")
        built = site / (name.with_name("index.html") if page.name == "README.md" else name)
        assert _LOADED.findall(built.read_text(encoding="utf-8")) == [], name


def test_formulas_are_typeset_and_names_keep_their_text(site: Path) -> None:
    page = (site / "explanation" / "questions.html").read_text(encoding="utf-8")
    (formula,) = re.findall(r'<div class="formula">(.*?)</div>', page, re.DOTALL)
    assert formula.count("<math") == 1
    for part in ("<mfrac>", "<msqrt>", "<mo>&#x0003D;</mo>"):
        assert part in formula
    assert '<span class="name"><i>W</i><span>_</span><sub>Q</sub></span>' in page
    # The text of a page is what it was: titles, anchors, the search.
    heads = (site / "explanation" / "questions" / "two-products.html").read_text(encoding="utf-8")
    assert 'id="why-learn-w_q-and-w_k-when-only-their-product-matters"' in heads
    items = json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]
    assert any("W_Q" in html.unescape(item["text"]) for item in items if "two-products" in item["location"])
    assert all("<span" not in item["title"] for item in items)
    # Fonts are files of the site.
    fonts = re.findall(r'url\("([^"]+)"\)', (site / "site.css").read_text(encoding="utf-8"))
    assert fonts
    assert all((site / font).is_file() for font in fonts)


def test_no_formula_is_left_as_source(site: Path) -> None:
    for page in PAGES:
        name = page.relative_to(ROOT / "docs").with_suffix(".html")
        built = site / (name.with_name("index.html") if page.name == "README.md" else name)
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", built.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(r"\$`|\\(?:frac|sqrt|sum|mathrm|top)\b", text), name


def test_the_page_of_the_demo_is_part_of_the_site(site: Path, demo_page: Path) -> None:
    assert (site / "demo.html").read_bytes() == demo_page.read_bytes()
    assert 'href="demo.html' in (site / "index.html").read_text(encoding="utf-8")


def test_a_documented_name_has_its_signature_and_its_arguments(site: Path) -> None:
    built = (site / "reference" / "python.html").read_text(encoding="utf-8")
    for name in triptych.__all__:
        assert f'id="triptych.{name}"' in built, name
    assert "a run folder, a folder or a tensor file" in built


def test_the_page_of_python_names_what_the_package_offers() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: triptych\.(\w+)$", page, re.MULTILINE)) == triptych.__all__


def test_every_page_begins_with_its_title() -> None:
    assert [page.name for page in PAGES if not page.read_text(encoding="utf-8").startswith("# ")] == []


# What people type into the search box, and the page that they should find.
SEARCHED = {
    "two linear transformations": "explanation/questions/two-products.html",
    "q<1> or x<1>": "explanation/questions/sources.html",
    "query key value analogy": "explanation/questions/heads.html",
    "fine-tune": "explanation/questions/asked.html",
    "attention sink": "explanation/questions/heads.html",
}


def test_what_people_search_for_is_in_the_index_and_the_log_and_tables_of_results_are_not(site: Path) -> None:
    items = json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]
    texts = {item["location"]: html.unescape(f"{item['title']} {item['text']}").lower() for item in items}
    for words, page in SEARCHED.items():
        assert any(words in text for place, text in texts.items() if place.startswith(page)), words
    left_out = "contributing/log", "results/studies/results/", "results/benchmarks/"
    assert [place for place in texts if place.startswith(left_out)] == []
