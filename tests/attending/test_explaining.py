"""Parts of scores that add up, and heads whose weights explain all or nothing of where they look."""

from typing import Any

import pytest
import torch

from attending.tiny_readers import TEXTS, language_reader
from triptych.running.measuring.windows import cut_windows
from triptych.seeing.attending import attend_tokens
from triptych.seeing.attending.explaining import (
    divergence,
    explain_call,
    explain_text,
    in_float64,
    looks_by,
    of_rank,
    score_parts,
)
from triptych.seeing.attending.written_tokens import OutputTable, measure_copies, nearest_tokens

PARTS = {
    "learned": {"content", "biases"},
    "rotary": {"content", "biases", "distance"},
    "alibi": {"content", "biases", "position_bias"},
}


def untold(done: int, total: int) -> None:
    pass


def a_call(scheme: Any) -> Any:
    reader = language_reader(scheme)
    (attention,) = attend_tokens(reader, reader.encode([TEXTS[2]]))
    return reader, attention.weights.layers[1]


@pytest.mark.parametrize("scheme", PARTS)
def test_the_parts_of_the_scores_add_up_to_what_the_softmax_takes(scheme: str) -> None:
    _, layer = a_call(scheme)
    taken = score_parts(layer.call)
    assert set(taken.parts) == PARTS[scheme]
    torch.testing.assert_close(sum(taken.parts.values()), taken.total)
    visible = layer.queries_and_keys().visible()[0, 0]
    torch.testing.assert_close(looks_by(taken.total, visible), layer.weights())


@pytest.mark.parametrize("scheme", PARTS)
def test_shares_add_up_to_one_and_a_head_of_the_rank_is_explained_by_it(scheme: str) -> None:
    _, layer = a_call(scheme)
    weights, _, _ = in_float64(layer.call)
    visible = layer.queries_and_keys().visible()[0, 0]
    cut = {rank: of_rank(weights, rank, 32) for rank in (1, 4)}  # queries are 4 wide
    energy, count, found = explain_call(layer.call, visible, cut)
    shares = sum(value for name, value in found.items() if name.endswith("_share"))
    torch.testing.assert_close(shares / energy, torch.ones(4).double())
    assert float(found["rank_4_nats"].max()) < 1e-9
    assert float(found["rank_1_nats"].min()) > 1e-4
    assert found["rank_4_hits"].tolist() == [count] * 4


def test_a_head_of_rank_one_is_explained_by_one_direction() -> None:
    reader = language_reader()
    layer = reader.model.blocks[0].self_attention
    with torch.no_grad():
        maps = layer.projections
        maps.q_proj.weight[1:4] = 0  # one channel of head 0 is left
        maps.q_proj.bias.zero_()
    found = explain_text(reader, cut_windows(reader, TEXTS), untold)["decoder", 0]
    assert float(found["rank_1_nats"].value[0]) == pytest.approx(0, abs=1e-9)
    assert float(found["rank_1_nats"].value[1]) > 1e-4
    assert bool((found["even_nats"].value > 0).all())


def test_content_alone_is_everything_without_biases_and_positions() -> None:
    reader = language_reader()
    for block in reader.model.blocks:
        with torch.no_grad():
            block.self_attention.projections.q_proj.bias.zero_()
            block.self_attention.projections.k_proj.bias.zero_()
    found = explain_text(reader, cut_windows(reader, TEXTS), untold)["decoder", 1]
    share = found["content_share"]
    for end in (share.value, share.low, share.high):
        torch.testing.assert_close(end, torch.ones(4).double())
    assert float(found["content_nats"].value.max()) < 1e-9


def test_a_divergence_is_zero_of_itself_and_infinite_of_what_misses_a_key() -> None:
    p, q = torch.tensor([[[0.5, 0.5]]]), torch.tensor([[[1.0, 0.0]]])
    assert divergence(p, p).item() == 0
    assert divergence(p, q).item() == float("inf")
    assert divergence(q, p).item() == pytest.approx(0.6931, abs=1e-4)


def test_a_head_that_moves_what_it_reads_writes_the_tokens_that_it_looks_at() -> None:
    reader = language_reader(d_model=64, num_heads=1, num_layers=1)
    block = reader.model.blocks[0]
    with torch.no_grad():
        maps = block.self_attention.projections
        maps.v_proj.weight.copy_(torch.eye(64))
        maps.o_proj.weight.copy_(torch.eye(64))
        reader.model.embeddings.positions.weight.zero_()
    windows = cut_windows(reader, TEXTS)
    assert measure_copies(reader, windows, untold)["decoder", 0]["copies"].value.tolist() == [1]
    (attention,) = attend_tokens(reader, reader.encode([TEXTS[0]]))
    table = OutputTable.of(reader.model, "decoder")
    assert table is not None
    nearest = nearest_tokens(attention.weights.layers[0], table, 0, 1)[:, 0]
    assert tuple(nearest.tolist()) == attention.ids
    with torch.no_grad():
        maps.o_proj.weight.neg_()
    assert measure_copies(reader, windows, untold)["decoder", 0]["copies"].value.tolist() == [0]
