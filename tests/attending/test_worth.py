"""The loss without a head, against a model whose weights were changed by hand."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attending.tiny_readers import TEXTS, language_reader, pair_reader, tokenizers
from triptych import load
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.models import AttentionConfig
from triptych.core.models.sites import attention_sites
from triptych.errors import UsageError
from triptych.rewriting.functions.moments import MomentsGatherer
from triptych.rewriting.functions.pruning import measure_importance
from triptych.running.measuring.windows import cut_windows
from triptych.running.measuring.worth import batches_of, head_outputs
from triptych.running.measuring.worth import measure_worth as measure
from triptych.running.opening import Reader, record_calls


def masked_reader() -> Any:
    """An encoder whose tokenizer has a mask."""
    reader = language_reader(kind="encoder")
    tokenizer = copy.copy(reader.tokenizer)
    tokenizer.mask_id = 5
    return Reader("tiny", Path("tiny"), reader.model, tokenizer)


def loss(reader: Any, windows: Any) -> float:
    (total, count) = (0.0, 0)
    with torch.no_grad():
        for batch in batches_of(reader, windows, 1 << 13):
            logits = reader.logits(reader.run(batch.texts).hidden)
            log_probs = logits.log_softmax(dim=-1).gather(-1, batch.targets[..., None])[..., 0]
            total -= float(log_probs[batch.predicts].sum())
            count += int(batch.predicts.sum())
    return total / count


def measure_worth(reader: Any, windows: Any, instead: Any = "mean") -> Any:
    return measure(reader, windows, instead, lambda done, total: None)


def windows_of(reader: Any) -> Any:
    targets = TEXTS[::-1] if reader.translates else None
    return cut_windows(reader, TEXTS, targets, context=None if targets else 16)


def changed(reader: Any, windows: Any, instead: str, name: str, head: int) -> float:
    """The loss of a model whose head was changed in its weights."""
    other = reader.copied()
    site = next(site for site in attention_sites(other.model) if site.name == name)
    maps = site.layer.projections
    width = maps.o_proj.weight.shape[1] // site.layer.num_heads
    own = slice(head * width, (head + 1) * width)
    with torch.no_grad():
        if instead == "even":  # scores of 0
            maps.q_proj.weight[own] = 0
            maps.q_proj.bias[own] = 0
            return loss(other, windows)
        if instead == "mean":
            rows = []
            for batch in batches_of(other, windows, 1):
                with head_outputs([site]) as found:
                    other.run(batch.texts)
                rows.append(found[name].transpose(1, 2).flatten(2)[batch.tokens_of(site)])
            maps.o_proj.bias += maps.o_proj.weight[:, own] @ torch.cat(rows).mean(dim=0)[own]
        maps.o_proj.weight[:, own] = 0
    return loss(other, windows)


@pytest.mark.parametrize("instead", ["zero", "mean", "even"])
@pytest.mark.parametrize(
    "make", [language_reader, pair_reader, masked_reader], ids=["decoder", "encoder-decoder", "encoder"]
)
def test_a_head_is_worth_the_loss_of_the_model_without_it(make: Any, instead: Any) -> None:
    reader = make()
    windows = windows_of(reader)
    found = measure_worth(reader, windows, instead)
    assert found.loss == pytest.approx(loss(reader, windows))
    assert len(found.heads) == sum(site.layer.num_heads for site in attention_sites(reader.model))
    for one in [*found.heads[:2], *found.heads[-2:], *{head.stack: head for head in found.heads}.values()]:
        without = changed(reader, windows, instead, f"{one.stack}.{one.layer}", one.head)
        assert one.change == pytest.approx(without - found.loss, abs=1e-9)
        assert one.low <= one.change <= one.high


# W_O of each head, of a pair, behind another map, or none.
@pytest.mark.parametrize("written", ["factored", "differential", "stacked", "grouped", "identity_output"])
def test_a_head_is_worth_the_loss_without_it_however_heads_are_written(written: str, tmp_path: Path) -> None:
    reader = language_reader(attention=AttentionConfig(projections=written))
    tokenizers().source.save(tmp_path / "tokenizer.json")
    model = load(reader.model, tokenizer=tmp_path)
    windows = windows_of(reader)
    found = measure_worth(reader, windows, "zero")
    for head in range(4):
        without = loss(model.ablate(f"1.{head}").reader, windows)
        assert found.of("decoder", 1)[head] == pytest.approx(without - found.loss, abs=1e-9)
    for instead in ("mean", "even"):
        assert measure_worth(reader, windows, instead).loss == found.loss
    rows = model.attend_over(TEXTS, worth="mean", explain=True, context=16).rows()
    assert [(row["layer"], row["head"]) for row in rows] == [(n, head) for n in (0, 1) for head in range(4)]


def test_heads_that_stand_in_pairs_are_pruned_in_pairs(tmp_path: Path) -> None:
    reader = language_reader(attention=AttentionConfig(projections="differential", num_kv_heads=2))
    tokenizers().source.save(tmp_path / "tokenizer.json")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(TEXTS * 4))
    model = load(reader.model, tokenizer=tmp_path)
    windows = cut_windows(reader, [text.read_text()])
    worth = measure_worth(reader, windows, "zero").of("decoder", 1)
    pruned = model.rewrite("prune_heads(number=2, by_loss=True, layers=[1])", calibration=text)
    (step,) = pruned.certificate.layers[1].steps
    least = (0, 1) if worth[0] + worth[1] < worth[2] + worth[3] else (2, 3)
    assert step.choice == f"2 of 4 heads left out: {least[0]}, {least[1]}"
    expected = model.ablate([f"1.{head}" for head in least]).run(TEXTS[0]).logits
    assert torch.allclose(pruned.run(TEXTS[0]).logits, expected, atol=1e-9)
    with pytest.raises(RewriteRefusedError, match="heads stand in pairs; give an even number"):
        model.rewrite("prune_heads(number=1)")
    with pytest.raises(RewriteRefusedError, match="half of a pair is left: leave out both or none"):
        model.rewrite("prune_heads(heads=[1])")


def test_the_most_important_head_comes_first_and_a_layer_has_an_order() -> None:
    reader = language_reader()
    found = measure_worth(reader, windows_of(reader), "zero")
    changes = [head.change for head in found.heads]
    assert changes == sorted(changes, reverse=True)
    own = {head.head: head.change for head in found.heads if head.layer == 1}
    assert found.of("decoder", 1) == tuple(own[head] for head in range(4))


def test_what_a_head_adds_is_what_prune_heads_measures() -> None:
    reader = language_reader()
    windows = windows_of(reader)
    found = measure_worth(reader, windows, "zero")
    site = attention_sites(reader.model)[1]
    gatherer = MomentsGatherer()
    with torch.no_grad():
        for window in windows.windows:
            with record_calls(reader.model) as calls:
                reader.model.hidden(torch.tensor([window.text.ids[:-1]]))
            gatherer.add(site.layer.weights("causal"), calls[1].x)
    expected = measure_importance(site.layer.weights("causal"), gatherer.result())
    added = {head.head: head.added for head in found.heads if head.layer == 1}
    assert [added[head] for head in range(4)] == pytest.approx(expected.tolist())


def test_the_model_is_left_as_it_was() -> None:
    reader = language_reader()
    windows = windows_of(reader)
    before = loss(reader, windows)
    measure_worth(reader, windows, "even")
    assert loss(reader, windows) == before


def test_an_encoder_predicts_tokens_that_are_hidden_the_same_ones_every_time() -> None:
    reader = masked_reader()
    windows = windows_of(reader)
    (batch,) = batches_of(reader, windows, 1 << 13)
    (again,) = batches_of(reader, windows, 1 << 13)
    assert batch.texts == again.texts
    for text, targets, predicts in zip(batch.texts, batch.targets, batch.predicts, strict=True):
        hidden = predicts[: len(text.ids)]
        read, targets = torch.tensor(text.ids), targets[: len(text.ids)]
        assert bool((read[hidden] == 5).all())
        assert torch.equal(read[~hidden], targets[~hidden])
    lengths = [len(window.text.ids) for window in windows.windows]
    assert sorted(batch.predicts.sum(dim=1).tolist()) == sorted(max(1, round(0.15 * n)) for n in lengths)


def test_a_model_that_predicts_no_tokens_or_reads_more_than_the_stream_is_refused() -> None:
    borrowing, encoder = language_reader(), language_reader(kind="encoder")
    made = borrowing.model.architecture
    borrowing.model.architecture = replace(made, blocks=tuple(replace(b, keys=0) for b in made.blocks))
    for reader, said in ((encoder, "no mask"), (masked_reader(), "no head"), (borrowing, "than the stream")):
        if said == "no head":
            reader.model.head = None
        with pytest.raises(UsageError, match=said):
            measure_worth(reader, cut_windows(reader, TEXTS))
