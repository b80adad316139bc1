"""Texts and tokenizers.

Tokenizers convert texts to token ids and back. Tokenizers trained by the package preserve every character;
the tokenizer of a checkpoint is read from its files. `given.py` defines a text, `encoding.py` reads its
special tokens. Training texts are in `training/corpora/`. Start with `tokenizers.py` (`Tokenizer`).
"""

from typing import TYPE_CHECKING

from triptych.listed_names import finder

if TYPE_CHECKING:
    from triptych.running.text.documents import LanguageCorpusSpec as LanguageCorpusSpec
    from triptych.running.text.documents import TextPart as TextPart
    from triptych.running.text.documents import find_files as find_files
    from triptych.running.text.documents import fingerprint as fingerprint
    from triptych.running.text.documents import read_documents as read_documents
    from triptych.running.text.documents import require_documents as require_documents
    from triptych.running.text.documents import whole_documents as whole_documents
    from triptych.running.text.encoding import encode_inputs as encode_inputs
    from triptych.running.text.encoding import encode_texts as encode_texts
    from triptych.running.text.encoding import token_id as token_id
    from triptych.running.text.framed import Frame as Frame
    from triptych.running.text.framed import FramedTokenizer as FramedTokenizer
    from triptych.running.text.given import GivenText as GivenText
    from triptych.running.text.given import GivenTexts as GivenTexts
    from triptych.running.text.given import Text as Text
    from triptych.running.text.given import TextPair as TextPair
    from triptych.running.text.given import as_lines as as_lines
    from triptych.running.text.given import as_texts as as_texts
    from triptych.running.text.given import refuse_file_name as refuse_file_name
    from triptych.running.text.given import require_ids as require_ids
    from triptych.running.text.lines import iterate_file as iterate_file
    from triptych.running.text.lines import iterate_lines as iterate_lines
    from triptych.running.text.lines import read_lines as read_lines
    from triptych.running.text.lines import require_kept_file as require_kept_file
    from triptych.running.text.masking import Masking as Masking
    from triptych.running.text.masking import MaskingSpec as MaskingSpec
    from triptych.running.text.numbered import NumberedTokens as NumberedTokens
    from triptych.running.text.pieces import bytes_of as bytes_of
    from triptych.running.text.pretrained import PretrainedRecord as PretrainedRecord
    from triptych.running.text.pretrained import (
        PretrainedTokenizer as PretrainedTokenizer,
    )
    from triptych.running.text.pretrained import copy_tokenizer as copy_tokenizer
    from triptych.running.text.pretrained import load_tokenizer as load_tokenizer
    from triptych.running.text.pretrained import read_tokenizer as read_tokenizer
    from triptych.running.text.record_files import NumberedTexts as NumberedTexts
    from triptych.running.text.record_files import read_hub as read_hub
    from triptych.running.text.record_files import read_jsonl as read_jsonl
    from triptych.running.text.record_files import read_parquet as read_parquet
    from triptych.running.text.record_files import read_tsv as read_tsv
    from triptych.running.text.record_files import record_ending as record_ending
    from triptych.running.text.scripts import first_character as first_character
    from triptych.running.text.scripts import is_inside_character as is_inside_character
    from triptych.running.text.scripts import is_unspaced as is_unspaced
    from triptych.running.text.sentence_tokenizers import BYTE_ALPHABET as BYTE_ALPHABET
    from triptych.running.text.sentence_tokenizers import BYTE_OF as BYTE_OF
    from triptych.running.text.sentence_tokenizers import (
        SPECIAL_TOKENS as SPECIAL_TOKENS,
    )
    from triptych.running.text.sentence_tokenizers import (
        ByteLevelTokenizer as ByteLevelTokenizer,
    )
    from triptych.running.text.sentence_tokenizers import (
        SentencePieceRecord as SentencePieceRecord,
    )
    from triptych.running.text.sentence_tokenizers import (
        SentencePieceTokenizer as SentencePieceTokenizer,
    )
    from triptych.running.text.sentence_tokenizers import TokenizerPair as TokenizerPair
    from triptych.running.text.sentence_tokenizers import assemble as assemble
    from triptych.running.text.sentence_tokenizers import (
        read_sentence_tokenizer as read_sentence_tokenizer,
    )
    from triptych.running.text.sentences import graphemes as graphemes
    from triptych.running.text.sentences import spans_of_words as spans_of_words
    from triptych.running.text.sequences import TokenSequences as TokenSequences
    from triptych.running.text.sequences import offsets_of as offsets_of
    from triptych.running.text.shortlists import Coverage as Coverage
    from triptych.running.text.shortlists import learn_shortlist as learn_shortlist
    from triptych.running.text.tokenizers import OutputRules as OutputRules
    from triptych.running.text.tokenizers import SentenceTokenizer as SentenceTokenizer
    from triptych.running.text.tokenizers import StreamDecoder as StreamDecoder
    from triptych.running.text.tokenizers import Tokenizer as Tokenizer
    from triptych.running.text.unknown_characters import MOST_UNKNOWN as MOST_UNKNOWN
    from triptych.running.text.unknown_characters import unknown_token as unknown_token
    from triptych.running.text.unknown_characters import why_no_bits as why_no_bits

__getattr__ = finder(__name__, __file__)
