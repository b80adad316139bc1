"""Checks of converted models, and their records."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from triptych.core.models import EncoderDecoder, find_config
from triptych.errors import DataError
from triptych.running.text import SentencePieceTokenizer, SentenceTokenizer

# Tolerances of logits: absolute if all logits of the model are at most 1, else relative to the largest.
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}

# Difficult texts for tokenizers.
_SAMPLES = (
    "Zwei junge Männer sind im Freien.",
    "A little girl, 3 years old, isn't afraid: it costs $12.50 (or 10%)!",
    "  two  spaces\tand a tab ",
    "e\u0301 and é, ﬁne, ½, ｆｕｌｌ",
    "snake_case, CamelCase, http://example.org/?a=1&b=2",
    "Привет, мир. 你好，世界。 안녕 🙂",
    "…—–„“”‚‘’ \u00a0 \u200b",
    "1234567890 12,345.67",
    "",
)
_SPELLED_OUT = ("an <eos> in the <bos> middle<pad>", "</s> <unk>")


@final
@dataclass(frozen=True)
class ConversionCheck:
    """A check of a converted model. If a check fails, the conversion is abandoned."""

    what: str  # description of the check
    tried: bool  # False if the check could not be run
    largest_difference: float | None = (
        None  # largest difference of a logit, if logits were compared
    )
    note: str = ""  # reason why the check was not run, or size of the sample


class WrittenModel(NamedTuple):
    """Report of a format's writer on the written folder."""

    architecture: str  # name of the architecture in the format
    parameters: int  # number of parameters, including quantised parameters
    folded: tuple[str, ...]  # descriptions of the changes needed to fit the format
    checks: tuple[ConversionCheck, ...]  # checks of the result


class Pairs(NamedTuple):
    """Sentence pairs of random tokens."""

    src: Tensor  # sources `[batch, src_len]` with end of sentence and padding
    tgt_in: Tensor  # targets `[batch, tgt_len]` with the start token first

    def mask(self, pad_id: int) -> Tensor:
        """Return the mask of source tokens: False for padding."""
        return self.src != pad_id


def random_pairs(
    model: EncoderDecoder, bos_id: int, eos_id: int, src_len: int = 12, tgt_len: int = 9
) -> Pairs:
    """Draw three sentence pairs with sources of different length; every call returns the same pairs."""
    # Drawn tokens exclude padding and end of sentence, and in targets the start token.
    generator = torch.Generator().manual_seed(0)
    src_len = min(src_len, find_config(model).max_source_tokens + 1)

    def draw(size: int, count: int, never: set[int]) -> Tensor:
        allowed = torch.tensor([token for token in range(size) if token not in never])
        return allowed[torch.randint(len(allowed), (3, count), generator=generator)]

    src = draw(model.src_vocab_size, src_len, {model.pad_id, eos_id})
    for row, length in enumerate((src_len, max(1, src_len // 2), max(1, src_len - 1))):
        src[row, length - 1] = eos_id
        src[row, length:] = model.pad_id
    tgt_in = draw(model.tgt_vocab_size, tgt_len, {model.pad_id, eos_id, bos_id})
    tgt_in[:, 0] = bos_id
    return Pairs(src, tgt_in)


@torch.no_grad()
def compute_logits(model: EncoderDecoder, pairs: Pairs) -> Tensor:
    """Compute the logits of a model in evaluation mode; return them on the CPU."""
    device = next(model.parameters()).device
    logits: Tensor = model.eval()(pairs.src.to(device), pairs.tgt_in.to(device))
    return logits.cpu()


def compare_logits(
    what: str, expected: Tensor, found: Tensor, tolerance: float, note: str = ""
) -> ConversionCheck:
    difference = float((found.double() - expected.double()).abs().max())
    allowed = tolerance * max(1.0, float(expected.double().abs().max()))
    if not difference <= allowed:
        raise DataError(
            f"{what}: they are off by {difference:.3g}, and {allowed:.3g} is allowed: nothing is written"
        )
    return ConversionCheck(what, True, difference, note)


def rounded_difference(what: str, expected: Tensor, found: Tensor) -> ConversionCheck:
    """Record the difference of a model with int8 matrices from the original; any finite difference passes."""
    difference = float((found - expected).abs().max())
    if not difference < float("inf"):
        raise DataError(f"{what}: they are not finite: nothing is written")
    return ConversionCheck(what, True, difference, "the rounding of int8 is part of it")


def compare_tokenizers(
    what: str,
    tokenizer: SentenceTokenizer,
    encode: Callable[[str], list[int]],
    decode: Callable[[list[int]], str] | None = None,
) -> ConversionCheck:
    """Compare token ids, with the end of sentence, and decoded texts on sample sentences."""
    # MarianTokenizer reads spelled-out special tokens as tokens, `SentencePieceTokenizer` as plain text.
    spelled_out = () if isinstance(tokenizer, SentencePieceTokenizer) else _SPELLED_OUT
    samples = [*_SAMPLES, *spelled_out]
    for text, ids in zip(samples, tokenizer.encode(samples), strict=True):
        found = encode(text)
        if found != [*ids, tokenizer.eos_id]:
            raise DataError(
                f"{what}: {text!r} is {found} there and {[*ids, tokenizer.eos_id]} here: nothing is written"
            )
        (wanted,) = tokenizer.decode([ids])
        if decode is not None and decode(ids) != wanted:
            raise DataError(
                f"{what}: {ids} is {decode(ids)!r} there and {wanted!r} here: nothing is written"
            )
    return ConversionCheck(what, True, note=f"{len(samples)} texts")
