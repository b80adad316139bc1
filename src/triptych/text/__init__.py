"""Text on its way to a model and back.

Parallel corpora are read from files, Hugging Face datasets or the corpus that the package generates.
Byte-level tokenizers are trained and turn sentences into ids without loss. The ids of a corpus are compact
arrays, cached on disk. Batches hold pairs of similar length within a budget of tokens.

For language models, documents become tokens in memory-mapped shards, and shards become rows of one length.
Tokenizers are trained, or read from others' checkpoints. Start with `tokenizers.py` (`Tokenizer`).
"""

from triptych.text.batches import Batch, TokenBatches
from triptych.text.corpora import CorpusSpec, ParallelCorpus, read_parallel
from triptych.text.documents import LanguageCorpusSpec, TextPart, read_documents
from triptych.text.encoded import EncodedCorpus, encode_corpus
from triptych.text.framed import Frame, FramedTokenizer
from triptych.text.generated import generate_pairs
from triptych.text.given import GivenTexts, SpecialTokens, Text, as_lines, as_texts, require_ids
from triptych.text.lines import iterate_file, iterate_lines, read_lines, require_kept_file
from triptych.text.masking import Masking, MaskingSpec
from triptych.text.numbered import NumberedTokens
from triptych.text.packing import LanguageBatch, PackedBatches
from triptych.text.pretrained import PretrainedTokenizer, load_tokenizer, read_tokenizer
from triptych.text.reading import encode_texts
from triptych.text.sentence_tokenizers import (
    ByteLevelTokenizer,
    SentencePieceRecord,
    SentencePieceTokenizer,
    TokenizerPair,
    read_sentence_tokenizer,
)
from triptych.text.sequences import TokenSequences
from triptych.text.shards import TokenShards, read_shards, tokenize_corpus, write_shards
from triptych.text.tokenizers import OutputRules, SentenceTokenizer, StreamDecoder, Tokenizer
from triptych.text.training import TokenizerSpec, train_tokenizer, train_tokenizers, trained_once

__all__ = [
    "Batch",
    "ByteLevelTokenizer",
    "CorpusSpec",
    "EncodedCorpus",
    "Frame",
    "FramedTokenizer",
    "GivenTexts",
    "LanguageBatch",
    "LanguageCorpusSpec",
    "Masking",
    "MaskingSpec",
    "NumberedTokens",
    "OutputRules",
    "PackedBatches",
    "ParallelCorpus",
    "PretrainedTokenizer",
    "SentencePieceRecord",
    "SentencePieceTokenizer",
    "SentenceTokenizer",
    "SpecialTokens",
    "StreamDecoder",
    "Text",
    "TextPart",
    "TokenBatches",
    "TokenSequences",
    "TokenShards",
    "Tokenizer",
    "TokenizerPair",
    "TokenizerSpec",
    "as_lines",
    "as_texts",
    "encode_corpus",
    "encode_texts",
    "generate_pairs",
    "iterate_file",
    "iterate_lines",
    "load_tokenizer",
    "read_documents",
    "read_lines",
    "read_parallel",
    "read_sentence_tokenizer",
    "read_shards",
    "read_tokenizer",
    "require_ids",
    "require_kept_file",
    "tokenize_corpus",
    "train_tokenizer",
    "train_tokenizers",
    "trained_once",
    "write_shards",
]
