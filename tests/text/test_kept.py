"""Tokenizers that are trained once and found by later runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from triptych.training.corpora.tokenizer_training import TokenizerSpec, train_tokenizer, trained_once

SPEC = TokenizerSpec(vocab_size=300)
TEXTS = ["the cat sat on the mat", "the dog sat by the cat"]


class Training:
    """Trains tokenizers, and counts how often."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.times = folder, 0

    def __call__(self, spec: TokenizerSpec, texts: list[str], purpose: str = "model") -> list[str]:
        def train() -> list[str]:
            self.times += 1
            return [train_tokenizer(spec, texts).to_json()]

        return trained_once(spec, lambda: texts, train, purpose=purpose, cache_folder=self.folder)


def test_the_same_texts_train_once(tmp_path: Path) -> None:
    training = Training(tmp_path / "new" / "cache")
    assert training(SPEC, TEXTS) == training(SPEC, [*TEXTS]) == [train_tokenizer(SPEC, TEXTS).to_json()]
    assert training.times == 1


@pytest.mark.parametrize(
    ("spec", "texts"),
    [
        (TokenizerSpec(vocab_size=301), TEXTS),
        (TokenizerSpec(kind="unigram", vocab_size=300), TEXTS),
        (SPEC, TEXTS[:1]),
        (SPEC, ["".join(TEXTS)]),
    ],
    ids=["size", "kind", "fewer texts", "joined texts"],
)
def test_other_texts_and_specifications_are_trained_anew(
    tmp_path: Path, spec: TokenizerSpec, texts: list[str]
) -> None:
    training = Training(tmp_path)
    training(SPEC, TEXTS)
    assert training(spec, texts) == [train_tokenizer(spec, texts).to_json()]
    assert training.times == 2


def test_another_purpose_and_changed_code_train_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path / "cache")
    training(SPEC, TEXTS)
    training(SPEC, TEXTS, purpose="another")
    assert training.times == 2
    code = tmp_path / "training.py"
    monkeypatch.setattr("triptych.training.corpora.tokenizer_training._CODE", (code,))
    for times, text in ((3, "as it was"), (3, "as it was"), (4, "changed")):
        code.write_text(text)
        training(SPEC, TEXTS)
        assert training.times == times


@pytest.mark.parametrize(
    "damage",
    [lambda text: text[: len(text) // 2], lambda text: text.replace("cat", "cut"), lambda text: "[1]"],
    ids=["cut off", "another letter", "another record"],
)
def test_a_damaged_file_is_replaced(tmp_path: Path, damage: Callable[[str], str]) -> None:
    training = Training(tmp_path)
    whole = training(SPEC, TEXTS)
    (path,) = tmp_path.iterdir()
    written = path.read_text()
    path.write_text(damage(written))
    assert path.read_text() != written
    assert training(SPEC, TEXTS) == whole
    assert training.times == 2
    assert path.read_text() == written


def test_without_a_folder_nothing_is_kept() -> None:
    times = []
    for _ in range(2):
        trained_once(
            SPEC, lambda: TEXTS, lambda: times.append(1) or ["x"], purpose="model", cache_folder=None
        )
    assert len(times) == 2
