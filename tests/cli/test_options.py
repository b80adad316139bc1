"""Options of commands that change nothing: each is given once, and changes what comes out or is refused."""

import hashlib
import json
import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from command import Command
from face.tiny import write_checkpoint
from small_checkpoints import byte_tokenizer
from triptych import load
from triptych.cli.main import COMMANDS
from triptych.cli.verbs import read_verb, spelled

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

# Lines of text that are there in the folder where a command is called.
LINES = "two young men are playing\nold women are here\n" * 20


class Scenario(NamedTuple):
    """A command line, and options with values, each of which is added to it alone."""

    line: str
    options: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line)

    @property
    def command(self) -> str:
        return self.words[0]

    @property
    def values(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for word in shlex.split(self.options):
            if word.startswith("--"):
                found[word] = []
                last = word
            else:
                found[last].append(word)
        return found


# Those that load no model, and one command that does, are in every run.
FAST = [
    Scenario(
        "cost",
        "--d-model 256 --num-heads 4 --d-k 16 --d-v 16 --num-kv-heads 2 --d-latent 32 --d-shared 8 --bias q "
        "--length 100 --context 64 --batch 3 --dtype bfloat16 --only multi-query --formulas --seconds 1 "
        "--device nowhere --json",
    ),
    Scenario("recipes", "--json"),
    Scenario("new mine.toml", "--tsv pairs.tsv --text lines.txt"),
    Scenario("new mine.toml --source lines.txt", "--target others.txt"),
    Scenario("new mine.toml --target others.txt", "--source lines.txt"),
    Scenario("new kept.toml --text lines.txt", "--force"),
    Scenario(
        "plan paper-base --devices 16 --device-memory 8GB",
        "--node-size 4 --device-flops 1T --device-bandwidth 1GB/s "
        "--node-bandwidth 1GB/s --link-bandwidth 1GB/s --set model.d_model=64 --json",
    ),
    Scenario("plan paper-base --devices 2", "--device-memory 8GB"),
    Scenario("plan paper-base --device-memory 8GB", "--devices 2"),
    Scenario(
        "attend gpt2 'two <end> young men'",
        "--file lines.txt --ids 1,2 --literal --target a --pair b --max-new-tokens 2 --max-tokens 4 "
        "--heads 0.1 "
        "--top 1 --writes 2 --steps 0.1:3 --over lines.txt --documents line --over-targets lines.txt "
        "--worth zero --explain --context 5 --tokens 6 --npz out.npz --csv out.csv --html out.html "
        "--svg out.svg --device nowhere "
        "--family nowhere --adapter nowhere --dtype bfloat16 --languages de,en --strict --without 0.1 --json",
    ),
]
SLOW = [
    Scenario(
        "lens gpt2 'two <end> young men'",
        "--ids 1,2 --literal --token a --against b --position 0 --top 2 --all --target a --max-tokens 4 "
        "--device nowhere --family nowhere --adapter nowhere --dtype bfloat16 --languages de,en --strict "
        "--without *.* --json",
    ),
    Scenario("lens gpt2 two --token a", "--against b --top 2 --all"),
    Scenario("lens marian two", "--target ein --languages de,en"),
    Scenario("cost", "--html out.html"),
    Scenario("cost --html kept.html", "--force"),
    Scenario("attend gpt2 'two <end> young men' --csv kept.csv", "--force"),
    Scenario(
        "attend gpt2 --over special.txt --json",
        "--documents line --worth zero --explain --context 5 --literal --without 0.1 --dtype bfloat16",
    ),
    Scenario("attend gpt2 --over lines.txt", "--tokens 6 --json"),
    Scenario("attend gpt2 two --json", "--top 1 --all"),
    Scenario("attend marian --over lines.txt", "--over-targets others.txt --languages de,en"),
    Scenario("attend marian 'two <end> young men'", "--target ein"),
    Scenario(
        "generate gpt2 'two <end> young men' --max-new-tokens 4 --json",
        "--file lines.txt --ids 1,2 --literal --temperature 1 --top-k 2 --top-p 0.5 --min-p 0.5 "
        "--repetition-penalty 1.9 --generation-config nowhere --num-samples 2 --beam 0 --alpha 0.5 --stop '' "
        "--max-prompt-tokens 3 --chat --device nowhere "
        "--family nowhere --adapter nowhere --dtype bfloat16 --engine nowhere --precision int8 "
        "--strict --without *.* --attention 0.1",
    ),
    Scenario(
        "generate gpt2 'two <end> young men' --temperature 1 --seed 1",
        "--seed 2 --top-k 2 --top-p 0.3 --min-p 0.9 --json",
    ),
    Scenario("generate gpt2 'two <end> young men'", "--max-new-tokens 3"),
    Scenario(
        "fill bert '[MASK] two'",
        "--count 2 --max-tokens 3 --device nowhere "
        "--family nowhere --adapter nowhere --dtype bfloat16 --strict --without *.* --json",
    ),
    Scenario(
        "translate marian two --json",
        "--out out.txt --beam 9999999 --alpha 99 --n-best 2 --stop nowhere --max-extra-tokens 1 "
        "--max-source-tokens 1 --glossary lines.txt --workers 0 --device nowhere "
        "--family nowhere --adapter nowhere --engine nowhere --no-repeat-ngram-size 1 --repetition-penalty 9 "
        "--temperature 1 --top-k 1 --top-p 0.5 --min-p 0.5 "
        "--precision nowhere --languages de,en --strict --shortlist nowhere --ensemble nowhere --without *.* "
        "--attention cross.0.1 --attention-html out.html",
    ),
    Scenario("translate marian two", "--json"),
    Scenario("translate marian two --temperature 1", "--seed 2"),
    Scenario("translate marian 'ein Satz. zwei Satz.' --json", "--no-split"),
    Scenario("translate t5 'two <end> young men'", "--literal"),
    Scenario("translate marian two --attention-html kept.html", "--force"),
    Scenario(
        "evaluate gpt2 --text lines.txt --json",
        "--labels lines.txt --source lines.txt --reference lines.txt --beam 2 --alpha 0.1 --stop full "
        "--workers 2 --out out.txt "
        "--bleu-tokenize char "
        "--documents line --context 8 --stride 3 --device nowhere "
        "--family nowhere --adapter nowhere --dtype bfloat16 --engine nowhere "
        "--precision int8 --languages de,en --strict --shortlist nowhere --ensemble nowhere --without *.*",
    ),
    Scenario("evaluate gpt2 --text special.txt", "--literal --json"),
    Scenario("evaluate marian --source lines.txt --reference others.txt --out kept.txt", "--force"),
    Scenario("evaluate marian --source lines.txt", "--reference others.txt"),
    Scenario("evaluate gpt2", "--text lines.txt"),
    Scenario(
        "inspect gpt2",
        "--layers 0 --heads 0.1 --compare bert --family nowhere --adapter nowhere --strict --html out.html "
        "--csv out.csv --parquet out.parquet --json",
    ),
    Scenario("inspect llama", "--ignore-rotary"),
    Scenario("inspect gpt2 --json", "--all"),
    Scenario("inspect gpt2 --csv kept.csv", "--force"),
    Scenario(
        "rewrite gpt2 --do truncate(rank=3) --out out --json",
        "--exact --recipe nowhere --rank 2 --energy 0.9 --budget 0.5 --layers 0 --list --plan "
        "--calibrate nowhere --text lines.txt --no-compare --family nowhere --adapter nowhere --strict",
    ),
    Scenario("rewrite gpt2 --out out", "--do fold_value_bias --exact"),
    Scenario("rewrite bert --do fold_norm --out out", "--skip-refused"),
    Scenario("rewrite gpt2 --exact --plan", "--json"),
    Scenario("rewrite gpt2 --exact", "--out out"),
    Scenario("verify cut", "--against bert --text lines.txt --family nowhere --calibrate lines.txt --json"),
    Scenario(
        "diff gpt2 cut --require near --json",
        "--text lines.txt --within 0.5 --also bert --html out.html --junit out.xml --family nowhere --strict",
    ),
    Scenario("diff gpt2 cut --require near", "--json"),
    Scenario("diff gpt2 cut", "--require near"),
    Scenario("diff gpt2 cut --require near --html kept.html", "--force"),
    Scenario(
        "convert marian --out out --to ctranslate2",
        "--from hf --quantization int8 --strict --shortlist nowhere --family nowhere --adapter nowhere "
        "--json",
    ),
    Scenario("convert marian --out out", "--to ctranslate2"),
    Scenario("convert gpt2 --to web --out out.html", "--quantization int8 --json"),
    Scenario("convert marian --to ctranslate2", "--out out"),
    Scenario(
        "shortlist marian --out out.list --source lines.txt --target others.txt",
        "--most 1 --frequent 1 --languages de,en --strict --adapter nowhere --json",
    ),
    Scenario("shortlist marian --out out.list --target others.txt", "--source lines.txt"),
    Scenario("shortlist marian --out out.list --source lines.txt", "--target others.txt"),
    Scenario("shortlist marian --out kept.txt --source lines.txt --target others.txt", "--force"),
    Scenario("shortlist marian --source lines.txt --target others.txt", "--out out.list"),
]
# Files that are there already.
KEPT = ("kept.csv", "kept.toml", "kept.html", "kept.txt")
# What commands that take long, or wait for somebody, do with their options is tried with each of them.
ELSEWHERE = {"demo", "train", "distil", "report", "compare", "serve", "explore"}
# A source on this machine is read as it is. Times are not the same in two calls.
CHANGES_NOTHING = {"offline", "measure"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return a function that gives the folder of a tiny model, and any other word as it is."""
    place = tmp_path_factory.mktemp("models")

    @cache
    def folder(word: str) -> str:
        path = place / word
        if word == "cut":
            load(folder("gpt2")).rewrite("truncate(rank=3)", out=path)
            return str(path)
        if word not in ("gpt2", "bert", "llama", "marian", "t5"):
            return word
        write_checkpoint(word, path, **({"vocab_size": 259} if word == "bert" else {}))
        if word == "bert":
            byte_tokenizer(path, "<pad>", "<end>", "<mask>", pad_token="<pad>", mask_token="<mask>")
        # A key that nobody knows, for --strict.
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "note_of_mine": True}))
        return str(path)

    return folder


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    """What came of the command lines of scenarios, by the line."""
    return {}


def outcome(triptych: Command, place: Path, words: list[str]) -> Any:
    """Return what a command prints and writes, or "refused" with its line."""
    place.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        Path("lines.txt").write_text(LINES)
        Path("pairs.tsv").write_text("".join(f"{i} women\t{i} Frauen\n" for i in range(40)))
        Path("others.txt").write_text("ein Satz\nzwei Sätze\n" * 20)
        Path("special.txt").write_text("two <end> young men\n" * 4)
        for name in KEPT:
            Path(name).write_text("mine\n")
        answer = triptych(*words)
    assert answer.code in (0, 1, 2), answer.err
    if answer.code:
        assert answer.err.strip().splitlines()[-1].startswith("triptych: ")
        return "refused", answer.err
    files = {
        str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(place.rglob("*"))
        if path.is_file()
    }
    return re.sub(r"[\d.,]+ (s|seconds)\b", "", answer.out), re.sub(r"[\d.,]+ s\b", "", answer.err), files


def cases(scenarios: list[Scenario], mark: pytest.MarkDecorator) -> list[Any]:
    return [
        pytest.param(scenario, option, id=f"{scenario.line}, {option}", marks=mark)
        for scenario in scenarios
        for option in scenario.values
    ]


@pytest.mark.parametrize(
    ("scenario", "option"), [*cases(FAST, pytest.mark.sampled(2)), *cases(SLOW, pytest.mark.slow)]
)
def test_an_option_changes_what_a_command_gives_or_is_refused(
    scenario: Scenario,
    option: str,
    models: Callable[[str], str],
    known: dict[str, Any],
    triptych: Command,
    tmp_path: Path,
) -> None:
    def named(words: list[str]) -> list[str]:
        return [words[0], *map(models, words[1:])]

    if scenario.line not in known:
        known[scenario.line] = outcome(triptych, tmp_path / "before", named(scenario.words))
        again = outcome(triptych, tmp_path / "again", named(scenario.words))
        assert again == known[scenario.line], "this command line cannot be compared with another"
    before = known[scenario.line]
    words = [*scenario.words, option, *scenario.values[option]]
    after = outcome(triptych, tmp_path / "after", named(words))
    assert after != before
    # Where a command line lacks something, the option must be what it lacks.
    assert before[0] != "refused" or after[0] != "refused"


@pytest.mark.parametrize("name", sorted({*COMMANDS} - ELSEWHERE))
def test_every_option_of_a_command_is_in_a_scenario(name: str) -> None:
    given = {option for one in (*FAST, *SLOW) if one.command == name for option in one.values}
    parameters = [one for one in read_verb(name).parameters if not one.positional]
    for parameter in parameters:
        spellings = {*spelled(parameter.name)}
        spellings |= {f"--no-{spelling[2:]}" for spelling in spellings}
        assert bool(spellings & given) != (parameter.name in CHANGES_NOTHING), parameter.name
