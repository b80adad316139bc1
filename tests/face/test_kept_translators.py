"""Translators kept in the cache folder: the same translations, without torch."""

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from triptych import Model, load, user_code
from triptych.converting import kept_translators
from triptych.converting.kept_translators import KeptTranslator
from triptych.errors import DataError, EngineNote
from triptych.files import cache_folder
from triptych.running.decoding import SearchOptions, Translator

pytest.importorskip("ctranslate2", reason="needs CTranslate2")
LINES = ["Der Zug kommt um halb vier an.", "", " Der Hund schläft. Das Haus ist rot.", "Kinder", "ß!?"]
# The arguments that the command gives to `load`, and to the search.
OPENING: Mapping[str, Any] = {
    "device": "cpu",
    "engine": "auto",
    "precision": "fp32",
    "languages": None,
    "offline": False,
    "strict": False,
    "family": None,
    "adapter": (),
    "shortlist": None,
    "ensemble": (),
}
SEARCH: Mapping[str, Any] = {"beam_size": 2, "num_best": 1, "max_extra_tokens": None}
COMMAND = """
import sys
from triptych.__main__ import run
try:
    run()
finally:
    assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder for all tests: copies of the demo have one conversion."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def demo(conversions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A copy of the demo, opened once for CTranslate2."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(conversions))
    folder = tmp_path / "demo"
    shutil.copytree(Path(user_code.__file__).parent / "demo_model", folder)
    keep(str(folder))
    return str(folder)


@pytest.fixture
def own_cache(tmp_path: Path, demo: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    assert demo
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder()


def kept(
    source: str, opening: Mapping[str, Any] = OPENING, search: Mapping[str, Any] = SEARCH
) -> Translator | None:
    def again(options: SearchOptions) -> Translator:
        return load(source).reader.translator(options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EngineNote)
        return KeptTranslator(source, opening, search).find(1, again)


def keep(
    source: str,
    opening: Mapping[str, Any] = OPENING,
    search: Mapping[str, Any] = SEARCH,
    change: Callable[[Model], object] = id,
) -> None:
    """Open a source and keep its translator as the command does; `change` does something in between."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EngineNote)
        found = KeptTranslator(source, opening, search)
        assert found.find(1, lambda options: load(source).reader.translator(options)) is None
        model = load(source, **{name: opening[name] for name in OPENING})
        translator = model.translator(**search)
        change(model)
        found.keep(model._opened, translator)


@pytest.mark.parametrize("max_extra_tokens", [None, 1], ids=["", "cut off"])
def test_a_kept_translator_gives_the_translations_of_an_opened_one(
    demo: str, max_extra_tokens: int | None
) -> None:
    search = {**SEARCH, "max_extra_tokens": max_extra_tokens}
    if max_extra_tokens:
        keep(demo, search=search)
    opened = load(demo, engine="ctranslate2").translator(**search)
    found = kept(demo, search=search)
    assert found is not None
    translations = found.translate(LINES)
    assert translations == opened.translate(LINES)
    assert any(found.finish == "length" for found in translations) == (max_extra_tokens == 1)
    assert found.max_source_tokens == opened.max_source_tokens
    assert found.options == opened.options


def test_a_second_command_translates_without_torch(demo: str) -> None:
    def translated(program: str) -> str:
        command = [sys.executable, "-c", program, "translate", demo, LINES[0], "--device", "cpu"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert "engine auto: CTranslate2 translates" in done.stderr
        return done.stdout

    assert translated(COMMAND) == f"{load(demo).translate(LINES[0]).text}\n"


@pytest.mark.parametrize(
    "change", ["written anew", "unpacked with the same time", "added", "removed", "moved"]
)
def test_a_change_of_the_source_is_noticed(demo: str, change: str) -> None:
    assert kept(demo) is not None
    weights = Path(demo, "model.safetensors")
    if change == "written anew":
        weights.write_bytes(weights.read_bytes())
    elif change == "unpacked with the same time":
        before = weights.stat()
        weights.write_bytes(weights.read_bytes())
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "added":
        Path(demo, "more.txt").touch()
    elif change == "removed":
        Path(demo, "README.md").unlink()
    else:
        demo = str(shutil.move(demo, f"{demo}-moved"))
    assert kept(demo) is None
    keep(demo)
    assert kept(demo) is not None


def test_a_change_after_the_opening_is_refused_where_triptych_searches_again(demo: str) -> None:
    search = {**SEARCH, "max_extra_tokens": 1}
    keep(demo, search=search)
    found = kept(demo, search=search)
    assert found is not None
    os.utime(Path(demo, "model.safetensors"))
    with pytest.raises(DataError, match="was written anew while it was open"):
        found.translate(LINES)


def test_without_its_conversion_or_record_a_source_is_opened(demo: str, own_cache: Path) -> None:
    keep(demo)
    (record,) = own_cache.glob("translator-*")
    (conversion,) = own_cache.glob("ctranslate2-*")
    shutil.move(conversion, conversion.with_name("elsewhere"))
    assert kept(demo) is None
    shutil.move(conversion.with_name("elsewhere"), conversion)
    assert kept(demo) is not None
    (record / "translator.json").write_text("{}")
    assert kept(demo) is None
    keep(demo)
    assert kept(demo) is not None


def test_options_that_another_model_or_engine_needs_open_the_source(
    demo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = [
        {"engine": "triptych"},
        {"device": "cuda"},
        {"languages": ("de", "en")},
        {"strict": True},
        {"family": "mine.toml"},
        {"adapter": ("one",)},
        {"shortlist": "list"},
        {"ensemble": ("two",)},
    ]
    assert [one for one in other if kept(demo, OPENING | one) is not None] == []
    searches = [{"num_best": 2}, {"beam_size": 1, "temperature": 1.0}, {"beam_size": 0}, {"stop": "certain"}]
    assert [one for one in searches if kept(demo, search=SEARCH | one) is not None] == []
    assert kept(demo, OPENING | {"device": "auto"}) is not None or kept_translators._may_have_gpu()
    monkeypatch.setattr(kept_translators, "_GPUS", (str(tmp_path),))
    assert kept(demo, OPENING | {"device": "auto"}) is None  # a GPU may be there
    monkeypatch.setattr(kept_translators, "paths", lambda: [Path("mine.py")])
    assert kept(demo) is None


def test_a_model_that_its_files_alone_do_not_decide_is_not_kept(demo: str, own_cache: Path) -> None:
    def translate_changed(model: Model) -> None:
        with torch.no_grad():
            next(model.reader.model.parameters()).zero_()
        model.translate(LINES[0])

    weights = Path(demo, "model.safetensors")
    translate_changed(load(demo, engine="ctranslate2"))
    keep(demo, OPENING | {"without": "cross.1"})
    keep(demo, OPENING | {"strict": True})
    keep(demo, change=lambda _: os.utime(weights))
    assert [*own_cache.glob("translator-*")] == []
    assert len([*own_cache.glob("ctranslate2-*")]) == 2


def test_a_folder_whose_files_are_not_all_known_is_not_kept(
    demo: str, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = Path(demo, "more")
    more.symlink_to("missing")
    keep(demo)
    more.unlink()
    more.symlink_to(tmp_path)
    keep(demo)
    more.unlink()
    nameless = Path(demo, os.fsdecode(b"\xff"))
    nameless.touch()
    keep(demo)
    nameless.unlink()
    with monkeypatch.context() as few:
        few.setattr(kept_translators, "_MOST_FILES", 2)
        keep(demo)
    assert [*own_cache.glob("translator-*")] == []
    keep(demo)
    assert [*own_cache.glob("translator-*")] != []
