"""What README.md and the pages of docs/ show works: every block is run."""

import json
import re
import shutil
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

import triptych as package
from blocks import assert_shown, blocks_of, run_blocks
from checkpoints.tiny_marian import write_marian
from served import Served
from small_checkpoints import gpt2_that_runs
from tiny_recipe import text_recipe, write_sides
from tolerances import assert_same
from triptych.core.attention import PARAMETERISATIONS
from triptych.training import recipe as recipes
from triptych.training import runs
from triptych.training.progress import LineDisplay

ROOT = Path(__file__).parent.parent.parent
DOCS, SHARED = ROOT / "docs", ROOT.parent / "shared"
README, ATTENTION = ROOT / "README.md", DOCS / "reference/parameterisations.md"

# Pages of the small GPT-2 of ../shared, whose outputs are compared; and those that train, whose outputs vary.
OF_GPT2 = ("how-to/ablate", "how-to/rank")
THAT_TRAIN = ("start/your-text", "tutorials/translator", "tutorials/own-attention")
OF_THE_DEMO = ("start/translate",)
# Pages of the translator that comes with the package, whose outputs are compared.
OF_THE_PACKAGE = (
    *("start/your-checkpoint", "start/exact"),
    *("tutorials/inside-a-translator", "tutorials/smaller", "tutorials/still-the-same-model"),
)
# Pages that run on tiny models under the names in them.
ON_TINY = ("reference/columns", "reference/exact")
ON_TINY_SLOW = (
    *("how-to/attend", "how-to/explore", "how-to/generating", "how-to/heads", "reference/rewriting"),
    *("how-to/converting", "how-to/engines", "how-to/several-processes", "how-to/students", "how-to/web"),
    *("how-to/training", "how-to/resume", "reference/recipes"),
)
# Pages whose blocks other tests run.
ELSEWHERE = (
    *("../README", "index", "start/head"),  # tests/docs/test_first_screen.py
    "how-to/family",  # tests/docs/test_own_model.py
    "how-to/classes",  # tests/face/test_classes.py
    *("how-to/lens", "how-to/in-torch", "how-to/fine-tune"),  # tests/docs/test_how_to_pages.py
    *("how-to/planning", "how-to/serving", "how-to/timing"),  # below
    *("reference/parameterisations", "tutorials/by-hand"),  # below
    *("reference/model", "how-to/own-attention"),  # tests/face/test_page.py, tests/test_own_attention.py
    "reference/commands",  # test_help_examples.py
    *("explanation/questions", "explanation/questions/*"),  # tests/test_questions.py
    "results/**",  # hours; what they made is judged again by tests/studies/test_results.py
)


def test_every_block_of_a_page_is_run_by_one_test_or_says_why_not() -> None:
    run = [*OF_GPT2, *THAT_TRAIN, *OF_THE_DEMO, *OF_THE_PACKAGE, *ON_TINY, *ON_TINY_SLOW, *ELSEWHERE]
    pages = [page for name in run for page in DOCS.glob(f"{name}.md".replace("**.md", "**/*.md"))]
    pages += [README]
    assert len({*pages}) == len(pages)
    for page in [README, *DOCS.rglob("*.md")]:
        if "log" not in page.parts:
            blocks = blocks_of(page)
            assert len(blocks) * 2 == len(re.findall("^```", page.read_text("utf-8"), re.M)), (
                f"{page}: a language"
            )
            has = [block for block in blocks if block.is_code and block.not_run is None]
            assert (page in pages) >= bool(has), page


def test_the_ways_to_write_a_head_are_those_there_are() -> None:
    named = re.findall(r"^\| `(\w+)`", ATTENTION.read_text(), flags=re.MULTILINE)
    assert named == list(PARAMETERISATIONS)


def test_readme_names_pages_that_are_there() -> None:
    text = README.read_text()
    linked = re.findall(r"\]\(((?!https?:)[^)#]+)", text)
    assert len(linked) > 10
    assert [name for name in linked if not (ROOT / name).exists()] == []


@pytest.fixture
def reader(small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a reader who made the demo."""
    shutil.copytree(small_run, tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


@pytest.mark.usefixtures("reader")
def test_a_head_by_hand_is_what_the_page_shows() -> None:
    for ran in run_blocks(DOCS / "tutorials/by-hand.md"):
        assert_shown(ran, "by-hand.md")


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("name", OF_THE_DEMO)
def test_the_pages_that_use_the_demo_run(name: str) -> None:
    assert list(run_blocks(DOCS / f"{name}.md"))


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_THE_PACKAGE)
def test_the_pages_of_the_model_of_the_package_print_what_they_show(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for ran in run_blocks(DOCS / f"{name}.md"):
        assert_shown(ran, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_GPT2)
def test_the_pages_about_a_gpt2_print_what_they_show(name: str, reader: Path) -> None:
    if not (SHARED / "checkpoints" / "gpt2").is_dir():
        pytest.skip("needs ../shared/checkpoints/gpt2")
    shutil.copytree(SHARED / "checkpoints" / "gpt2", reader / "gpt2")
    text = (SHARED / "data" / "tinyshakespeare" / "input.txt").read_bytes()
    (reader / "text.txt").write_bytes(text[-55770:])
    (reader / "train.txt").write_bytes(text[:60000])
    for ran in run_blocks(DOCS / f"{name}.md"):
        assert_shown(ran, name)


def shorter(line: str) -> str:
    """Fewer steps of a command that begins a training."""
    begins = line.startswith("triptych train") and "--resume" not in line
    return f"{line.partition('   #')[0]} --set training.max_steps=4" if begins else line


@pytest.mark.slow
@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("name", THAT_TRAIN)
def test_the_pages_that_train_run_with_fewer_steps(name: str) -> None:
    page = DOCS / f"{name}.md"
    ran = [one for one in run_blocks(page, typed=shorter) if one.block.language == "console"]
    assert len(ran) == page.read_text().count("\n$ triptych") + page.read_text().count("\n$ echo") > 1


def _short(recipe: Path) -> str:
    """A recipe that comes with the package, of a small model and two steps."""
    tree = tomllib.loads(recipe.read_text())
    size = {"d_model": 16, "d_ff": 32, "num_heads": 2}
    for name in ("num_layers",) if "task" in tree else ("encoder", "decoder"):
        size[name] = 1 if name == "num_layers" else {"num_layers": 1}
    tree["model"] |= size
    tree["tokenizer"]["vocab_size"] = 300
    tree["training"] |= {"max_steps": 2, "warmup_steps": 1}
    tree["validation"] = {"every_steps": 2}
    return tomli_w.dumps(tree)


@pytest.fixture(scope="module")
def shelf(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models, texts and recipes under every name of the pages: in `here`, and in `shared` next to it."""
    pytest.importorskip("transformers", reason="it comes with the extra [dev]")
    base = tmp_path_factory.mktemp("shelf")
    here, models = base / "here", base / "shared" / "checkpoints"
    for folder in (here / "runs", here / "path/to", here / "meta-llama", models, base / "recipes"):
        folder.mkdir(parents=True)
    gpt2_that_runs(models / "gpt2", layers=6, positions=128)
    shutil.copytree(models / "gpt2", models / "llama-gqa")
    (models / "marian-multi30k").mkdir()
    sizes = {"max_position_embeddings": 64, "decoder_attention_heads": 3}
    write_marian(models / "marian-multi30k", dtype=torch.float32, **sizes)
    write_sides(here, "train", 200)
    text = "What a piece of work is a man!\n" * 60
    for part in ("valid", "test"):
        write_sides(here, part, 4)
    for corpus in ("tinyshakespeare", "multi30k", "tatoeba-de-en"):
        (folder := base / "shared/data" / corpus).mkdir(parents=True)
        (folder / "input.txt").write_text(text)
        for side in here.glob("t*.??"):
            shutil.copy(side, folder)
            shutil.copy(here / f"valid{side.suffix}", folder)
            shutil.copy(here / f"valid{side.suffix}", folder / f"val{side.suffix}")
            shutil.copy(here / f"test{side.suffix}", folder / f"test_2016_flickr{side.suffix}")
    for side in ("de", "en"):
        shutil.copy(here / f"test.{side}", here / f"lines.{side}")
    for name in ("text", "train", "test", "held-out", "corpus", "input"):
        (here / f"{name}.txt").write_text(text)
    (here / "in.txt").write_text("A little girl climbs.\n")
    shutil.copy(here / "test.de", here / "text.de")
    for recipe in (ROOT / "recipes").glob("*.toml"):
        (base / "recipes" / recipe.name).write_text(_short(recipe))
    masked = text_recipe(here / "text.txt", "masked-language-model", context=64)
    for name in ("ENCODER", "runs/tatoeba-mlm"):
        runs.train(masked, here / name, LineDisplay())
    for name in ("runs/mine", "runs/teacher", "runs/a", "runs/b", "runs/c", "TRANSLATOR"):
        shutil.copytree(small_run, here / name)
    for name, target in (
        ("gpt2", "gpt2"),
        ("MODEL", "gpt2"),
        ("mine", "gpt2"),
        ("smollm2", "gpt2"),
        ("theirs", "llama-gqa"),
    ):
        (here / name).symlink_to(f"../shared/checkpoints/{target}")
    for name in ("path/to/checkpoint", "meta-llama/Llama-3.2-1B"):
        (here / name).symlink_to(models / "gpt2")
    (here / "opus-mt-en-de").symlink_to("../shared/checkpoints/marian-multi30k")
    (here / "docs").symlink_to(DOCS)
    shutil.copy(ROOT / "src/triptych/core/checkpoints/families/gpt2.toml", here / "my.toml")
    shutil.copy(base / "recipes/multi30k.toml", here / "recipe.toml")
    steps = [block.text for block in blocks_of(DOCS / "reference/rewriting.md") if "[[step]]" in block.text]
    (here / "rewrite.toml").write_text(steps[0])
    return base


@pytest.fixture
def here(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with what the pages name."""
    shutil.copytree(shelf, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(recipes, "_SHIPPED", tmp_path / "recipes")
    import_module("triptych.cli.serve")  # its options are read of the real one
    monkeypatch.setattr(package, "serve", lambda *_, **__: None)  # it would never end
    return tmp_path / "here"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "name", [*ON_TINY, *(pytest.param(name, marks=pytest.mark.slow) for name in ON_TINY_SLOW)]
)
def test_the_other_pages_run_on_tiny_models(name: str) -> None:
    page = DOCS / f"{name}.md"
    if "triptych train mine.toml" in (text := page.read_text("utf-8")):
        shutil.rmtree("runs/mine")
        if "triptych new mine.toml" not in text:
            shutil.copy("recipe.toml", "mine.toml")
    assert list(run_blocks(page, typed=shorter))


def test_the_requests_to_a_server_are_answered(here: Path) -> None:
    models = {"de-en": package.load(here / "runs/mine"), "gpt2": package.load(here / "gpt2")}
    with Served(models) as served:
        to = f"curl --fail --silent {served.address.removeprefix('http://')}"
        page = DOCS / "how-to/serving.md"
        ran = list(run_blocks(page, typed=lambda line: line.replace("curl localhost:8000", to)))
    answers = [json.loads(one.printed) for one in ran if "curl" in one.block.text]
    assert "translatedText" in answers[0]
    assert "choices" in answers[1]


def test_the_plans_are_those_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "150")
    plans = list(run_blocks(DOCS / "how-to/planning.md"))
    for one in plans:
        printed = [line.rstrip() for line in one.printed.splitlines()]
        assert [line for line in (one.shown or "").splitlines() if line not in printed] == []
    assert len(plans) == 2


def test_layers_are_timed_beside_the_counts_shown() -> None:
    times, counts = run_blocks(DOCS / "how-to/timing.md", names={})
    rows = [line.split() for line in times.printed.splitlines() if "|" in line]
    assert [row[0] for row in rows[1:]] == ["stacked", "factored"]
    assert counts.printed == counts.shown


def test_the_layers_shown_run_and_the_rewrites_do_what_is_said_beside_them() -> None:
    names: dict[str, Any] = {}
    ran = list(run_blocks(ATTENTION, names=names))
    assert list(names["output"].shape) == [2, 4, 5, 12]
    assert list(names["weights"].shape) == [2, 4, 5, 7]
    assert list(names["cross_attention"].shape) == [2, 5, 32]
    sizes = [sum(p.numel() for p in names[name].parameters()) for name in ("layer", "folded")]
    assert f"{sizes[0]:,} → {sizes[1]:,} parameters" in ran[-1].block.text
    x = names["x"]
    assert_same(names["folded"](x).output, names["layer"](x).output, kind="output")
    assert "drop_key_bias refused: under rotary positions" in ran[-1].printed
