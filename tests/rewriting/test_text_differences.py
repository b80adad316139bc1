"""Two models of the same weights, with other tokenizers, chat templates or generation settings."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from small_checkpoints import gpt2_that_runs
from triptych import diff, load

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
TEMPLATE = "{% for message in messages %}\n{{ message.content }}\n{% endfor %}"
SAME = "tokenizer, chat template and generation settings are the same"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with a tokenizer, a chat template and settings of generation."""
    folder = gpt2_that_runs(tmp_path_factory.mktemp("texts") / "gpt2", layers=1)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settled(folder, do_sample=True, temperature=0.6, eos_token_id=10, top_p=None)
    return folder


def settled(folder: Path, **settings: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(settings))


def tokenizer_changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        path = folder / "tokenizer.json"
        record = json.loads(path.read_text())
        change(record)
        path.write_text(json.dumps(record, indent=3))

    return changed


def with_two_ids_exchanged(record: dict[str, Any]) -> None:
    ids = record["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]


def with_spaces_before(record: dict[str, Any]) -> None:
    record["pre_tokenizer"]["add_prefix_space"] = True


def with_lower_case(record: dict[str, Any]) -> None:
    record["normalizer"] = {"type": "Lowercase"}


def without_decoder(record: dict[str, Any]) -> None:
    record["decoder"] = {"type": "Fuse"}


def with_another_token(record: dict[str, Any]) -> None:
    record["model"]["unk_token"] = "a"


def named(folder: Path) -> None:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "z"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def templated(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "two ids": (
        tokenizer_changed(with_two_ids_exchanged),
        "the tokenizer differs: 2 of 256 ids are other tokens, first ",
    ),
    "spaces": (
        tokenizer_changed(with_spaces_before),
        "the tokenizer differs: “Hello, world! It's 2026, isn't it?” is ▁ H e l l o in A",
    ),
    "cases": (tokenizer_changed(with_lower_case), "is H e l l o , in A and h e l l o , in B"),
    "decoding": (tokenizer_changed(without_decoder), "is decoded to “Hello, world!"),
    "a named token": (named, "the tokenizer differs: eos_token is absent in A and z in B"),
    "no tokenizer": (without("tokenizer.json"), "only A has a tokenizer"),
    "a template": (
        templated(TEMPLATE.replace("message.content", "message.role")),
        "the chat template differs, from line 2 on",
    ),
    "no template": (without("chat_template.jinja"), "only A has a chat template"),
    "temperature": (
        lambda folder: settled(folder, do_sample=True, temperature=0.7, eos_token_id=10),
        "generation settings differ: temperature is 0.6 in A and 0.7 in B",
    ),
    "an end": (
        lambda folder: settled(folder, do_sample=True, temperature=0.6, eos_token_id=[10, 13]),
        "generation settings differ: eos_token_id is [10] in A and [10, 13] in B",
    ),
    "no settings": (
        without("generation_config.json"),
        "generation settings differ: do_sample is True in A and absent in B; temperature is 0.6",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_texts_are_read_and_continued_with_is_said_and_changes_no_verdict(
    change: str, gpt2: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(gpt2, tmp_path / "b")
    make, said = CHANGES[change]
    make(other)
    found = diff(gpt2, other)
    assert found.verdict == "same bytes"
    if change == "spaces":  # A is the model without
        found = diff(other, gpt2)
    assert len(found.texts) == 1, found.texts
    assert said in found.texts[0]
    assert f"texts: {found.texts[0]}"[:100] in repr(found)


def test_equal_settings_are_noted_as_the_same(gpt2: Path, tmp_path: Path) -> None:
    """Another order of fields, and settings without an effect, are no difference."""
    other = shutil.copytree(gpt2, tmp_path / "b")
    tokenizer_changed(lambda record: record.update(version=record.pop("version")))(other)
    settled(other, eos_token_id=[10], temperature=0.6, do_sample=True, num_beams=1, transformers_version="4")
    found = diff(gpt2, other)
    assert (found.texts, found.notes) == ((), (SAME,))


def test_parts_that_no_text_shows_are_noted(gpt2: Path, tmp_path: Path) -> None:
    other = shutil.copytree(gpt2, tmp_path / "b")
    tokenizer_changed(with_another_token)(other)
    found = diff(gpt2, other)
    assert found.texts == ()
    assert found.notes[0] == "the tokenizer is stored differently (unk_token); 14 texts are read alike"


def test_a_damaged_tokenizer_is_noted_and_weights_are_compared(gpt2: Path, tmp_path: Path) -> None:
    other = shutil.copytree(gpt2, tmp_path / "b")
    (other / "tokenizer.json").write_text("{}")
    found = diff(gpt2, other)
    assert (found.verdict, found.texts) == ("same bytes", ())
    assert found.notes[0].startswith("tokenizers are not compared: that of B cannot be read: ")


def test_models_without_tokenizers_have_none_to_compare(gpt2: Path, tmp_path: Path) -> None:
    other = shutil.copytree(gpt2, tmp_path / "b")
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json"):
        (other / name).unlink()
    assert diff(other, other).notes[0] == "there are no tokenizers to compare"


def test_a_model_and_its_conversion_read_texts_alike(tmp_path: Path) -> None:
    """The demo and its checkpoint for transformers store one tokenizer in two forms."""
    demo = load("demo", device="cpu")
    demo.convert(tmp_path / "marian", to="hf")
    found = diff("demo", tmp_path / "marian")
    assert found.texts == ()
    assert not any("cannot be read" in note for note in found.notes)
