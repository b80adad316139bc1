"""Tokenizers out of the files that came before `tokenizer.json`: vocabularies, merges, SentencePiece models.

Each class of tokenizers normalizes, splits and surrounds text in a way of its own, which the files do not
say; here is what `transformers` does for each class.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from triptych.text.sentencepiece import SPACE_MARK, SentencePieceModel, read_model

VOCABULARY_FILES = (
    *("vocab.json", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model"),
)
NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))

_END_OF_TEXT = "<|endoftext|>"
_GPT2 = {"bos_token": _END_OF_TEXT, "eos_token": _END_OF_TEXT, "unk_token": _END_OF_TEXT}
_BERT = {
    **{"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]"},
    "mask_token": "[MASK]",
}
_ROBERTA = {
    **{"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>"},
    **{"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"},
}
# The special tokens of a class where a checkpoint says nothing else.
_DEFAULTS: dict[str, dict[str, str]] = {
    "GPT2Tokenizer": _GPT2,
    "GPTNeoXTokenizer": {**_GPT2, "pad_token": "<|padding|>"},
    "Qwen2Tokenizer": {"eos_token": _END_OF_TEXT, "pad_token": _END_OF_TEXT, "unk_token": _END_OF_TEXT},
    "RobertaTokenizer": _ROBERTA,
    "XLMRobertaTokenizer": _ROBERTA,
    "BertTokenizer": _BERT,
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GemmaTokenizer": {
        **{"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"},
        **{"pad_token": "<pad>", "mask_token": "<mask>"},
    },
    "T5Tokenizer": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    "AlbertTokenizer": {
        **_BERT,
        "bos_token": "[CLS]",
        "eos_token": "[SEP]",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    },
    "DebertaV2Tokenizer": {**_BERT, "bos_token": "[CLS]", "eos_token": "[SEP]"},
}
# Classes that do the same under another name.
_ALIASES = {
    **dict.fromkeys(("BartTokenizer", "LongformerTokenizer", "LEDTokenizer"), "RobertaTokenizer"),
    **dict.fromkeys(("DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer"), "BertTokenizer"),
}
_OF_MODEL_TYPE = {
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "opt", "phi", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("gpt_neox", "mpt", "olmo", "olmoe"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("roberta", "bart", "longformer", "roberta-prelayernorm"), "RobertaTokenizer"),
    **dict.fromkeys(("bert", "distilbert", "electra", "ernie", "mobilebert"), "BertTokenizer"),
    **dict.fromkeys(("llama", "mistral", "mixtral"), "LlamaTokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("t5", "mt5"), "T5Tokenizer"),
    **{"xlm-roberta": "XLMRobertaTokenizer", "albert": "AlbertTokenizer", "deberta-v2": "DebertaV2Tokenizer"},
}
# Source: the regular expression of Qwen2's published tokenizer.json.
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@final
@dataclass(frozen=True)
class TokenizerSettings:
    """What a checkpoint says of its tokenizer besides the vocabulary.

    Attributes:
        record: `tokenizer_config.json`, with what `special_tokens_map.json` adds.
        tokenizer_class: the class that it names, without "Fast"; None where it names none.
        model_type: of `config.json`.
        given: the named special tokens of the files.
        extra: further special tokens.
        added: tokens beside the vocabulary, by id.
        where: the file, for messages.
    """

    record: Mapping[str, Any]
    tokenizer_class: str | None
    model_type: str | None
    given: Mapping[str, AddedToken]
    extra: tuple[AddedToken, ...]
    added: Mapping[int, AddedToken]
    where: str

    @property
    def behaviour(self) -> str | None:
        """The class whose ways the tokenizer has; None where the files do not say."""
        if self.tokenizer_class is None:
            return _OF_MODEL_TYPE.get(self.model_type or "")
        return _ALIASES.get(self.tokenizer_class, self.tokenizer_class)

    @property
    def tokens(self) -> dict[str, AddedToken]:
        """The named special tokens, those of the class included."""
        # A token that is given as null is none.
        defaults = {
            name: AddedToken(content, special=True)
            for name, content in _DEFAULTS.get(self.behaviour or "", {}).items()
            if name not in self.record
        }
        return {**defaults, **self.given}

    def flag(self, name: str, default: bool) -> bool:
        """A setting that is true or false."""
        found = self.record.get(name)
        return default if found is None else bool(found)


def build_tokenizer(
    settings: TokenizerSettings, name: str, content: bytes, merges: bytes
) -> tuple[tokenizers.Tokenizer, list[AddedToken]]:
    """The tokenizer that a vocabulary file makes, without special tokens around a text.

    Args:
        settings: what the other files say.
        name: of the vocabulary file.
        content: of it.
        merges: content of `merges.txt`, which goes with `vocab.json`.

    Returns:
        The tokenizer, and further tokens to add, which the vocabulary file marks.

    Raises:
        ValueError: damaged, or of a class that is known by its `tokenizer.json` alone.
    """
    if name == "vocab.json":
        behaviour = settings.behaviour or "GPT2Tokenizer"
        if behaviour not in ("GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer", "RobertaTokenizer"):
            raise _unknown(behaviour)
        return _byte_level(settings, behaviour, _read_vocab(content), _read_merges(merges)), []
    if name == "vocab.txt":
        behaviour = settings.behaviour or "BertTokenizer"
        if behaviour != "BertTokenizer":
            raise _unknown(behaviour)
        return _word_piece(settings, content.decode("utf-8")), []
    return _of_sentencepiece(settings, read_model(content))


def surround(inner: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
    """Have special tokens put around a text, as the class and the settings say."""
    behaviour, tokens = settings.behaviour, settings.tokens

    def content(name: str) -> str:
        if name not in tokens:
            raise ValueError(f"{settings.where} names no {name}")
        return tokens[name].content

    def adds(name: str) -> bool:
        return settings.flag(f"add_{name}_token", False) and f"{name}_token" in tokens

    match behaviour:
        case "BertTokenizer" | "AlbertTokenizer" | "DebertaV2Tokenizer":
            begin, end = [content("cls_token")], [content("sep_token")]
        case "RobertaTokenizer":
            begin, end = [content("cls_token")], [content("sep_token")]
        case "XLMRobertaTokenizer":
            begin, end = [content("bos_token")], [content("eos_token")]
        case "T5Tokenizer":
            begin, end = [], [content("eos_token")]
        case _:
            # Asked for where there is none, `transformers` puts none.
            begin = [content("bos_token")] if adds("bos") else []
            end = [content("eos_token")] if adds("eos") else []
            if behaviour is None and inner.token_to_id("[CLS]") is not None:
                begin, end = ["[CLS]"], ["[SEP]"]
    around = [*begin, *end]
    missing = [token for token in around if inner.token_to_id(token) is None]
    if missing:
        raise ValueError(f"the special token {missing[0]!r} is not in the vocabulary")
    if around:
        inner.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end],
            special_tokens=[(token, inner.token_to_id(token)) for token in around],
        )


def _unknown(behaviour: str) -> ValueError:
    return ValueError(
        f"the tokenizer class {behaviour} is known by its tokenizer.json alone; fetch that file"
    )


def _read_vocab(content: bytes) -> dict[str, int]:
    try:
        vocab = json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(vocab, dict) or not all(
        isinstance(number, int) and 0 <= number < 2 * len(vocab) + 1000 for number in vocab.values()
    ):
        raise ValueError("it is not a record of tokens and their ids")
    return vocab


def _read_merges(content: bytes) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(content.decode("utf-8").split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2:
            raise ValueError(f"merges.txt, line {number}: not two tokens")
        merges.append((parts[0], parts[1]))
    return merges


def _byte_level(
    settings: TokenizerSettings, behaviour: str, vocab: dict[str, int], merges: list[tuple[str, str]]
) -> tokenizers.Tokenizer:
    """GPT-2's way: words of bytes, and merges."""
    known = [merge for merge in merges if merge[0] + merge[1] not in vocab or {*merge} - vocab.keys()]
    if known:
        raise ValueError(f"merges.txt merges {' and '.join(known[0])}, which are not all in vocab.json")
    inner = tokenizers.Tokenizer(
        models.BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    )
    space = settings.flag("add_prefix_space", False)
    if behaviour == "Qwen2Tokenizer":
        words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated", invert=False)
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of])
    else:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    if behaviour in ("Qwen2Tokenizer", "GPTNeoXTokenizer"):
        inner.normalizer = normalizers.NFC()
    inner.decoder = decoders.ByteLevel()
    return inner


def _word_piece(settings: TokenizerSettings, content: str) -> tokenizers.Tokenizer:
    """BERT's way: words, and their longest known beginnings."""
    lines = content.removesuffix("\n").split("\n")
    vocab = {line.removesuffix("\r"): number for number, line in enumerate(lines)}
    unknown = settings.tokens["unk_token"].content if "unk_token" in settings.tokens else "[UNK]"
    if unknown not in vocab:
        raise ValueError(f"the token for unknown words, {unknown!r}, is not in it")
    inner = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    inner.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.flag("tokenize_chinese_chars", True),
        strip_accents=settings.record.get("strip_accents"),
        lowercase=settings.flag("do_lower_case", True),
    )
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(prefix="##")
    return inner


def _of_sentencepiece(
    settings: TokenizerSettings, model: SentencePieceModel
) -> tuple[tokenizers.Tokenizer, list[AddedToken]]:
    behaviour = settings.behaviour or ("LlamaTokenizer" if model.kind == "bpe" else None)
    marked = [
        AddedToken(model.pieces[token][0], normalized=False, special=token in model.control)
        for token in sorted(model.control | model.user_defined)
    ]
    if behaviour in ("LlamaTokenizer", "GemmaTokenizer"):
        if model.kind != "bpe":
            raise ValueError(f"{behaviour} goes with a model of byte pairs, and this is a unigram model")
        return _of_pairs(settings, model, behaviour), marked
    if behaviour in ("T5Tokenizer", "XLMRobertaTokenizer", "AlbertTokenizer", "DebertaV2Tokenizer"):
        if model.kind != "unigram":
            raise ValueError(f"{behaviour} goes with a unigram model, and this is one of byte pairs")
        return _of_unigrams(settings, model, behaviour), marked
    if behaviour is None:
        raise ValueError("neither tokenizer_config.json nor config.json says of which class it is; add them")
    raise _unknown(behaviour)


def _of_pairs(settings: TokenizerSettings, model: SentencePieceModel, behaviour: str) -> tokenizers.Tokenizer:
    vocab = {piece: token for token, (piece, _) in enumerate(model.pieces)}
    inner = tokenizers.Tokenizer(
        models.BPE(
            vocab,
            _merges_of(vocab),
            unk_token=model.pieces[model.unk_id][0] if behaviour == "GemmaTokenizer" else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    decoding: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if behaviour == "GemmaTokenizer":
        inner.normalizer = normalizers.Replace(" ", SPACE_MARK)
        inner.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous", invert=False)
    else:
        scheme = "never"
        if settings.flag("add_prefix_space", True):
            scheme = "always" if settings.flag("legacy", False) else "first"
            decoding.append(decoders.Strip(content=" ", left=1))
        inner.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme=scheme, split=False)
    inner.decoder = decoders.Sequence(decoding)
    return inner


def _merges_of(vocab: dict[str, int]) -> list[tuple[str, str]]:
    """The merges behind a vocabulary whose ids are ranks: every way to make a piece of two others."""
    return [
        (piece[:cut], piece[cut:])
        for piece in vocab
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]


def _of_unigrams(
    settings: TokenizerSettings, model: SentencePieceModel, behaviour: str
) -> tokenizers.Tokenizer:
    pieces, unk_id = list(model.pieces), model.unk_id
    tokens = settings.tokens
    if behaviour == "XLMRobertaTokenizer":
        # fairseq's dictionary has four tokens of its own in front, and the model's first three nowhere.
        own = [(tokens[f"{name}_token"].content, 0.0) for name in ("bos", "pad", "eos", "unk")]
        pieces, unk_id = [*own, *pieces[3:], (tokens["mask_token"].content, 0.0)], 3
    if unk_id < 0:
        raise ValueError("it has no piece for what is unknown")
    inner = tokenizers.Tokenizer(models.Unigram(pieces, unk_id, False))
    rules: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    space = settings.flag("add_prefix_space", True)
    scheme = "always" if space else "never"
    words: list[Any] = [pre_tokenizers.WhitespaceSplit()]
    if behaviour == "AlbertTokenizer":
        plain: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
        if not settings.flag("keep_accents", False):
            plain += [normalizers.NFKD(), normalizers.StripAccents()]
        if settings.flag("do_lower_case", True):
            plain.append(normalizers.Lowercase())
        rules = [*plain, *rules]
    elif behaviour == "DebertaV2Tokenizer":
        lower = [normalizers.Lowercase()] if settings.flag("do_lower_case", False) else []
        joined = normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " ")
        rules = [*lower, joined, normalizers.NFC(), normalizers.Strip(left=False, right=True)]
        split = settings.flag("split_by_punct", False)
        words = [pre_tokenizers.Punctuation(behavior="isolated")] if split else []
        scheme = "always" if space else "first"
    elif behaviour == "T5Tokenizer":
        scheme = "always"
    if rules:
        inner.normalizer = normalizers.Sequence(rules)
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [*words, pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme=scheme)]
    )
    inner.decoder = decoders.Metaspace(SPACE_MARK, prepend_scheme=scheme)
    return inner
