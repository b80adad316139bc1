"""Tokenizers trained for language models: bytes, characters, byte-pair encoding, unigrams."""

from collections import Counter
from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from triptych.errors import DataError, UsageError
from triptych.text.pretrained import PretrainedRecord, PretrainedTokenizer
from triptych.text.tokenizers import BYTE_OF, TokenizerSpec, train_pieces

_PAD, _EOS, _MASK, _UNK = "<pad>", "<eos>", "<mask>", "<unk>"
_SPECIAL = [_PAD, _EOS, _MASK]
_BYTES = sorted(BYTE_OF, key=BYTE_OF.__getitem__)


def train_tokenizer(spec: TokenizerSpec, texts: Iterable[str]) -> PretrainedTokenizer:
    """Train the tokenizer of a language model; the same texts give the same tokenizer.

    All kinds but "characters" know every text: `decode(encode(x)) == x`. A character that the training texts
    lack, or that `vocab_size` leaves out, becomes `<unk>`, which `decode` skips. `<eos>` ends a document, and
    begins a text (`bos_id`).

    Args:
        spec: kind and size; `joint` says nothing here.
        texts: training texts; long ones may come in parts.

    Raises:
        UsageError: a size that does not hold the special tokens and the bytes, or one character.
        DataError: texts without a character, for "characters".
    """
    special = _SPECIAL
    match spec.kind:
        case "bytes":
            inner = _assemble(
                models.BPE(_numbered([*_SPECIAL, *_BYTES]), []),
                use_regex=False,
            )
        case "characters":
            special = [*_SPECIAL, _UNK]
            vocab = _numbered([*special, *_characters(texts, spec.vocab_size - len(special))])
            inner = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token=_UNK))
            inner.decoder = decoders.Fuse()
        case _:
            inner = train_pieces(spec, texts, _assemble, _SPECIAL)
    inner.add_special_tokens(special)
    names = {"pad_token": _PAD, "bos_token": _EOS, "eos_token": _EOS, "mask_token": _MASK}
    if _UNK in special:
        names["unk_token"] = _UNK
    record = PretrainedRecord(tokens=names, chat_templates={}, inner=inner.to_str())
    return PretrainedTokenizer(record, "the tokenizer")


def _assemble(model: models.Model, *, use_regex: bool = True) -> tokenizers.Tokenizer:
    """As GPT-2's: every text is left as it is, and cut into words, each with the space before it."""
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    inner.decoder = decoders.ByteLevel()
    return inner


def _characters(texts: Iterable[str], most: int) -> list[str]:
    """The most frequent characters, in the order of their numbers."""
    if most < 1:
        raise UsageError("vocab_size is too small: the special tokens and one character need at least 5")
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    if not counts:
        raise DataError("the training text has no character; give more text")
    return sorted(sorted(counts, key=lambda char: (-counts[char], char))[:most])


def _numbered(tokens: Iterable[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}
