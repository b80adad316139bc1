"""The ways of the classes of tokenizers to normalize and cut text, as `transformers` 5 has them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from triptych.text.sentencepiece import SPACE_MARK
from triptych.text.tokenizer_making import Making, Marked, Token
from triptych.text.vocabularies import Pieces, TokenizerSettings

_MBART_LANGUAGES = """
ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM
ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN
"""
_MORE_LANGUAGES = """
af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE
sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI
"""
MBART_LANGUAGES = tuple(_MBART_LANGUAGES.split())
MBART50_LANGUAGES = (*MBART_LANGUAGES, *_MORE_LANGUAGES.split())


def around(*template: str) -> Callable[[Making], Sequence[str]]:
    """What surrounds a text, by the names of special tokens."""
    return lambda making: [part if part == "$A" else making.token(part) for part in template]


def cut_words(space: bool, pattern: str | None = None) -> Any:
    if pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=space)
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False)])


def cut_digits(space: bool) -> Any:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=space)])


def byte_pairs(
    making: Making,
    *,
    cut: Callable[[bool], Any] = cut_words,
    normalizer: Any = None,
    space: bool = False,
) -> tokenizers.Tokenizer:
    """GPT-2's way: words of bytes, and merges."""
    inner = _pairs(making, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    if normalizer is not None:
        inner.normalizer = normalizer
    inner.pre_tokenizer = cut(making.flag("add_prefix_space", space))
    inner.decoder = decoders.ByteLevel()
    return inner


def word_pieces(making: Making) -> tokenizers.Tokenizer:
    """BERT's way: words, and their longest known beginnings."""
    ids, unknown = making.vocabulary.ids, making.token("unk_token")
    if unknown not in ids:
        raise ValueError(f"the token for unknown words, {unknown!r}, is not in it")
    inner = tokenizers.Tokenizer(models.WordPiece(dict(ids), unk_token=unknown))
    inner.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=making.flag("tokenize_chinese_chars", True),
        strip_accents=making.settings.record.get("strip_accents"),
        lowercase=making.flag("do_lower_case", True),
    )
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(prefix="##")
    return inner


def openai_gpt(making: Making) -> tokenizers.Tokenizer:
    ends = {"continuing_subword_prefix": "", "end_of_word_suffix": "</w>"}
    inner = _pairs(making, **ends, fuse_unk=False, unk_token=making.token("unk_token"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.BPEDecoder(suffix="</w>")
    return inner


def _pairs(making: Making, **options: Any) -> tokenizers.Tokenizer:
    vocabulary = making.vocabulary
    return tokenizers.Tokenizer(models.BPE(dict(vocabulary.ids), list(vocabulary.merges), **options))


# SentencePiece's byte pairs spell what they lack in bytes.
_SPELLS = {"fuse_unk": True, "byte_fallback": True}


def _spelled(*, strip: bool) -> Any:
    steps: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if strip else steps)


def llama(making: Making, *, is_code: bool = False) -> tokenizers.Tokenizer:
    inner = _pairs(making, unk_token=making.token("unk_token") if is_code else None, **_SPELLS)
    space = making.flag("add_prefix_space", True)
    first = "always" if making.flag("legacy", False) and not is_code else "first"
    inner.pre_tokenizer = pre_tokenizers.Metaspace(
        SPACE_MARK, prepend_scheme=first if space else "never", split=False
    )
    inner.decoder = _spelled(strip=space or is_code)
    return inner


def gemma(making: Making) -> tokenizers.Tokenizer:
    inner = _pairs(making, unk_token=making.token("unk_token"), **_SPELLS)
    inner.normalizer = normalizers.Replace(" ", SPACE_MARK)
    inner.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous", invert=False)
    inner.decoder = _spelled(strip=False)
    return inner


def _spaced(
    model: models.Model, rules: Sequence[Any], before: Sequence[Any] = (), scheme: str = "always"
) -> tokenizers.Tokenizer:
    """Words with their space as a mark in front of them."""
    inner = tokenizers.Tokenizer(model)
    if rules:
        inner.normalizer = normalizers.Sequence([*rules])
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [*before, pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme=scheme)]
    )
    inner.decoder = decoders.Metaspace(SPACE_MARK, prepend_scheme=scheme)
    return inner


def _unigrams(pieces: Pieces, unk_id: int) -> models.Model:
    return models.Unigram(list(pieces), unk_id, False)


def _charsmap(making: Making) -> list[Any]:
    charsmap = making.vocabulary.charsmap
    return [normalizers.Precompiled(charsmap)] if charsmap else []


def _scheme(making: Making, otherwise: str = "never") -> str:
    return "always" if making.flag("add_prefix_space", True) else otherwise


_ONE_SPACE = normalizers.Replace(Regex(" {2,}"), " ")
_AT_SPACES = pre_tokenizers.WhitespaceSplit()


def _after_own(making: Making, names: Sequence[str], languages: Sequence[str] = ()) -> Pieces:
    """The pieces of a SentencePiece model but its first three, between special tokens of fairseq's."""
    pieces = making.vocabulary.pieces
    if not making.is_spm:
        return pieces
    own = [(making.token(f"{name}_token"), 0.0) for name in names]
    last = [*languages, making.token("mask_token")]
    return (*own, *pieces[3:], *((token, 0.0) for token in last))


def t5(making: Making) -> tokenizers.Tokenizer:
    pieces = making.vocabulary.pieces
    if making.is_spm:
        pieces = (*pieces, *((token, 0.0) for token in reversed(_sentinels(making.settings))))
    return _spaced(_unigrams(pieces, 2), _charsmap(making), [_AT_SPACES])


def _sentinels(settings: TokenizerSettings, marked: Marked = None) -> list[str]:
    number = settings.record.get("extra_ids", 100)
    if not isinstance(number, int) or not 0 <= number <= _MOST_SENTINELS:
        raise ValueError(
            f"{settings.where}: extra_ids is {number!r}: a number up to {_MOST_SENTINELS} is needed"
        )
    return [f"<extra_id_{i}>" for i in range(number)]


_MOST_SENTINELS = 10_000


def t5_extra(settings: TokenizerSettings, marked: Marked) -> Sequence[Token]:
    given = marked or ()
    has = any("<extra_id_" in token.content for token in given)
    return given if has else [*given, *_sentinels(settings)]


def xlm_roberta(making: Making) -> tokenizers.Tokenizer:
    pieces = _after_own(making, ("bos", "pad", "eos", "unk"))
    return _spaced(_unigrams(pieces, 3), _charsmap(making), [_AT_SPACES], _scheme(making))


def mbart(making: Making) -> tokenizers.Tokenizer:
    pieces = _after_own(making, ("bos", "pad", "eos", "unk"), MBART_LANGUAGES)
    return _spaced(_unigrams(pieces, 3), [], [_AT_SPACES])


def mbart50(making: Making) -> tokenizers.Tokenizer:
    pieces = _after_own(making, ("cls", "pad", "eos", "unk"), MBART50_LANGUAGES)
    if not making.vocabulary.ids.keys() & {*MBART50_LANGUAGES} and not making.is_spm:
        raise ValueError("it has none of the languages of MBart50Tokenizer; fetch the SentencePiece model")
    return _spaced(_unigrams(pieces, 3), [*_charsmap(making), _ONE_SPACE])


def nllb(making: Making) -> tokenizers.Tokenizer:
    ids: Mapping[str, int] = making.vocabulary.ids
    if making.is_spm:
        own = [making.token(f"{name}_token") for name in ("bos", "pad", "eos", "unk")]
        ids = {token: number for number, token in enumerate(dict.fromkeys([*own, *ids]))}
    unknown = making.token("unk_token")
    model = models.BPE(dict(ids), list(making.vocabulary.merges), unk_token=unknown, fuse_unk=True)
    charsmap = _charsmap(making)
    return _spaced(model, [*charsmap, _ONE_SPACE] if charsmap else [])


def nllb_extra(settings: TokenizerSettings, marked: Marked) -> Sequence[Token]:
    if marked is None:
        raise ValueError(f"{settings.where} names no languages: list them in extra_special_tokens")
    return marked


def language(making: Making, default: str) -> str:
    return str(making.settings.record.get("src_lang") or default)


def nllb_around(making: Making) -> Sequence[str]:
    source, end = language(making, "eng_Latn"), making.token("eos_token")
    return ["$A", end, source] if making.flag("legacy_behaviour", False) else [source, "$A", end]


def camembert(making: Making) -> tokenizers.Tokenizer:
    unknown, pieces = making.token("unk_token"), making.vocabulary.pieces
    if making.is_spm:
        own = [("<s>NOTUSED", 0.0), (making.token("pad_token"), 0.0), ("</s>NOTUSED", 0.0), (unknown, 0.0)]
        pieces = (*own, ("<unk>NOTUSED", -100.0), *pieces[1:], (making.token("mask_token"), 0.0))
    unk_id = next((number for number, (piece, _) in enumerate(pieces) if piece == unknown), 0)
    return _spaced(_unigrams(pieces, unk_id), _charsmap(making), [_AT_SPACES], _scheme(making))


def camembert_extra(settings: TokenizerSettings, marked: Marked) -> Sequence[Token]:
    return ["<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED"] if marked is None else marked


def albert(making: Making) -> tokenizers.Tokenizer:
    rules: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not making.flag("keep_accents", False):
        rules += [normalizers.NFKD(), normalizers.StripAccents()]
    if making.flag("do_lower_case", True):
        rules.append(normalizers.Lowercase())
    model = _unigrams(making.vocabulary.pieces, 1)
    return _spaced(model, [*rules, *_charsmap(making)], [_AT_SPACES], _scheme(making))


def deberta_v2(making: Making) -> tokenizers.Tokenizer:
    pieces = making.vocabulary.pieces
    unknown = (making.token("unk_token"), 0.0)
    stated = making.vocabulary.unk_id if making.is_spm else making.settings.record.get("unk_id")
    unk_id = pieces.index(unknown) if unknown in pieces else 1 if stated is None else stated
    joined = normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " ")
    rules = [joined, normalizers.NFC(), normalizers.Strip(left=False, right=True)]
    if making.flag("do_lower_case", False):
        rules = [normalizers.Lowercase(), *rules]
    split = making.flag("split_by_punct", False)
    words = [pre_tokenizers.Punctuation(behavior="isolated")] if split else []
    return _spaced(_unigrams(pieces, unk_id), rules, words, _scheme(making, "first"))


def pegasus(making: Making) -> tokenizers.Tokenizer:
    pieces, record = making.vocabulary.pieces, making.settings.record
    if making.is_spm:
        own = [making.token("pad_token"), making.token("eos_token")]
        masks = (record.get("mask_token", "<mask_1>"), record.get("mask_token_sent", "<mask_2>"))
        own += [str(token) for token in dict.fromkeys(masks) if token is not None]
        first = [*((token, 0.0) for token in own), *((token, -100.0) for token in _unknowns(making.settings))]
        pieces = (*first, *pieces[2:])
    unk_id = pieces.index((making.token("unk_token"), 0.0), 1)
    charsmap = _charsmap(making)
    rules = charsmap or [normalizers.Replace(Regex(r"\n"), " ")]
    return _spaced(_unigrams(pieces, unk_id), [*rules, _ONE_SPACE])


def _unknowns(settings: TokenizerSettings) -> list[str]:
    return [f"<unk_{i}>" for i in range(2, int(settings.record.get("offset", 103)))]


def pegasus_extra(settings: TokenizerSettings, marked: Marked) -> Sequence[Token]:
    mask = settings.record.get("mask_token_sent", "<mask_1>")
    known = {token.content for token in marked or ()}
    return [*([] if mask is None or mask in known else [str(mask)]), *_unknowns(settings)]


def xglm(making: Making) -> tokenizers.Tokenizer:
    if making.is_spm:
        raise ValueError("XGLMTokenizer is known by its tokenizer.json alone; fetch that file")
    rules = [*_charsmap(making), _ONE_SPACE]
    return _spaced(_unigrams(making.vocabulary.pieces, 3), rules, scheme=_scheme(making))


def with_own(*own: str) -> Callable[[TokenizerSettings, Marked], Sequence[Token]]:
    def extra(settings: TokenizerSettings, marked: Marked) -> Sequence[Token]:
        known = {token.content for token in marked or ()}
        return [*(marked or ()), *(token for token in own if token not in known)]

    return extra
