"""`triptych generate`, `fill` and `evaluate --text`."""

import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Inner

from command import Command
from triptych import load
from triptych.core.models import LanguageModel, LanguageModelConfig
from triptych.running.opened_source import Opened
from triptych.running.opening import Reader
from triptych.running.text import load_tokenizer

PROMPT = "First"
DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "generating.md"


def test_a_prompt_is_continued_without_being_repeated(triptych: Command, checkpoint: Path) -> None:
    answer = triptych("generate", checkpoint, PROMPT, "--max-new-tokens", "6").done()
    (record,) = records(triptych("generate", checkpoint, PROMPT, "--max-new-tokens", "6", "--json").out)
    (one,) = record["continuations"]
    assert answer.out == one["text"] + "\n"
    assert record["prompt"] == PROMPT
    assert (one["finish"], len(one["tokens"]), len(one["ids"]), len(one["log_probs"])) == ("length", 6, 6, 6)
    assert one["score"] == pytest.approx(sum(one["log_probs"]))


def records(out: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.split("\n")[:-1]]


def test_standard_input_is_one_prompt_and_a_file_many(
    triptych: Command, checkpoint: Path, tmp_path: Path
) -> None:
    options = ("--max-new-tokens", "5", "--temperature", "0.9", "--seed", "3", "--num-samples", "2", "--json")
    lines = [PROMPT, "ü", "Two lines?"]
    (tmp_path / "prompts").write_text("".join(f"{line}\n" for line in lines))
    together = records(triptych("generate", checkpoint, "--file", tmp_path / "prompts", *options).out)
    alone = [
        records(triptych("generate", checkpoint, "-", *options, stdin=f"{line}\n".encode()).out)[0]
        for line in lines
    ]
    for one, other in zip(together, alone, strict=True):
        assert one["prompt"] == other["prompt"]
        texts = [[of["text"] for of in found["continuations"]] for found in (one, other)]  # type: ignore[attr-defined]
        assert texts[0] == texts[1]
        assert len(texts[0]) == 2


def test_several_texts_are_told_apart(triptych: Command, checkpoint: Path) -> None:
    options = ("--max-new-tokens", "3", "--beam", "3", "--num-samples", "2")
    answer = triptych("generate", checkpoint, PROMPT, *options).done()
    assert [line for line in answer.out.splitlines() if line.startswith("==")] == [
        "== prompt 1, text 1 ==",
        "== prompt 1, text 2 ==",
    ]


def test_attention_of_the_new_tokens_is_added_on_request(triptych: Command, checkpoint: Path) -> None:
    options = ("--max-new-tokens", "4", "--json", "--attention", "1", "--attention", "0.1")
    (record,) = records(triptych("generate", checkpoint, PROMPT, *options).out)
    entries = record["continuations"][0]["attention"]  # type: ignore[index]
    places = [(entry["layer"], entry["head"]) for entry in entries]
    assert places[0] == (0, 1)
    assert {layer for layer, _ in places[1:]} == {1}
    for entry in entries:
        assert (len(entry["rows"]), len(entry["columns"])) == (4, len(PROMPT) + 3)
        for i, row in enumerate(entry["weights"]):
            assert sum(row) == pytest.approx(1, abs=1e-4)
            assert not any(row[len(PROMPT) + i :])
    seen = load(checkpoint).attend(PROMPT, max_new_tokens=4).weights
    for entry in entries:
        expected = seen[entry["layer"]][entry["head"], len(PROMPT) - 1 : -1, :-1]
        np.testing.assert_allclose(entry["weights"], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ([""], b"", "the prompt is empty"),
        (["-"], b"", "the prompt is empty"),
        (["-"], b"\xff\xfe", "not UTF-8"),
        (["\udcff"], b"", "not UTF-8"),
        ([], b"", "give either a prompt"),
        (["x" * 65], b"", "65 tokens, but the model has positions for 64"),
        (["x" * 9, "--max-prompt-tokens", "8"], b"", "9 tokens, and at most 8 are read at once"),
        (["x", "--top-p", "2"], b"", "top_p is 2"),
        (["x", "--num-samples", "2"], b"", "all alike"),
        (["x", "--attention", "0.0"], b"", "goes with --json"),
        (["x", "--json", "--attention", "0:0"], b"", "a head as 3.2"),
        (["x", "--json", "--attention", "99.0"], b"", "no layer 99"),
        (["x", "--chat"], b"", "no chat template"),
        (["x", "--file", "no-such-file"], b"", "give either a prompt"),
    ],
)
def test_what_cannot_be_continued_is_one_line(
    triptych: Command, checkpoint: Path, arguments: list[str], stdin: bytes, message: str
) -> None:
    triptych("generate", checkpoint, *arguments, stdin=stdin).refused(message)


def test_a_text_is_scored_in_nats_and_bits(triptych: Command, checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"To be, or not to be.\r\n" * 6)
    options = ("--text", text, "--context", "16", "--stride", "8")
    record = triptych("evaluate", checkpoint, *options, "--json").record()
    assert (record["tokens"], record["bytes"]) == (131, 131)  # a token is a byte, and the first is given
    assert (record["context"], record["stride"], record["documents"]) == (16, 8, 1)
    assert record["bits_per_byte"] == pytest.approx(record["nats_per_token"] / math.log(2))
    assert record["interval"][0] < record["nats_per_token"] < record["interval"][1]
    line = triptych("evaluate", checkpoint, *options).out
    assert line.startswith(f"{record['nats_per_token']:.4f} nats per token")
    kept = os.dup(0)
    with text.open("rb") as file:
        os.dup2(file.fileno(), 0)
    assert triptych("evaluate", checkpoint, "--text", "-", *options[2:]).out == line
    os.dup2(kept, 0)
    os.close(kept)


def test_records_are_documents(triptych: Command, checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "To be"}\n{"text": "or not"}\n')
    record = triptych("evaluate", checkpoint, "--text", text, "--json").record()
    assert (record["documents"], record["tokens"], record["interval_over"]) == (2, 9, "documents")


def test_a_long_file_is_one_document_unless_its_lines_are(
    triptych: Command, checkpoint: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("To be, or not.\n\n" * 10)
    for what, count, tokens in (("file", 1, 159), ("line", 10, 130), ("blank-lines", 10, 130)):
        found = triptych("evaluate", checkpoint, "--text", text, "--documents", what, "--json").record()
        assert (found["documents"], found["tokens"]) == (count, tokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --text for a language model"),
        (["--text", "t", "--source", "t"], "--source is for translators"),
        (["--text", "t", "--beam", "2"], "--beam is for translators"),
        (["--source", "t", "--reference", "t", "--stride", "2"], "--stride goes with --text"),
        (["--text", "t", "--context", "65"], "65 tokens"),
        (["--text", "no-such-file"], "no-such-file"),
        (["--text", "bad"], "not UTF-8"),
    ],
)
def test_what_cannot_be_scored_is_one_line(
    triptych: Command,
    checkpoint: Path,
    cwd: Path,
    arguments: list[str],
    message: str,
) -> None:
    (cwd / "t").write_text("text")
    (cwd / "bad").write_bytes(b"\xff")
    answer = triptych("evaluate", checkpoint, *arguments)
    assert answer.code in (1, 2)
    assert message in answer.err
    assert len(answer.err.splitlines()) == 1


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d"]


def opened_of_words(folder: Path, kind: Literal["decoder", "encoder"], context: int = 256) -> Reader:
    """A model with fresh weights and a vocabulary of letters."""
    inner = Inner(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    inner.add_special_tokens([AddedToken(word, special=True) for word in WORDS[:5]])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"mask_token": "[MASK]", "pad_token": "[PAD]"}')
    torch.manual_seed(0)
    config = LanguageModelConfig(num_layers=1, d_model=8, num_heads=2, d_ff=8, context=context)
    model = LanguageModel.of(config, kind, len(WORDS)).eval()
    return Reader("words", folder, model, load_tokenizer(folder))


def in_place_of_all(opened: Reader, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this model opened whatever is named, and something there that has the name "model"."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(Opened, "plain_reader", opened)


@pytest.fixture
def masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    """An encoder in place of every model."""
    opened = opened_of_words(tmp_path, "encoder")
    in_place_of_all(opened, tmp_path, monkeypatch)
    return opened.language_model


def test_attention_of_a_text_past_the_context_is_refused(
    triptych: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_place_of_all(opened_of_words(tmp_path, "decoder", context=8), tmp_path, monkeypatch)
    options = ("--json", "--attention", "0.0", "--max-new-tokens")
    (record,) = records(triptych("generate", "model", "a b", *options, "5").out)
    (one,) = record["continuations"]
    assert len(one["tokens"]) == 5
    triptych("generate", "model", "a b", *options, "6").refused("has 9 tokens, and the model reads 8 at once")


def test_masks_are_filled_with_the_most_probable_tokens(triptych: Command, masked: LanguageModel) -> None:
    found = records(triptych("fill", "model", "a [MASK] c [MASK]", "--count", "3", "--json").out)
    logits = masked(torch.tensor([[2, 5, 4, 7, 4, 3]])).logits[0].softmax(-1)
    for record, place, number in zip(found, (2, 4), (1, 2), strict=True):
        best = logits[place].topk(3)
        assert record["mask"] == number
        fillings: list[dict[str, object]] = record["fillings"]  # type: ignore[assignment]
        assert [one["id"] for one in fillings] == best.indices.tolist()
        assert [one["probability"] for one in fillings] == pytest.approx(best.values.tolist(), rel=1e-5)
        for one in fillings:
            words = ["a", "[MASK]", "c", "[MASK]"]
            words[place - 1] = WORDS[one["id"]]  # type: ignore[call-overload]
            assert one["text"] == " ".join(words)
    assert len(triptych("fill", "model", "[MASK]").out.splitlines()) == 5


def test_a_text_without_mask_and_a_model_without_masks_are_refused(
    triptych: Command, masked: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    triptych("fill", "model", "a b c").refused("no [MASK]")
    masked.causal = True
    triptych("fill", "model", "a [MASK]").refused("no masked tokens")


def test_another_engine_continues_a_prompt_alike(
    triptych: Command, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ctranslate2", reason="needs CTranslate2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = ("generate", checkpoint, PROMPT, "--max-new-tokens", "6")
    engine = ("--engine", "ctranslate2")
    streamed = triptych(*options, *engine)
    assert (streamed.code, streamed.err, streamed.out) == (0, "", triptych(*options).out)
    for more in ((), ("--beam", "3", "--num-samples", "2")):
        (ours,) = records(triptych(*options, *more, "--json").out)
        (theirs,) = records(triptych(*options, *more, *engine, "--json").out)
        for one, other in zip(theirs["continuations"], ours["continuations"], strict=True):
            assert (one["text"], one["ids"], one["finish"]) == (other["text"], other["ids"], other["finish"])
            assert one["log_probs"] == pytest.approx(other["log_probs"], abs=1e-4)
    for more, said in (
        (("--temperature", "0.5"), "takes the most probable tokens and draws none"),
        (("--json", "--attention", "0.0"), "ctranslate2 gives no attention weights"),
    ):
        triptych(*options, *engine, *more).refused(said)


def test_every_option_that_the_docs_name_is_one(triptych: Command) -> None:
    named = set(re.findall(r"`(--[a-z-]+)", DOCS.read_text(encoding="utf-8")))
    assert len(named) > 15
    helped = "".join(triptych(command, "--help").out for command in ("generate", "evaluate", "fill"))
    assert {name for name in named if not re.search(rf"{name}\b", helped)} == set()


def test_several_models_are_scored_in_a_list_or_a_table(
    triptych: Command, checkpoint: Path, tmp_path: Path
) -> None:
    text, other = tmp_path / "text.txt", tmp_path / "other"
    text.write_text("some text to score\nand some more\n")
    shutil.copytree(checkpoint, other)
    asked = ("--text", text, "--documents", "line")
    alone = triptych("evaluate", checkpoint, *asked, "--json").record()
    records = triptych("evaluate", other, checkpoint, *asked, "--json").record()
    assert records == [{**alone, "model": str(other)}, alone]
    table = triptych("evaluate", other, checkpoint, *asked).out
    assert table.count(f"{alone['nats_per_token']:.4f}") == 2
    assert table.count(f"{alone['bits_per_byte']:.4f}") == 2
