"""A user's own attention class, as docs/how-to/own-attention.md shows it: trained, opened, compared."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import triptych
from studying import BASE
from training.launching import start
from triptych import user_code
from triptych.cli.main import run as run_command
from triptych.core.attention import MultiHeadAttention
from triptych.core.models import AttentionConfig, EncoderDecoder, ModelConfig
from triptych.errors import TriptychError, UsageError
from triptych.running.decoding.workers import Searcher, WorkerPool
from triptych.running.opening import open_reader
from triptych.training.metrics import read_metrics

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "own-attention.md"
STUDY = """
name = "turned"
base = "base.toml"
seeds = 3
noise = false
[set]
training.max_steps = 2
[variants.factored]
[variants.turned]
model.attention.projections = "mine.py:TurnedValues"
"""


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder with the page's files, in a process that has been given no code."""
    monkeypatch.chdir(write_page(tmp_path))
    monkeypatch.setattr(user_code, "_FILES", {})
    return tmp_path


def write_page(folder: Path) -> Path:
    (folder / "text.txt").write_text("the cat sat on the mat.\n" * 40)
    (folder / "mine.py").write_text(block("python"))
    (folder / "base.toml").write_text(BASE)
    (folder / "recipe.toml").write_text(BASE + block("toml"))
    (folder / "study.toml").write_text(STUDY)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the page's recipe."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(write_page(folder))
        patch.setattr(user_code, "_FILES", {})
        triptych.train(triptych.read_recipe("recipe.toml"), Path("run"))
    return folder / "run"


@pytest.fixture
def run(place: Path, trained: Path) -> Path:
    """A run that was trained, in a process that has been given no code."""
    return shutil.copytree(trained, place / "run")


@pytest.mark.parametrize(
    "compares", [False, pytest.param(True, marks=pytest.mark.slow, id="a study of six runs")]
)
def test_the_page_works_from_training_to_a_study(
    compares: bool, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(block("python").splitlines()) < 30
    for line in block("console").splitlines():
        if (" compare " in line) != compares:
            continue
        monkeypatch.setattr(sys, "argv", shlex.split(line)[1:])
        with pytest.raises(SystemExit) as stop:
            run_command()
        assert not stop.value.code, f"{line}\n{capsys.readouterr().err}"
        user_code._FILES.clear()  # each command is a process of its own
    assert not list(place.glob("studies/turned/**/*.py")), "a run keeps no code"
    assert len(list(place.glob("studies/turned/runs/*.result.json"))) == 6 * compares


@pytest.mark.slow
def test_two_processes_train_it_in_shards_with_frozen_embeddings_as_one_does(place: Path) -> None:
    (place / "recipe.toml").write_text(f"{BASE}{block('toml')}[model.embeddings]\nfrozen = true\n")
    recipe = triptych.read_recipe(place / "recipe.toml", ["training.log_every_steps=1"])
    triptych.train(recipe, place / "one")
    shared = ["--set", "training.log_every_steps=1", "--set", "training.parallel=fsdp"]
    for code, said in start(2, "-m", "triptych", "train", "recipe.toml", "--out", "two", *shared):
        assert code == 0, said
    losses = [
        [record["loss"] for record in read_metrics(place / name / "metrics.jsonl") if "loss" in record]
        for name in ("one", "two")
    ]
    tables = [
        load_file(place / name / "model.safetensors")["embeddings.table.weight"] for name in ("one", "two")
    ]
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert torch.equal(tables[0], tables[1])


def test_the_layer_computes_what_its_class_says(place: Path) -> None:
    user_code.use_code("mine.py")
    layer = MultiHeadAttention(16, 2, triptych.parameterisation("mine.py:TurnedValues", d_k=4)).double()
    x = torch.randn(2, 5, 16, dtype=torch.double, requires_grad=True)
    maps = layer.projections
    q, v = (map_.weight.view(2, 4, 16) for map_ in (maps.q_proj, maps.v_proj))
    wanted = torch.zeros(2, 5, 16, dtype=torch.double)
    for i in range(2):
        values = x @ v[i].T
        scores = (x @ q[i].T) @ (values @ maps.turn[i].T).mT / 2
        wanted = wanted + scores.softmax(-1) @ values @ maps.o_proj.weight[:, 4 * i : 4 * i + 4].T
    found = layer(x).output
    torch.testing.assert_close(found, wanted)
    parameters = [x, *layer.parameters()]
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), parameters),
        torch.autograd.grad(wanted.square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_decoding_continues_as_the_plain_formula_does(run: Path) -> None:
    continued = triptych.load(run, code="mine.py").generate("the cat", max_new_tokens=8)
    opened = open_reader(run)
    ids = list(opened.tokenizer.encode(["the cat"], add_special=True)[0])
    prompt = len(ids)
    for _ in range(8):
        ids.append(int(opened.language_model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert continued.text == opened.tokenizer.decode([ids[prompt:]])[0]


@pytest.mark.slow
def test_translators_search_in_other_processes_with_it(place: Path) -> None:
    user_code.use_code("mine.py")
    site = {"projections": "mine.py:TurnedValues"}
    config = ModelConfig.model_validate(
        {
            **{"d_model": 16, "d_ff": 16, "num_heads": 2, "tie_embeddings": "none"},
            "encoder": {"num_layers": 1, "attention": site},
            "decoder": {"num_layers": 1, "attention": site, "cross_attention": site},
        }
    )
    model = EncoderDecoder.of(config, 20, 20).eval()
    pool = WorkerPool(logits_of, (model,))
    try:
        pool.start(1)
        pool.wait_until_ready()
    finally:
        pool.close()


def logits_of(model: EncoderDecoder) -> Searcher:
    """What another process makes of a model: it must have its classes."""
    assert type(model.decoder.blocks[0].self_attention.parameterisation).__name__ == "TurnedValues"
    return lambda sentences: []


def test_a_rewrite_keeps_the_class_or_writes_another_or_the_maps_themselves(run: Path) -> None:
    model = triptych.load(run, code="mine.py")
    text = "the cat sat"
    for step, kept in (("expand()", False), ("drop_key_bias()", True)):
        changed = model.rewrite(step)
        layer = changed.reader.language_model.blocks[0].self_attention
        assert user_code.is_in_file(layer.parameterisation.name) == kept
    torch.testing.assert_close(model.rewrite("expand()").run(text).logits, model.run(text).logits)
    # The class cannot hold maps of a lower rank: they are kept as chains of maps.
    cut = model.rewrite("truncate(rank=4, forms=['ov'])")
    layer = cut.reader.language_model.blocks[0].self_attention
    assert not user_code.is_in_file(layer.parameterisation.name)
    assert int(cut[0, 0].ov.rank()) == 4


def test_a_layer_of_it_scaled_outside_the_softmax_has_a_configuration(place: Path) -> None:
    user_code.use_code("mine.py")
    layer = MultiHeadAttention(16, 2, triptych.parameterisation("mine.py:TurnedValues"), scale="outside")
    found = AttentionConfig.of(layer)
    assert (found.projections, found.scale) == ("mine.py:TurnedValues", "outside")


def test_opening_a_run_executes_nothing_of_it_and_says_what_to_do(run: Path) -> None:
    (run / "mine.py").write_text("raise SystemExit('executed')")
    for opened in (
        lambda: triptych.load(run).generate("the cat"),
        lambda: triptych.load(run).inspect(),
        lambda: triptych.resume(run),
        lambda: triptych.read_recipe(run / "recipe.toml"),
    ):
        with pytest.raises(UsageError, match=r"mine\.py:TurnedValues.*give it with --code mine\.py"):
            opened()


def test_a_run_whose_files_hide_the_digest_is_executed_no_more(run: Path) -> None:
    recipe = run / "recipe.toml"
    recipe.write_text(re.sub(r"\[code\]\n.*\n", "", recipe.read_text()))
    config = run / "config.json"
    config.write_text(re.sub(r',\s*"code": \{[^}]*\}', "", config.read_text()))
    user_code.use_code("mine.py")
    with pytest.raises(UsageError, match="without the SHA-256"):
        triptych.read_recipe(recipe)
    with pytest.raises(TriptychError, match="without the SHA-256"):
        triptych.load(run, code="mine.py").generate("the cat")


def test_another_file_than_the_runs_is_refused(run: Path) -> None:
    other = run.parent / "other"
    other.mkdir()
    (other / "mine.py").write_text("import pathlib\npathlib.Path('executed').touch()\n")
    for opened in (
        lambda: triptych.load(run, code=other / "mine.py").generate("the cat"),
        lambda: triptych.load(run, code=other / "mine.py").inspect(),
        lambda: triptych.resume(run, code=other / "mine.py"),
    ):
        with pytest.raises(UsageError, match=r"is not the mine\.py that the run was trained with"):
            opened()
        assert not user_code.paths(), "what was refused is forgotten"
    assert not Path("executed").exists(), "the digest is compared before the file is executed"
    model = triptych.load(run, code="mine.py")
    assert model.generate("the cat", max_new_tokens=1)
    with pytest.raises(UsageError, match="is not the"):
        triptych.resume(run, code=other / "mine.py")
    assert user_code.paths() == [Path("mine.py").absolute()], "the file before it is known again"
    assert model.rewrite("drop_key_bias()").generate("the cat", max_new_tokens=1)


@pytest.mark.parametrize("code", ["{}", "3", '{"mine.py" = 3}', "['mine.py']"])
def test_a_recipe_that_gives_no_proper_digest_executes_nothing(
    place: Path, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "mine.py").write_text("print('executed')\n")
    user_code.use_code("mine.py")
    recipe = place / "recipe.toml"
    recipe.write_text(f"code = {code}\n" + recipe.read_text())
    with pytest.raises(UsageError, match=r"SHA-256"):
        triptych.read_recipe(recipe)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def broken(:\n", r"mine\.py, line 1: SyntaxError"),
        ("import no_such_library\n", r"mine\.py: ModuleNotFoundError: .*no_such_library"),
        ("class TurnedValues:\n    pass\n", "is no Parameterisation"),
        ("exit(0)\n", r"mine\.py: SystemExit: 0: a file of classes must not end the process"),
        ("x = 1\n", r"mine\.py defines no class TurnedValues"),
        (
            "from triptych.core.attention import Factored as TurnedValues\n",
            r"mine\.py defines no class TurnedValues",
        ),
    ],
)
def test_a_file_that_is_not_as_it_should_be_is_said_in_one_line(place: Path, text: str, message: str) -> None:
    (place / "mine.py").write_text(text)
    with pytest.raises(UsageError, match=message):
        triptych.read_recipe(place / "recipe.toml")


def test_a_class_that_ends_the_process_is_an_error_of_its_file(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (place / "mine.py").read_text().replace("class TurnedValues(", "class Base(")
    ending = "class TurnedValues(Base):\n    def maps(self, sizes):\n        raise SystemExit(0)\n"
    (place / "mine.py").write_text(f"{text}\n{ending}")
    monkeypatch.setattr(sys, "argv", ["triptych", "train", "recipe.toml", "--out", "ended"])
    with pytest.raises(SystemExit) as stop:
        run_command()
    assert stop.value.code == 2
    assert "mine.py ended the process (SystemExit: 0)" in capsys.readouterr().err
    assert not (place / "ended" / "config.json").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that never ends is Linux's")
def test_a_device_is_no_file_of_classes(place: Path) -> None:
    with pytest.raises(UsageError, match=r"^/dev/full cannot be read \(not a regular file\): --code FILE"):
        user_code.use_code("/dev/full")


def test_an_option_that_the_class_does_not_have_is_refused(place: Path) -> None:
    with pytest.raises(UsageError, match=r"d_kk: did you mean d_k\?"):
        triptych.read_recipe(place / "recipe.toml", ["model.attention.d_kk=3"])
