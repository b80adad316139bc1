"""Attention on texts: batches, generated tokens, pairs, parts, files, and what cannot be read."""

import csv
import json
import math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from attending.models import language_model, translator_model
from attention_maps import attention_maps
from triptych import UsageError
from triptych.core.attention import QueriesAndKeys
from triptych.core.models.feed_forward import Dropout
from triptych.running.opening import Reader, record_calls
from triptych.seeing.attending import Attention, attend
from triptych.seeing.attending.attention_files import (
    Saved,
    is_attention_csv,
    is_attention_npz,
    json_pieces,
    write_attention_csv,
    write_npz,
)
from triptych.seeing.attending.looks import strongest_looks

TEXT = "to be or not to be"


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return language_model(tmp_path_factory.mktemp("decoder")).named("decoder")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return language_model(tmp_path_factory.mktemp("encoder"), "encoder", "learned").named("encoder")


@pytest.fixture(scope="module")
def pairs(decoder: Reader) -> Reader:
    return Reader("pairs", Path("pairs"), translator_model(), decoder.tokenizer, start_id=256)


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_the_output_of_a_model_is_the_same_bit_for_bit_while_its_calls_are_recorded(decoder: Reader) -> None:
    ids = torch.tensor(decoder.tokenizer.encode([TEXT]))
    before = decoder.model(ids).logits
    with record_calls(decoder.model) as calls:
        during = decoder.model(ids).logits
    assert torch.equal(before, during)
    decoder.model(ids)
    assert len(calls) == 2


def test_a_call_with_a_cache_is_refused(decoder: Reader) -> None:
    with record_calls(decoder.model), pytest.raises(ValueError, match=r"decoder\.0 was called with a cache"):
        decoder.model(torch.tensor([[1, 2]]), cache=decoder.model.new_cache())


def test_texts_of_a_padded_batch_have_the_weights_that_each_has_alone(
    decoder: Reader, encoder: Reader
) -> None:
    texts = [TEXT, "that", "is the question"]
    for reader in (decoder, encoder):
        batch = attend(reader, texts)
        whole = batch.weights[1]
        assert whole.shape == (3, 4, 18, 18)
        for row, text in enumerate(texts):
            length = len(text)
            alone = attend(reader, text).weights[1]
            close(whole[row, :, :length, :length], alone)
            close(batch[row].weights[1], alone)
            assert not whole[row, :, length:].any()
            assert not whole[row, :, :, length:].any()
        assert batch.tokens[1] == ("t", "h", "a", "t")


def test_generated_tokens_are_marked_and_looked_with_as_while_generating(decoder: Reader) -> None:
    found = attend(decoder, TEXT, max_new_tokens=5)
    assert found.num_generated == 5
    assert len(found.tokens) == len(TEXT) + 5
    assert found.is_generated == (False,) * len(TEXT) + (True,) * 5
    cache = decoder.model.new_cache()
    for place, token in enumerate(found.ids):
        with attention_maps(decoder.model) as maps:
            step = decoder.model(torch.tensor([[token]]), cache=cache)
        close(found.weights[1][:, place, : place + 1], maps["decoder.1"][0, :, 0])
        if len(TEXT) - 1 <= place < len(found.ids) - 1:
            assert int(step.logits.argmax()) == found.ids[place + 1]


@pytest.mark.parametrize("training", [True, False])
def test_a_model_reads_in_evaluation_mode_and_stays_in_its_own(
    decoder: Reader, pairs: Reader, training: bool
) -> None:
    for reader, more in ((decoder, {"max_new_tokens": 2}), (pairs, {"target": TEXT})):
        expected = attend(reader, TEXT, **more).weights[-1]  # type: ignore[call-overload]
        for module in reader.model.modules():
            if isinstance(module, Dropout):
                module.p = 0.5
        reader.model.train(training)
        close(attend(reader, TEXT, **more).weights[-1], expected)  # type: ignore[call-overload]
        assert reader.model.training is training
        reader.model.eval()


def test_pairs_have_three_kinds_of_attention_with_their_own_tokens(pairs: Reader) -> None:
    batch = attend(pairs, ["abcd", "efghij"], target=["xy", "z"])
    first = batch[0]
    assert first.kinds == ("encoder", "decoder", "cross")
    assert first.of("decoder").queries == ("x", "y")
    assert first.of("decoder").keys == ("<end>", "x")
    assert first.of("cross").keys == first.source_tokens == tuple("abcd")
    with attention_maps(pairs.model) as maps:
        pairs.model(torch.tensor([first.source_ids]), torch.tensor([[256, first.ids[0]]]))
    for kind in first.kinds:
        for number, ours in enumerate(first.of(kind)):
            close(ours, maps[f"{kind}.{number}"][0])
    assert batch.of("encoder")[1].shape == (2, 4, 6, 6)
    assert batch.weights[0].shape == (2, 4, 2, 6)


def test_the_largest_weights_and_what_is_left_sum_to_one(decoder: Reader) -> None:
    layer = attend(decoder, TEXT).weights.layer(0)
    whole = layer.weights()
    for head, kept in zip((2, 0), layer.maps(3, [2, 0]), strict=True):
        top = kept.largest(3)
        np.testing.assert_allclose(top.weights.sum(1) + top.left_out, 1, atol=1e-6)
        close(torch.from_numpy(top.weights), whole[head].topk(3).values)


def test_chosen_parts_are_those_of_the_text_and_others_are_named_with_their_range(pairs: Reader) -> None:
    found = attend(pairs, "abcd", target="xy")
    parts = found.parts("encoder.1.3")
    assert [(part.stack.kind, part.layer.number, part.heads) for part in parts] == [("encoder", 1, (3,))]
    for wrong, message in (
        ("encoder.2", "pairs has no layer encoder.2: its layers are encoder.0"),
        ("encoder.0.4", "layer encoder.0 has no head 4: its heads are 0 to 3"),
        ("self.*", "self.* matches no head"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            found.parts(wrong)
    with pytest.raises(UsageError, match="there is no cross layer 1: they are 0 to 0"):
        found.weights[1]


def test_a_page_marks_what_was_generated_and_keeps_the_largest_of_long_texts(
    decoder: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = attend(decoder, TEXT, max_new_tokens=2)
    (kind,) = found.viewed().texts[0].kinds
    assert kind.first_generated_query == kind.first_generated_key == len(TEXT)
    np.testing.assert_allclose(kind.layers[1].heads[2].map.weights, found.weights[1][2], atol=1e-6)
    monkeypatch.setattr("triptych.seeing.attending.attention.MOST_WEIGHTS_OF_A_PAGE", 100)
    (kind,) = found.viewed().texts[0].kinds
    assert kind.layers[0].heads[0].map.keys.shape == (20, 16)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("decoder", {"text": ["a", ""]}, "text 2 is empty"),
        ("decoder", {"text": []}, "there is no text"),
        ("decoder", {"text": "a", "target": "b"}, "decoder is not an encoder-decoder"),
        (
            "decoder",
            {"text": ["a", "a" * 40], "max_new_tokens": 1},
            "text 2 has 40 tokens, which leaves no room for new ones in the 40 that the model reads at once",
        ),
        ("encoder", {"text": "a", "max_new_tokens": 1}, "encoder is an encoder, which does not continue"),
        ("encoder", {"text": "a" * 41}, "the text has 41 tokens, but the model has positions for 40"),
        ("encoder", {"text": ["a", "a" * 41]}, "text 2 has 41 tokens"),
        ("encoder", {"text": "a" * 5, "max_tokens": 4}, "the text has 5 tokens, and at most 4 are read"),
        ("decoder", {"text": "a" * 8193}, "at most 8,192 are read at once: shorten it, or raise max_tokens"),
        ("decoder", {"text": "aaa", "max_new_tokens": 2, "max_tokens": 4}, "has 5 tokens, and at most 4"),
        ("pairs", {"text": "a", "target": "b" * 8193}, "the target has 8,193 tokens, and at most 8,192"),
        (
            "pairs",
            {"text": "a"},
            "pairs is not searched for a translation here: give the decoder's text, the target",
        ),
        ("pairs", {"text": "a", "target": "b", "max_new_tokens": 1}, "it translates and does not continue"),
        ("pairs", {"text": ["a", "b"], "target": ["c"]}, "there are 2 texts and 1 targets"),
        ("pairs", {"text": "a", "target": ""}, "the target is empty"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(
    name: str, given: dict[str, object], message: str, request: pytest.FixtureRequest
) -> None:
    reader: Reader = request.getfixturevalue(name)
    with pytest.raises(UsageError, match=message) as refused:
        attend(reader, **given)  # type: ignore[call-overload]
    assert "\n" not in str(refused.value)


def saved(found: Attention, top: int | None = None) -> Saved:
    return found.saved(("1.1", "1.3"), top)


def test_json_has_the_weights_to_seven_digits(decoder: Reader) -> None:
    found = attend(decoder, TEXT)
    record = json.loads("".join(json_pieces(saved(found))))
    assert record["tokens"] == list(found.tokens)
    assert record["sides"]["decoder"]["rows"] == list(found.tokens)
    assert [(head["layer"], head["head"]) for head in record["heads"]] == [(1, 1), (1, 3)]
    np.testing.assert_allclose(record["heads"][1]["weights"], found.weights[1][3], atol=6e-8)
    top = json.loads("".join(json_pieces(saved(found, 2))))["heads"][0]
    np.testing.assert_allclose(np.sum(top["weights"], 1) + top["left_out"], 1, atol=1e-6)
    assert top["keys"][0][0] == 0


def test_npz_has_the_weights_as_they_are(decoder: Reader, tmp_path: Path) -> None:
    found = attend(decoder, [TEXT, "that"])
    write_npz([saved(one) for one in found], tmp_path / "two.npz")
    with np.load(tmp_path / "two.npz", allow_pickle=False) as arrays:
        assert arrays["1/tokens"].tolist() == list("that")
        assert arrays["0/decoder.1.heads"].tolist() == [1, 3]
        np.testing.assert_array_equal(arrays["0/decoder.1"], found[0].weights.layer(1).weights(heads=[1, 3]))
    write_npz([saved(found[1], 2)], tmp_path / "top.npz")
    with np.load(tmp_path / "top.npz", allow_pickle=False) as arrays:
        assert arrays["decoder.1.keys"].shape == (2, 4, 2)
    assert is_attention_npz(tmp_path / "top.npz")


def test_csv_has_a_row_for_every_weight_above_zero(decoder: Reader, tmp_path: Path) -> None:
    found = attend(decoder, "that")
    write_attention_csv([saved(found)], tmp_path / "a.csv")
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * (1 + 2 + 3 + 4)  # causal, two heads
    last = rows[-1]
    assert (last["head"], last["query_token"], last["key_token"]) == ("3", "t", "t")
    assert float(last["weight"]) == pytest.approx(float(found.weights[1][3, 3, 3]), abs=1e-7)
    assert is_attention_csv(tmp_path / "a.csv")


@pytest.mark.parametrize("rows", [2, 7, 100])
def test_strongest_looks_are_those_of_a_search_of_each_whole_map(
    decoder: Reader, pairs: Reader, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    for found in (attend(decoder, TEXT), attend(pairs, TEXT, "sein oder nicht")):
        for part in found.parts():
            size = 4 * len(part.heads) * len(part.stack.keys) * rows
            blocks = partial(QueriesAndKeys.blocks, most_bytes=size)
            monkeypatch.setattr(QueriesAndKeys, "blocks", lambda self, heads, b=blocks: b(self, heads))
            for head, own in zip(part.heads, strongest_looks(part, 4, "1"), strict=True):
                weights = part.layer.weights(heads=[head])[0]
                assert own.first == pytest.approx(float(weights[:, 0].mean()))
                if part.stack.kind != "cross":
                    weights.fill_diagonal_(0)
                assert own.nats == pytest.approx(information(weights), abs=1e-6)
                weights[:, 0] = 0
                ordered = weights.flatten().sort(descending=True).values[:4].tolist()
                largest = [value for value in ordered if value > 0]
                assert [look.weight for look in own.looks] == pytest.approx(largest)
                assert [float(weights[look.query, look.key]) for look in own.looks] == pytest.approx(largest)
            monkeypatch.undo()


def information(weights: torch.Tensor) -> float:
    """Compute the mutual information of row and column from its definition."""
    joint = weights.double() / len(weights)
    apart = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True) / joint.sum()
    pairs = zip(joint.flatten().tolist(), apart.flatten().tolist(), strict=True)
    return sum(p * math.log(p / q) for p, q in pairs if p > 0)


def test_an_attention_is_shown_written_and_asked_for_its_strongest_looks(
    decoder: Reader, pairs: Reader, tmp_path: Path
) -> None:
    found = attend(decoder, TEXT)
    looks = found.top(2, per_head=True)
    assert len(looks) == 2 * 8
    every = found.top(9, per_head=True)
    assert [look.weight for look in found.top(5)] == sorted((look.weight for look in every), reverse=True)[:5]
    with pytest.raises(UsageError, match="the 0 strongest looks: at least 1"):
        found.top(0)
    weights = found["1.3"].clone()
    weights[:, 0] = 0
    weights.fill_diagonal_(0)
    first = next(look for look in looks if look.head == "1.3")
    assert first.weight == pytest.approx(float(weights.max()))
    assert float(weights[first.query, first.key]) == first.weight
    assert (first.query_token, first.key_token) == (found.tokens[first.query], found.tokens[first.key])
    for name in ("a.json", "a.csv", "a.npz", "a.svg"):
        found.save(tmp_path / name, heads="1.3")
    np.testing.assert_allclose(np.load(tmp_path / "a.npz")["decoder.1"][0], found["1.3"], atol=1e-6)
    assert json.loads((tmp_path / "a.json").read_text())["heads"][0]["head"] == 3
    over = found.over(["to be or not", "to be"])
    assert over.num_units == 2
    found.page(tmp_path / "page.html", over=over)
    assert "measured over" in (tmp_path / "page.html").read_text()
    over.page(tmp_path / "over.html")
    for wrong in ("a.png", "b.svg"):
        with pytest.raises(UsageError, match=r"not a format of weights|a picture shows one head"):
            found.save(tmp_path / wrong)
    both = attend(pairs, "abcd", target="xy")
    for shown in (found, attend(decoder, [TEXT, "that"]), both, over):
        assert len(repr(shown).splitlines()) <= 8
    assert 'attention["cross.0.0"]' in repr(both)
    assert "<iframe" in found._repr_html_()


def test_too_many_weights_for_a_file_are_refused_with_what_to_do(
    decoder: Reader, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("triptych.seeing.attending.attention_files.MOST_WEIGHTS", 600)
    one = saved(attend(decoder, TEXT))
    for write in (write_npz, write_attention_csv):
        with pytest.raises(
            UsageError, match=r"648 weights, and a file may have 600: choose heads .*--top 16"
        ):
            write([one], tmp_path / "file")
    assert not (tmp_path / "file").exists()
    write_attention_csv([one._replace(top=2)], tmp_path / "file")
