"""`triptych distil`: a teacher's translations become the text of a student."""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from command import Command
from triptych import load
from triptych.errors import DataError, UsageError
from triptych.running.decoding import Translator
from triptych.training import distilling, read_recipe, resolve
from triptych.training.corpora.generated import generate_pairs
from triptych.training.recipe import Recipe

PAIRS = generate_pairs(3, "test", seed=1)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a text of three pairs, translated in blocks of one sentence."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(distilling, "_BLOCK", 1)
    write_pairs(PAIRS)
    return tmp_path


def write_pairs(pairs: Sequence[tuple[str, str]]) -> None:
    Path("pairs.jsonl").write_text("".join(json.dumps({"source": s, "target": t}) + "\n" for s, t in pairs))


def recipe(rdrop: float = 0.0, **data: Any) -> Recipe:
    """A student's recipe for the text."""
    text = {"file": "pairs.jsonl"}
    training = {"max_steps": 2, "warmup_steps": 1, "rdrop": rdrop}
    sections = {"tokenizer": {"vocab_size": 300}, "model": {"preset": "tiny"}, "training": training}
    found = resolve({"data": {"train": text, "valid": text, "cache": ""} | data, **sections})
    assert isinstance(found, Recipe)
    return found


def written(folder: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(folder, "train.jsonl").read_text().splitlines()]


def test_the_text_of_a_student_is_what_its_teacher_translates(small_run: Path) -> None:
    teacher = load(small_run)
    found = teacher.distil(recipe(), "out", beam_size=3)
    texts = [one.text for one in teacher.translate([source for source, _ in PAIRS], beam_size=3)]
    assert written("out") == [
        {"source": source, "target": text, "by": "teacher"}
        for (source, _), text in zip(PAIRS, texts, strict=True)
    ]
    assert (found.sentences, found.pairs) == (3, 3)
    student = read_recipe(found.recipe)
    assert isinstance(student, Recipe)
    assert student.data.train.file == Path("out/train.jsonl")
    assert student.model_copy(update={"data": None, "name": ""}) == recipe().model_copy(
        update={"data": None, "name": ""}
    )
    assert student.data.valid == recipe().data.valid


def test_the_length_penalty_of_the_teacher_is_what_was_asked_for(small_run: Path) -> None:
    teacher = load(small_run)
    for folder, alpha in (("short", 0.0), ("long", 10.0)):
        teacher.distil(recipe(), folder, beam_size=3, alpha=alpha)
        texts = teacher.translate([source for source, _ in PAIRS], beam_size=3, alpha=alpha)
        # Translations that were cut off at the limit are left out.
        whole = [one.text for one in texts if one.finish == "stop"]
        assert [pair["target"] for pair in written(folder)] == whole
    records = [Path(folder, "distillation.json").read_text() for folder in ("short", "long")]
    assert records[0] != records[1]
    with pytest.raises(UsageError, match="alpha is 11"):
        teacher.distil(recipe(), "none", alpha=11.0)


@pytest.mark.parametrize("damaged", ["cut", "gone"])
def test_a_text_that_is_not_what_was_written_is_not_trained_on(damaged: str, small_run: Path) -> None:
    load(small_run).distil(recipe(), "out")
    text = Path("out/train.jsonl")
    content = text.read_text()
    text.unlink()
    if damaged == "cut":
        text.write_text(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"train.jsonl is not what was written: give another folder"):
        load(small_run).distil(recipe(), "out")


def test_the_n_best_and_a_share_of_the_original_text_are_pairs_too(small_run: Path) -> None:
    teacher = load(small_run)
    teacher.distil(recipe(), "out", num_best=3, originals=0.67)
    expected = []
    for i, (source, target) in enumerate(PAIRS):
        texts = {c.text: None for c in teacher.translate(source, num_best=3).candidates if c.text}
        expected += [(source, text, "teacher") for text in texts]
        expected += [(source, target, "text")] if i in (1, 2) else []
    assert [tuple(pair.values()) for pair in written("out")] == expected


def test_interpolation_keeps_the_translation_that_is_closest_to_the_reference(small_run: Path) -> None:
    teacher = load(small_run)
    last = [teacher.translate(source, num_best=4).candidates[-1].text for source, _ in PAIRS]
    write_pairs([(source, text) for (source, _), text in zip(PAIRS, last, strict=True)])
    teacher.distil(recipe(), "out", num_best=4, interpolate=True)
    assert [pair["target"] for pair in written("out")] == last


def test_held_out_pairs_are_of_the_original_text(small_run: Path) -> None:
    found = load(small_run).distil(recipe(valid=None, valid_share=0.3), "out")
    (held,) = map(json.loads, Path("out/valid.jsonl").read_text().splitlines())
    assert (held["source"], held["target"]) in PAIRS
    assert held["source"] not in {pair["source"] for pair in written("out")}
    student = read_recipe(found.recipe)
    assert isinstance(student, Recipe)
    assert student.data.valid is not None


@pytest.mark.parametrize("workers", [1, 2])
def test_what_was_translated_before_an_interruption_is_not_translated_again(
    workers: int, small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = load(small_run)
    teacher.distil(recipe(), "whole")
    translate = Translator.translate_stream

    def interrupted(self: Translator, batches: Any) -> Iterator[Any]:
        yield next(translate(self, batches))
        raise KeyboardInterrupt

    monkeypatch.setattr(Translator, "translate_stream", interrupted)
    with pytest.raises(KeyboardInterrupt):
        teacher.distil(recipe(), "out", workers=workers)
    asked = list[str]()

    def counted(self: Translator, batches: Any) -> Iterator[Any]:
        return translate(self, (asked.extend(batch) or batch for batch in batches))  # type: ignore[func-returns-value]

    monkeypatch.setattr(Translator, "translate_stream", counted)
    teacher.distil(recipe(), "out", workers=workers)
    assert asked == sorted((source for source, _ in PAIRS), key=len)[1:]
    assert written("out") == written("whole")
    teacher.distil(recipe(), "out", workers=workers)
    assert len(asked) == 2, "a finished text is not made again"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda teacher: teacher.distil(recipe(), "out", beam_size=3), "begun with another search"),
        (lambda teacher: teacher.ablate("cross.0.0").distil(recipe(), "out"), "another teacher"),
        (lambda teacher: teacher.distil(recipe(max_line_chars=60), "out"), "another text and recipe"),
        (lambda teacher: teacher.distil(recipe(), "out", originals=0.5), "another kept"),
        (lambda teacher: teacher.distil(recipe(), "new", interpolate=True), "give num_best"),
        (lambda teacher: teacher.distil(recipe(), "new", originals=2.0), "from 0 to 1"),
        (lambda teacher: teacher.distil("shakespeare-char", "new"), "does not translate"),
        (lambda teacher: teacher.distil(recipe(), "."), "new or empty"),
    ],
)
def test_what_does_not_go_together_is_refused(
    change: Callable[[Any], Any], said: str, small_run: Path
) -> None:
    teacher = load(small_run)
    teacher.distil(recipe(), "out")
    before = Path("out/train.jsonl").read_bytes()
    with pytest.raises(distilling.UsageError, match=said):
        change(teacher)
    assert Path("out/train.jsonl").read_bytes() == before
    assert not Path("new").exists()


@pytest.mark.slow
def test_a_student_of_probabilities_has_its_teachers_tokenizers_and_comes_close_to_it(
    triptych: Command, small_run: Path
) -> None:
    Path("recipe.toml").write_text(recipe().to_toml())
    more = [f"training.{change}" for change in ("max_steps=30", "learning_rate=0.01", "label_smoothing=0.0")]
    given = [*chain.from_iterable(("--set", change) for change in more), "--no-train"]
    asked = "distil", small_run, "recipe.toml", *given, "--teacher-weight", "1.0", "--out"
    triptych(*asked, "out").done()
    # Parameters that are made without memory first; the teacher's are not.
    by_name, less = ("--set", "initial_values=by_name"), ("--set", "training.teacher_weight=0.01")
    for name, change in (("near", ()), ("far", less)):
        triptych("train", "out/student.toml", "--out", name, *by_name, *change).done()
    teacher, near, far = (load(one) for one in ("out/teacher", "near", "far"))
    sentence = PAIRS[0][0]
    assert teacher.translate(sentence) == load(small_run).translate(sentence)
    assert near.reader.tokenizers.source.to_json() == teacher.reader.tokenizers.source.to_json()
    expected, *found = (model.run(sentence, target="").logits.softmax(-1) for model in (teacher, near, far))
    apart = [(one - expected).abs().sum() for one in found]
    assert apart[0] < apart[1] / 2
    elsewhere = triptych("train", "out/student.toml", "--out", "new", "--set", "training.teacher=nowhere")
    elsewhere.refused("nowhere has no translator in triptych's format")
    weights = load_file("out/teacher/model.safetensors")
    save_file({name: 0.9 * tensor for name, tensor in weights.items()}, "out/teacher/model.safetensors")
    resumed = triptych("train", "--resume", "near", "--set", "training.max_steps=31")
    assert resumed.code != 0
    assert "the teacher (training.teacher)" in resumed.err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: run.ablate("cross.0.0").distil(recipe(), "new", teacher_weight=0.5), "without changes"),
        (lambda run: run.distil(recipe(), "new", teacher_weight=1.5), "from 0 to 1"),
        (
            lambda run: run.distil(recipe(rdrop=5.0), "new", teacher_weight=0.5),
            "rdrop and training.teacher do not",
        ),
        (
            lambda run: load(run.name, ensemble=[run.name]).distil(recipe(), "new", teacher_weight=0.5),
            "one teacher",
        ),
    ],
)
def test_probabilities_that_cannot_be_learned_are_refused_first(
    change: Callable[[Any], Any], said: str, small_run: Path
) -> None:
    with pytest.raises(distilling.UsageError, match=said):
        change(load(small_run))
    assert not Path("new").exists()


def test_a_student_is_trained_and_its_recipe_trains_it_again(triptych: Command, small_run: Path) -> None:
    Path("recipe.toml").write_text(recipe().to_toml())
    asked = "distil", small_run, "recipe.toml", "--out", "out", "--workers", "1"
    assert triptych(*asked, "--no-train", "--json").record()["pairs"] == 3
    trained = triptych(*asked, "--json")
    assert trained.record()["run"] == "out/student", trained.err
    triptych("translate", "out/student", PAIRS[0][0]).done()
    assert triptych(*asked).code == 0, "a finished student is left as it is"
    triptych("train", "out/student.toml", "--out", "again").done()
    ours, again = (Path(run, "model.safetensors").read_bytes() for run in ("out/student", "again"))
    assert ours == again
