"""Options that change nothing: every option of every verb changes what comes out, or is refused.

A new option without an entry fails a test. An entry is a call that is made here, or else a test elsewhere
gives the option. Besides, the code of a verb must name each of its parameters: what it names nowhere it does
not use.
"""

import ast
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from face.tiny import write_checkpoint
from small_checkpoints import byte_tokenizer
from triptych import Model, TriptychError, load
from triptych.cli.main import COMMANDS
from triptych.cli.options import load_model
from triptych.cli.verbs import read_verb, spelled
from triptych.core.models import LanguageModel, LanguageModelConfig
from triptych.running.decoding import Translator
from triptych.seeing.lens import Lens

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
TESTS = Path(__file__).parents[1]
SOURCE = Path(inspect.getfile(load)).parent
TEXT = "two young men are playing"
OTHER = "old women are here"
_PLACE = TemporaryDirectory()


class Case(NamedTuple):
    """A call of a method, and an option of it with a value that must make a difference or be refused."""

    method: str
    model: str
    given: dict[str, Any]
    option: str
    value: Any

    def __str__(self) -> str:
        return f"{self.method}, {self.option}, {self.model}"


def cases(method: str, model: str, given: dict[str, Any], **options: Any) -> list[Case]:
    return [Case(method, model, given, option, value) for option, value in options.items()]


MARKED = "two <end> men"  # with a special token
ONE, TWO = {"text": TEXT}, {"text": [TEXT, OTHER]}
DRAWN, BEAM = {**ONE, "temperature": 1.0}, {**ONE, "beam_size": 4}
PAIR: dict[str, Any] = {"clean": TEXT, "corrupted": TEXT[::-1], "metric": lambda run: float(run.loss)}
PLANNED: dict[str, Any] = {"steps": "truncate(rank=2)"}
HALVED: dict[str, Any] = {"heads": "0.0,0.1", "what": "z", "with_": lambda z: z / z.ndim}
PUSHED: dict[str, Any] = {"place": "residual.1", "vector": torch.arange(24.0)}
CASES = [
    *cases("ablate", "gpt2", {"heads": "0.1"}, by="mean", text=TEXT),
    *cases("attend", "marian", ONE, target="ein Satz"),
    *cases("attend", "gpt2", ONE, max_new_tokens=3, max_tokens=4, target="a"),
    *cases(
        "attend_over", "gpt2", TWO, documents="line", worth="zero", explain=True, context=5, most_tokens=6
    ),
    *cases("attend_over", "marian", TWO, targets=["ein Satz", "zwei"], documents="line"),
    *cases("check", "gpt2", {}, text=TEXT, target="a"),
    *cases("composition", "gpt2", {"into": "Q"}, stack="encoder"),
    *cases("lens", "gpt2", ONE, max_tokens=4, target="a"),
    *cases("lens", "marian", ONE, target="ein Satz"),
    *cases("convert", "gpt2", {"path": "new", "to": "triptych"}, quantization="int8"),
    *cases("convert", "gpt2", {"path": "new.html", "to": "web"}, quantization="int8"),
    *cases("edit", "gpt2", HALVED, together=True),
    *cases("evaluate", "marian", TWO, references=[OTHER, TEXT]),
    *cases("evaluate", "gpt2", TWO, labels=["a", "b"]),
    *cases("evaluate", "gpt2", {}, text=TEXT),
    *cases("evaluate", "gpt2", TWO, context=8, stride=3, beam_size=2, alpha=0.1, stop="full", workers=2),
    *cases("evaluate", "marian", {**TWO, "references": [OTHER, TEXT]}, context=8, stride=3, beam_size=1),
    *cases("evaluate", "marian", {**TWO, "references": [OTHER, TEXT]}, alpha=float("nan")),
    *cases("evaluate", "marian", {**TWO, "references": [OTHER, TEXT]}, bleu_tokenize="char"),
    *cases(
        "generate", "gpt2", ONE, max_new_tokens=3, temperature=1.0, top_k=2, top_p=0.5, min_p=0.5, alpha=0.5
    ),
    *cases("generate", "gpt2", ONE, repetition_penalty=1.9, num_samples=2, chat=True, stream=True),
    *cases("generate", "gpt2", ONE, max_prompt_tokens=3, stop="", beam_size=2),
    *cases("fill", "masked", {"text": "two [MASK] men"}, count=2, max_tokens=3),
    *cases("generate", "gpt2", DRAWN, top_k=2, top_p=0.3, min_p=0.9, seed=4, beam_size=2),
    *cases("inspect", "gpt2", {}, layers=[0], heads=[0]),
    *cases("inspect", "llama", {}, ignore_rotary=True),
    *cases("patch", "gpt2", {"heads": "0.1", "run": OTHER}, what="q"),
    *cases("plan", "gpt2", PLANNED, layers=[0], calibration="nowhere.txt"),
    *cases("plan", "bert", {"steps": "fold_norm"}, skip_refused=True),
    *cases("steer", "gpt2", PUSHED, scale=3.0),
    *cases("sweep", "gpt2", PAIR, what="q"),
    *cases("translate", "marian", {"text": "ein Satz. zwei Satz."}, split=False),
    *cases("translate", "marian", ONE, no_repeat_ngram_size=1, repetition_penalty=9.0, temperature=1.0),
    *cases("translate", "marian", {**ONE, "temperature": 1.0}, top_k=1, top_p=0.1, min_p=0.9, seed=4),
    *cases("run", "gpt2", ONE, grad=True, max_tokens=4, target="a"),
    *cases("run", "marian", ONE, target="ein Satz"),
    *cases("score", "gpt2", ONE, max_tokens=4, target="a"),
    *cases("score", "marian", ONE, target="ein Satz"),
    *cases("translate", "marian", ONE, beam_size=9, alpha=float("nan"), num_best=2, max_extra_tokens=1),
    *[
        case
        for method in ("attend", "attend_over", "evaluate", "generate", "lens", "run", "score")
        for case in cases(method, "gpt2", {"text": MARKED}, special_tokens="text")
    ],
    *cases("translate", "t5", {"text": MARKED}, special_tokens="text"),
    *cases("translate", "marian", ONE, max_source_tokens=3, stream=True, glossary={"men": "X"}, workers=0),
]
# What options of `load` do is seen in what the model gives for a text.
OPENINGS = [
    *cases("load", "gpt2", {}, dtype="bfloat16", languages=("de", "en"), tokenizer=Path("nowhere")),
    *cases("load", "gpt2", {}, adapter="nowhere"),
    *cases("load", "gpt2", {}, family="nowhere.toml", shortlist="nowhere.txt", ensemble=("nowhere",)),
    *cases("load", "gpt2", {}, code="nowhere.py", device="nowhere", strict=True),
    *cases("load", "marian", {}, languages=("de", "en"), tokenizer=Path(_PLACE.name), dtype="bfloat16"),
    *cases("load", "module", {}, languages=("de", "en"), strict=True, offline=True, family="nowhere.toml"),
    *cases("load", "module", {}, tokenizer=5, dtype="float64"),
]
# Those that a test of the method gives. A seed draws nothing without a temperature, and is no mistake there.
GIVEN_ELSEWHERE = {
    "attend_over": {"progress"},
    "distil": {"beam_size", "alpha", "num_best", "interpolate", "originals", "teacher_weight", "workers"},
    "evaluate": {"progress"},
    "generate": {"generation_config"},
    "inspect": {"progress"},
    "load": {"engine", "precision"},
    "patch": {"positions"},
    "rewrite": {"layers", "out", "calibration", "skip_refused", "text", "compare", "progress"},
    "shortlist": {"source", "target", "most", "frequent"},
    "sweep": {"progress"},
    "translate": {"stop"},
}
# What is shown while something is done, which `train` and its like try.
DISPLAYS = {"display", "progress"}


@cache
def folder_of(name: str) -> Path:
    folder = Path(_PLACE.name) / name
    if name == "masked":
        write_checkpoint("bert", folder, vocab_size=259)
        byte_tokenizer(folder, "<pad>", "<end>", "<mask>", pad_token="<pad>", mask_token="<mask>")
    else:
        write_checkpoint(name, folder)
    record = (folder / "config.json").read_text()
    (folder / "config.json").write_text(record.replace("{", '{\n"a_note_of_mine": true,', 1))
    return folder


def source_of(name: str) -> Any:
    if name != "module":
        return folder_of(name)
    torch.manual_seed(0)
    return LanguageModel.of(LanguageModelConfig(num_layers=1, d_model=16, num_heads=2), "decoder", 300).eval()


@cache
def model_of(name: str) -> Model:
    return load(folder_of(name))


def plain(found: Any) -> Any:
    """What two results are compared by."""
    if isinstance(found, torch.Tensor):
        return str(found.dtype), tuple(found.shape), found.requires_grad, found.detach().double().sum().item()
    if isinstance(found, Iterator):
        return "iterator", *map(plain, found)
    if isinstance(found, list | tuple):
        return tuple(map(plain, found))
    if isinstance(found, dict):
        return tuple((name, plain(value)) for name, value in found.items())
    if isinstance(found, Lens):
        return plain((found.logits(), found.ids))
    if hasattr(found, "logits") and hasattr(found, "ids"):
        return plain((found.logits, found.ids))
    if hasattr(found, "record"):
        return plain(found.record())
    if isinstance(found, Translator):
        return plain((found.options, found.workers))
    if isinstance(found, Model):
        return plain(found.run(TEXT))
    if dataclasses.is_dataclass(found):
        return tuple(plain(getattr(found, field.name)) for field in dataclasses.fields(found))
    return repr(found)


def outcome(call: Callable[[], Any]) -> Any:
    """What comes of a call, or that it is refused."""
    try:
        return plain(call())
    except TriptychError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return "refused"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_option_changes_what_comes_out_or_is_refused(case: Case, tmp_path: Path) -> None:
    method = getattr(model_of(case.model), case.method)
    given, before = dict(case.given), tuple[Any, ...]()
    if "run" in given:
        given["run"] = model_of(case.model).run(given["run"])
    if "steps" in given:
        before = (given.pop("steps"),)
    if "path" in given:
        given["path"] = tmp_path / given["path"]
    changed = outcome(lambda: method(*before, **{**given, case.option: case.value}))
    assert changed == "refused" or changed != outcome(lambda: method(*before, **given))


def test_heads_that_a_command_switches_off_are_off() -> None:
    whole, less = (load_model(folder_of("gpt2"), without).run(TEXT).logits for without in (None, "*.*"))
    assert not torch.equal(whole, less)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", OPENINGS, ids=str)
def test_an_option_of_load_changes_what_is_read_or_is_refused(case: Case) -> None:
    def opened(**options: Any) -> Any:
        found = load(source_of(case.model), **options)
        if case.model != "module":
            return found.run(TEXT)
        return next(found.reader.model.parameters()) if options else None

    if case.model == "module":  # which reads no text without a tokenizer
        options = {"tokenizer": folder_of("gpt2"), case.option: case.value}
        before = outcome(lambda: load(source_of("module"), tokenizer=folder_of("gpt2")).run(TEXT))
        changed = outcome(lambda: load(source_of("module"), **options).run(TEXT))
    else:
        before, changed = outcome(opened), outcome(lambda: opened(**{case.option: case.value}))
    assert before != "refused"
    assert changed == "refused" or changed != before


def options_of(function: Any) -> set[str]:
    parameters = list(inspect.signature(function).parameters.values())
    return {one.name for one in parameters if one.default is not one.empty} - DISPLAYS


def methods() -> dict[str, Any]:
    found = {
        name: getattr(Model, name)
        for name in vars(nn.Module) | dict.fromkeys(dir(Model))
        if hasattr(Model, name)
    }
    return {name: own for name, own in found.items() if not name.startswith("_") and inspect.isfunction(own)}


@cache
def constants_and_calls() -> tuple[dict[Path, set[str]], set[tuple[str, str]]]:
    """The words of the texts in each test, and the keywords that tests give to functions by their names."""
    words, calls = dict[Path, set[str]](), set[tuple[str, str]]()
    for path in TESTS.rglob("*.py"):
        own = words.setdefault(path, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                own |= {*node.value.replace("=", " ").split()}
            elif isinstance(node, ast.Call) and path != Path(__file__):
                name = ast.unparse(node.func).rpartition(".")[2]
                calls |= {(name, keyword.arg) for keyword in node.keywords if keyword.arg is not None}
    return words, calls


@pytest.mark.parametrize("method", ["load", *methods()])
def test_every_option_of_the_library_has_an_entry(method: str) -> None:
    function = load if method == "load" else methods()[method]
    tried = {case.option for case in (*CASES, *OPENINGS) if case.method == method}
    elsewhere = GIVEN_ELSEWHERE.get(method, set()) - DISPLAYS
    assert options_of(function) == tried | elsewhere
    assert not tried & elsewhere
    words, calls = constants_and_calls()
    by_name = {keyword for name, keyword in calls if name == method}
    on_command_line = (
        words[TESTS / "cli" / f"test_{method}.py"] if method in ("distil", "shortlist") else set()
    )
    given = by_name | {one for one in elsewhere if spelled(one)[0] in on_command_line}
    assert elsewhere <= given


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_given_in_a_test_of_it(name: str) -> None:
    words, _ = constants_and_calls()
    of_command = [said for path, said in words.items() if name in said or path.stem == f"test_{name}"]
    # Those of a group are of the library, which tries them; a verb passes on the group as it is.
    own = [one for one in read_verb(name).parameters if one.group is None and not one.positional]
    options = {parameter.name: spelled(parameter.name) for parameter in own}
    never = {
        option
        for option, spellings in options.items()
        if not any({*spellings, f"--no-{spellings[0][2:]}"} & said for said in of_command)
    }
    assert never <= {"without"}  # which is tried above


def named_in(node: ast.AST) -> set[str]:
    """The names that code reads."""
    return {
        part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)
    }


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """The verbs of the command line, and `load` and the methods of a model."""
    for path in [*(SOURCE / "cli" / f"{name}.py" for name in COMMANDS), SOURCE / "model.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (node.name == path.stem or path.stem == "model"):
                yield f"{path.stem}.{node.name}", node


def test_every_parameter_of_a_verb_is_named_in_its_code() -> None:
    unused = set[str]()
    for name, function in functions():
        given = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
        is_stub = all(isinstance(part, ast.Expr) for part in function.body)
        named = {"self"}.union(*map(named_in, function.body))
        unused |= set() if is_stub else {f"{name}: {one.arg}" for one in given if one.arg not in named}
    assert not unused
