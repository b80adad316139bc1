"""What heads write for a token, against W_V, W_O and the output table multiplied by hand."""

import pytest
import torch

from attending.tiny_readers import TEXTS, language_reader, pair_reader
from triptych.errors import UsageError
from triptych.seeing.attending import attend


def test_the_nearest_tokens_are_those_of_the_product_through_the_norm_and_the_table() -> None:
    reader = language_reader()
    model, attention, head = reader.model, attend(reader, TEXTS[0]), 2
    call = attention.of("decoder").layer(1).call
    maps = call.layer.projections
    with torch.no_grad():
        v = maps.v_proj.weight.view(4, 4, 16)[head] @ call.x[0].mT
        written = (maps.o_proj.weight.view(16, 4, 4)[:, head] @ v).mT
        centred = (written - written.mean(-1, keepdim=True)) / written.std(-1, correction=0, keepdim=True)
        logits = (centred * model.final_norm.weight) @ model.head.output.weight.mT
    expected = logits[:, : reader.tokenizer.vocab_size].topk(3).indices.tolist()
    nearest = [tuple(reader.tokenizer.pieces(ids)) for ids in expected]
    assert attention.writes(1, head, k=3) == list(zip(attention.tokens, nearest, strict=True))
    with pytest.raises(UsageError, match="layer 1 has no head 9"):
        attention.writes(1, 9)


def test_a_translator_writes_target_tokens_and_its_encoder_none() -> None:
    reader = pair_reader()
    attention = attend(reader, TEXTS[0])
    found = attention.writes("cross.0", 1, k=2)
    assert [token for token, _ in found] == list(attention.of("cross").keys)
    target = set(reader.tokenizer.pieces(range(reader.tokenizer.vocab_size)))
    assert all(len(nearest) == 2 and {*nearest} <= target for _, nearest in found)
    with pytest.raises(UsageError, match="no output table reads what encoder layers write"):
        attention.writes("encoder.0", 1)
