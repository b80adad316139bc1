"""Every command takes every source of a model: the same answer, or one line that refuses it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from command import MISSING, Command
from hub_server import in_place_of_the_hub
from tiny_recipe import text_recipe
from triptych.training import runs
from triptych.training.progress import LineDisplay

TRANSLATORS = ("translator", "converted", "marian")
DECODERS = ("language", "gpt2", "gpt2/model.safetensors", "someone/model")
ENCODERS = ("masked",)
CALLS = {
    "translate": ["in.txt", "--beam", "1"],
    "generate": ["Vier", "--max-new-tokens", "3"],
    "fill": ["Vier [MASK]"],
    "attend": ["Vier.", "--json"],
    "evaluate --text": ["--text", "in.txt"],
    "evaluate": ["--source", "in.txt", "--reference", "in.txt", "--workers", "1"],
    "inspect": ["--json"],
    "rewrite": ["--exact", "--plan", "--json"],
}
WORKS = {
    "translate": TRANSLATORS,
    "generate": DECODERS,
    "fill": ENCODERS,
    "attend": TRANSLATORS + DECODERS + ENCODERS,
    "evaluate --text": DECODERS,
    "evaluate": TRANSLATORS,
    "inspect": TRANSLATORS + DECODERS + ENCODERS,
    "rewrite": (*TRANSLATORS, "language", "gpt2", "someone/model", *ENCODERS),  # a file is a part of a folder
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, small_run: Path) -> Iterator[Path]:
    """A folder with a model of each kind."""
    pytest.importorskip("transformers", reason="it comes with the extra [dev]")
    from small_checkpoints import gpt2_that_runs
    from triptych import load

    home = tmp_path_factory.mktemp("home")
    (home / "in.txt").write_text("Vier.\nHeute ist Montag.\n")
    (home / "empty").mkdir()
    (home / "translator").symlink_to(small_run)
    load(small_run, device="cpu").convert(home / "marian", "hf")
    load(home / "marian", device="cpu").convert(home / "converted", "triptych")
    for name, task in (("language", "language-model"), ("masked", "masked-language-model")):
        recipe = text_recipe(home / "in.txt", task, context=16)
        runs.train(recipe, home / name, LineDisplay())
    gpt2_that_runs(home / "gpt2")
    with pytest.MonkeyPatch.context() as patch, in_place_of_the_hub(home / "gpt2", home / "cache", patch):
        patch.chdir(home)
        yield home


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "source",
    [
        *("translator", "marian", "gpt2", "masked"),
        *(
            pytest.param(source, marks=pytest.mark.slow)
            for source in ("converted", "language", *DECODERS[2:])
        ),
    ],
)
@pytest.mark.parametrize("verb", CALLS)
def test_a_command_does_it_or_refuses_in_one_line(
    verb: str, source: str, home: Path, triptych: Command
) -> None:
    answer = triptych(verb.split()[0], source, *CALLS[verb])
    if source in WORKS[verb]:
        assert (answer.code, answer.out != "") == (0, True), answer.err
    else:
        assert (answer.code, answer.out) == (2, ""), answer.err
        assert answer.err.startswith("triptych: ")
        assert answer.err.count("\n") == 1


@pytest.mark.parametrize("verb", [verb for verb in CALLS if {*DECODERS[1:]} <= {*WORKS[verb]}])
def test_a_folder_its_file_and_its_name_on_the_hub_give_the_same(
    verb: str, home: Path, triptych: Command
) -> None:
    found = []
    for source in DECODERS[1:]:
        answer = triptych(verb.split()[0], source, *CALLS[verb])
        record = answer.record() if "--json" in CALLS[verb] else answer.out
        if isinstance(record, dict):
            record = {
                key: value for key, value in record.items() if key not in ("name", "model", "text", "seconds")
            }
        found.append(record)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("verb", [*CALLS, "convert"])
def test_what_is_not_there_is_one_usage_error(verb: str, home: Path, triptych: Command) -> None:
    options = CALLS.get(verb, ["--to", "hf", "--out", "new"])
    answer = triptych(verb.split()[0], "no/such/thing", *options)
    assert (answer.code, answer.err) == (2, f"triptych: no/such/thing: {MISSING}\n")


@pytest.mark.parametrize("source", ["empty", "in.txt"])
def test_what_is_no_model_is_one_line_with_one_exit_code(source: str, home: Path, triptych: Command) -> None:
    found = set()
    for verb, options in CALLS.items():
        answer = triptych(verb.split()[0], source, *options)
        assert answer.err.count("\n") == 1, answer.err
        found.add(answer.code)
    assert len(found) == 1
    assert found < {1, 2}
