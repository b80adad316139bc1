"""What works without the extras, and what is said where one is missing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.errors import UsageError
from triptych.extras import require_extra
from triptych.seeing.reports import Bar, BarChart, Report, write_report
from triptych.training.corpora.generated import generate_pairs

# Modules of the extras, and what the core needed once.
EXTRAS = (
    *("vl_convert", "altair", "num2words", "babel", "pyarrow", "datasets", "tensorboard", "sentencepiece"),
    *("transformers", "gguf", "onnx", "onnxscript", "onnxruntime"),
    *("starlette", "uvicorn", "python_multipart", "prometheus_client", "turbohtml"),
)
# Runs commands one after the other, and says after each with which code it ended.
WITHOUT = f"""
import json, sys
sys.modules |= dict.fromkeys({EXTRAS!r})
import triptych
from triptych.cli.main import run
for name in triptych.__all__:
    getattr(triptych, name)
for words in json.loads(sys.argv[1]):
    sys.argv, code = ["triptych", *words], 0
    try:
        run()
    except SystemExit as stop:
        code = stop.code or 0
    print("ended with", code, file=sys.stderr)
"""
RECIPE = """
[data]
train = {source = "source", target = "target"}
valid = {source = "source", target = "target"}
cache = ""
[tokenizer]
vocab_size = 300
[model]
preset = "tiny"
d_model = 16
d_ff = 16
num_heads = 2
encoder = {num_layers = 1}
decoder = {num_layers = 1}
[training]
max_steps = 2
[validation]
bleu = false
metric = "loss"
"""


def test_the_package_and_its_main_commands_work_without_any_extra_or_say_which_they_miss(
    tmp_path: Path,
) -> None:
    for side in ("source", "target"):
        (tmp_path / side).write_text("".join(f"a line of {side}, number {i}\n" for i in range(40)))
    (tmp_path / "mine.toml").write_text(RECIPE)
    calls = {
        "train mine.toml --out run": "",
        "translate run source --workers 1": "",
        "evaluate run --source source --reference target --workers 1": "",
        "inspect run --html heads.html --csv heads.csv": "",  # a page without Vega's charts
        "rewrite run --exact --out rewritten --no-compare": "",
        "verify rewritten --against run": "",
        "cost --d-model 8 --num-heads 2": "",
        "demo": "the demo needs num2words and vl_convert: pip install 'triptych[demo]'",
        "cost --html page.html": "a page with charts needs vl_convert: pip install 'triptych[reports]'",
    }
    command = [sys.executable, "-c", WITHOUT, json.dumps([line.split() for line in calls])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    codes = [line for line in done.stderr.splitlines() if line.startswith("ended with")]
    assert codes == [f"ended with {2 if said else 0}" for said in calls.values()], done.stderr
    for said in filter(None, calls.values()):
        assert f"\ntriptych: {said}\nended with 2\n" in done.stderr
    assert not (tmp_path / "page.html").exists()
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} <= {"run", "rewritten"}


def test_generated_text_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "num2words", None)
    with pytest.raises(UsageError, match=r"generated text needs num2words: pip install 'triptych\[demo\]'"):
        generate_pairs(3, "train", seed=1)


def test_only_a_page_with_charts_needs_the_library_that_draws(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    write_report(Report("no charts"), tmp_path / "page.html")
    with pytest.raises(UsageError, match="vl_convert"):
        write_report(Report("bars", charts=(BarChart("b", (Bar("x", 1, "1"),)),)), tmp_path / "bars.html")
    assert not (tmp_path / "bars.html").exists()


def test_what_is_installed_is_no_error_and_not_called_missing() -> None:
    require_extra("demo", "sys", "json", what="this")
    with pytest.raises(UsageError, match=r"^this needs no_such_library: pip install"):
        require_extra("demo", "sys", "no_such_library", "json", what="this")
