"""Masked-token prediction with an encoder."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from triptych.core.algebra.forms import at_least_float32
from triptych.core.models import LanguageModel, require_finite_logits
from triptych.errors import UsageError
from triptych.running.input_limits import LONGEST_SHOWN, check_length, check_vocabulary
from triptych.running.text.encoding import encode_texts
from triptych.running.text.given import as_lines
from triptych.running.text.tokenizers import Tokenizer


@dataclass(frozen=True)
class Filling:
    """A token for a mask."""

    text: str  # decoded token
    token: int
    piece: str  # readable token, with "▁" for a space
    probability: float  # the model's probability of the token
    filled: str  # text with the mask replaced by this token; the other masks stay


@torch.inference_mode()
def fill_masks(
    model: LanguageModel,
    tokenizer: Tokenizer,
    text: str,
    count: int = 5,
    max_tokens: int | None = None,
) -> list[list[Filling]]:
    """Return the `count` most probable tokens for each mask of a text; masks are predicted independently."""
    if model.causal or model.head is None:
        raise UsageError(
            "this model predicts no masked tokens: give one that does, such as BERT"
        )
    (text,) = as_lines([text])
    mask_id = tokenizer.mask_id
    if mask_id is None:
        raise UsageError(
            "the tokenizer of this model has no mask token: give a masked language model"
        )
    check_vocabulary(model, tokenizer)
    own = tokenizer.vocabulary[mask_id]
    (ids,) = encode_texts(tokenizer, [text.replace("[MASK]", own)])
    if model.recipe_limit is not None and tokenizer.eos_id is not None:
        ids = [
            tokenizer.eos_id,
            *ids,
            tokenizer.eos_id,
        ]  # document boundaries, as in training
    places = [place for place, token in enumerate(ids) if token == mask_id]
    if not places:
        raise UsageError(
            f"the text has no [MASK] to fill (this model's own name for it is {own})"
        )
    check_length(
        "the text", len(ids), model.max_tokens, max_tokens, LONGEST_SHOWN, "max_tokens"
    )
    model.eval()
    device = model.embeddings.table.weight.device
    read = torch.tensor([ids], device=device)
    logits = at_least_float32(model(read).logits[0, places, : tokenizer.vocab_size])
    require_finite_logits(model, logits, partial(model, read))
    best = logits.softmax(dim=-1).topk(min(count, logits.shape[-1]), dim=-1)
    found = []
    for place, values, tokens in zip(
        places, best.values.tolist(), best.indices.tolist(), strict=True
    ):
        found.append(
            [
                _filling(tokenizer, ids, place, token, value)
                for token, value in zip(tokens, values, strict=True)
            ]
        )
    return found


def _filling(
    tokenizer: Tokenizer, ids: Sequence[int], place: int, token: int, probability: float
) -> Filling:
    text = tokenizer.decode([[token]])[0]
    piece = tokenizer.pieces([token])[0]
    # The other masks are the only special tokens from the user's text.
    shown = [
        own
        for i, own in enumerate([*ids[:place], token, *ids[place + 1 :]])
        if i == place or own == tokenizer.mask_id or own not in tokenizer.special_ids
    ]
    return Filling(
        text,
        token,
        piece,
        probability,
        tokenizer.decode([shown], skip_special=False)[0],
    )
