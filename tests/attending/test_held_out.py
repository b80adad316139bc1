"""The loss of changes on a held-out text, against the model run on each document by itself."""

from pathlib import Path

import pytest
import torch

from attending.tiny_readers import TEXTS, language_reader, pair_reader
from small_checkpoints import bert_that_runs, gpt2_that_runs
from triptych.core.algebra.resampling import ratio_intervals
from triptych.errors import UsageError
from triptych.model import Model, load
from triptych.seeing.attending.held_out import HeldOutText

DOCUMENTS = ["The cat sat on the mat", "a dog ran", "where is the cat now?", "and where is the dog?"]


def _losses(model: Model, documents: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the tokens of each document, and how many they are."""
    own = [model.run(text).losses.double() for text in documents]
    return torch.stack([one.sum() for one in own]), torch.tensor([float(len(one)) for one in own])


def test_a_changed_model_is_compared_on_every_token_of_every_document(tmp_path: Path) -> None:
    model = load(gpt2_that_runs(tmp_path / "gpt2"))
    changed = model.tie("*", "W_Q", "W_K").ablate("1.0")
    text = HeldOutText(model.reader, DOCUMENTS)
    found = text.compare(changed.reader)
    (before, counts), (after, _) = (_losses(one, DOCUMENTS) for one in (model, changed))
    low, high = ratio_intervals(after - before, counts)
    assert found.before == pytest.approx(float(before.sum() / counts.sum()), rel=1e-6)
    assert found.after == pytest.approx(float(after.sum() / counts.sum()), rel=1e-6)
    assert found.interval == pytest.approx((float(low), float(high)), rel=1e-4)
    assert found.difference == pytest.approx(found.after - found.before)
    assert (text.num_tokens, text.units) == (int(counts.sum()), "documents")
    assert text.compare(model.reader).interval == (0.0, 0.0)  # the same tokens: nothing but the change counts


def test_a_long_text_is_read_in_parts_and_every_part_counts(tmp_path: Path) -> None:
    model = load(gpt2_that_runs(tmp_path / "gpt2"))
    document = " ".join(DOCUMENTS * 30)
    file = tmp_path / "text.txt"
    file.write_text(document, encoding="utf-8")
    text = HeldOutText(model.reader, file, context=32)
    (ids,) = model.reader.tokenizer.encode([document])
    windows = [ids[start : start + 32] for start in range(0, len(ids), 32)]
    module = model.reader.language_model
    total, count = 0.0, 0
    with torch.no_grad():
        for window in windows:
            logs = module(torch.tensor([window[:-1]])).logits[0].double().log_softmax(dim=-1)
            total -= float(logs.gather(1, torch.tensor(window[1:])[:, None]).sum())
            count += len(window) - 1
    assert (text.name, text.units, text.num_tokens) == ("text.txt", "windows", count)
    assert text.num_parts > 2
    assert text.compare(model.reader).before == pytest.approx(total / count, rel=1e-6)
    first = HeldOutText(model.reader, file, context=32, most_tokens=64)
    assert first.num_tokens == 62


@torch.no_grad()
def test_a_translator_is_compared_on_the_translations_that_are_given() -> None:
    reader = pair_reader()
    text = HeldOutText(reader, TEXTS, TEXTS[::-1])
    losses = []
    for source, target in zip(TEXTS, TEXTS[::-1], strict=True):
        (one,) = reader.encode([source], [target])
        logs = reader.logits(reader.run([one]).hidden)[0].log_softmax(dim=-1)
        losses.append(-logs.gather(1, torch.tensor(one.ids)[:, None])[:, 0])
    found = text.compare(reader)
    assert found.before == pytest.approx(float(torch.cat(losses).mean()), rel=1e-12)
    with pytest.raises(UsageError, match="give the translations of the held-out sentences"):
        HeldOutText(reader, TEXTS)


def test_one_window_has_no_interval() -> None:
    reader = language_reader()
    assert HeldOutText(reader, TEXTS[0]).compare(reader).interval is None


def test_what_has_no_loss_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no mask token"):
        HeldOutText(language_reader(kind="encoder"), TEXTS)
    with pytest.raises(UsageError, match="no head that predicts tokens"):
        HeldOutText(load(bert_that_runs(tmp_path / "bert")).reader, TEXTS)
    model = load(gpt2_that_runs(tmp_path / "gpt2"))
    with pytest.raises(UsageError, match="has to be 1 or more"):
        HeldOutText(model.reader, TEXTS, most_tokens=0)
    with pytest.raises(UsageError, match="nothing to measure"):
        HeldOutText(model.reader, " ")
    with pytest.raises(UsageError, match="does not translate"):
        HeldOutText(model.reader, TEXTS, TEXTS)
