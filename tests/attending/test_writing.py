"""What heads write for a token, against W_V, W_O and the output table multiplied by hand."""

import pytest
import torch

from attending.tiny_readers import TEXTS, language_reader, pair_reader
from triptych.attending import Part, attend
from triptych.attending.writing import TokenWriter
from triptych.errors import UsageError


def part_of(reader: object, kind: str, layer: int) -> Part:
    found = attend(reader, TEXTS[0]).of(kind)  # type: ignore[call-overload]
    own = found.layer(layer)
    return Part(found, own, tuple(range(own.num_heads)))


def test_the_nearest_tokens_are_those_of_the_product_through_the_norm_and_the_table() -> None:
    reader = language_reader()
    model, part = reader.model, part_of(reader, "decoder", 1)
    maps, head = part.layer.call.layer.projections, 2
    with torch.no_grad():
        v = maps.v_proj.weight.view(4, 4, 16)[head] @ part.layer.call.x[0].mT
        written = (maps.o_proj.weight.view(16, 4, 4)[:, head] @ v).mT
        centred = (written - written.mean(-1, keepdim=True)) / written.std(-1, correction=0, keepdim=True)
        logits = (centred * model.final_norm.weight) @ model.head.output.weight.mT
    expected = logits[:, : reader.tokenizer.vocab_size].topk(3).indices.tolist()
    found = TokenWriter(reader, 3).of(part, head)
    assert found == tuple(tuple(reader.tokenizer.pieces(ids)) for ids in expected)
    with pytest.raises(UsageError, match="no head 9 in layer 1"):
        TokenWriter(reader).of(part, 9)


def test_a_translator_writes_target_tokens_and_its_encoder_none() -> None:
    reader = pair_reader()
    part = part_of(reader, "cross", 0)
    found = TokenWriter(reader, 2).of(part, 1)
    assert found is not None
    assert [len(nearest) for nearest in found] == [2] * len(part.stack.keys)
    target = set(reader.tokenizer.pieces(range(reader.tokenizer.vocab_size)))
    assert {token for nearest in found for token in nearest} <= target
    assert TokenWriter(reader).of(part_of(reader, "encoder", 0), 1) is None
