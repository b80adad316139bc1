"""Texts and tokenizers.

Tokenizers convert texts to token ids and back. Tokenizers trained by the package preserve every character;
the tokenizer of a checkpoint is read from its files. `given.py` defines a text, `encoding.py` reads its
special tokens. Training texts are in `training/corpora/`. Start with `tokenizers.py` (`Tokenizer`).
"""

from triptych.running.text.documents import LanguageCorpusSpec, TextPart, read_documents
from triptych.running.text.encoding import encode_texts
from triptych.running.text.framed import Frame, FramedTokenizer
from triptych.running.text.given import GivenTexts, Text, as_lines, as_texts, require_ids
from triptych.running.text.lines import iterate_file, iterate_lines, read_lines, require_kept_file
from triptych.running.text.masking import Masking, MaskingSpec
from triptych.running.text.numbered import NumberedTokens
from triptych.running.text.pretrained import PretrainedTokenizer, load_tokenizer, read_tokenizer
from triptych.running.text.sentence_tokenizers import (
    ByteLevelTokenizer,
    SentencePieceRecord,
    SentencePieceTokenizer,
    TokenizerPair,
    read_sentence_tokenizer,
)
from triptych.running.text.sequences import TokenSequences
from triptych.running.text.tokenizers import OutputRules, SentenceTokenizer, StreamDecoder, Tokenizer

__all__ = [
    "ByteLevelTokenizer",
    "Frame",
    "FramedTokenizer",
    "GivenTexts",
    "LanguageCorpusSpec",
    "Masking",
    "MaskingSpec",
    "NumberedTokens",
    "OutputRules",
    "PretrainedTokenizer",
    "SentencePieceRecord",
    "SentencePieceTokenizer",
    "SentenceTokenizer",
    "StreamDecoder",
    "Text",
    "TextPart",
    "TokenSequences",
    "Tokenizer",
    "TokenizerPair",
    "as_lines",
    "as_texts",
    "encode_texts",
    "iterate_file",
    "iterate_lines",
    "load_tokenizer",
    "read_documents",
    "read_lines",
    "read_sentence_tokenizer",
    "read_tokenizer",
    "require_ids",
    "require_kept_file",
]
