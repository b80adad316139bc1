"""Normalization and splitting of the tokenizer classes, as in `transformers` 5."""

from collections.abc import Callable, Sequence
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from triptych.running.text.sentencepiece import SPACE_MARK
from triptych.running.text.tokenizer_making import Making
from triptych.running.text.tokenizer_settings import TokenizerSettings

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
    """Build a template of special tokens, by their names, around the texts `$A` and `$B`.

    A colon precedes a token type: `sep_token:1`.
    """

    def make(making: Making) -> Sequence[str]:
        found = []
        for part in template:
            name, colon, kind = part.partition(":")
            text = name if name.startswith("$") else making.token(name)
            found.append(f"{text}{colon}{kind}")
        return found

    return make


def cut_words(space: bool, pattern: str | None = None) -> Any:
    if pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=space)
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False)]
    )


def cut_digits(space: bool) -> Any:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=space)]
    )


def byte_pairs(
    making: Making,
    *,
    cut: Callable[[bool], Any] = cut_words,
    normalizer: Any = None,
    space: bool = False,
) -> tokenizers.Tokenizer:
    """Build a tokenizer as in GPT-2: words of bytes, and merges."""
    inner = _pair_model(
        making, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False
    )
    if normalizer is not None:
        inner.normalizer = normalizer
    inner.pre_tokenizer = cut(making.flag("add_prefix_space", space))
    inner.decoder = decoders.ByteLevel()
    return inner


def word_pieces(making: Making) -> tokenizers.Tokenizer:
    """Build a tokenizer as in BERT: words, split by their longest known prefixes."""
    model = models.WordPiece(
        dict(making.vocabulary.ids), unk_token=making.token("unk_token")
    )
    inner = tokenizers.Tokenizer(model)
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
    inner = _pair_model(
        making, **ends, fuse_unk=False, unk_token=making.token("unk_token")
    )
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.BPEDecoder(suffix="</w>")
    return inner


def _pair_model(making: Making, **options: Any) -> tokenizers.Tokenizer:
    vocabulary = making.vocabulary
    return tokenizers.Tokenizer(
        models.BPE(dict(vocabulary.ids), list(vocabulary.merges), **options)
    )


# SentencePiece's byte pairs spell unknown characters in bytes.
_SPELLS = {"fuse_unk": True, "byte_fallback": True}


def _spelled(*, strip: bool) -> Any:
    steps: list[Any] = [
        decoders.Replace(SPACE_MARK, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    return decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1)] if strip else steps
    )


def llama(making: Making, *, is_code: bool = False) -> tokenizers.Tokenizer:
    inner = _pair_model(
        making, unk_token=making.token("unk_token") if is_code else None, **_SPELLS
    )
    space = making.flag("add_prefix_space", True)
    first = "always" if making.flag("legacy", False) and not is_code else "first"
    inner.pre_tokenizer = pre_tokenizers.Metaspace(
        SPACE_MARK, prepend_scheme=first if space else "never", split=False
    )
    inner.decoder = _spelled(strip=space or is_code)
    return inner


def gemma(making: Making) -> tokenizers.Tokenizer:
    inner = _pair_model(making, unk_token=making.token("unk_token"), **_SPELLS)
    inner.normalizer = normalizers.Replace(" ", SPACE_MARK)
    inner.pre_tokenizer = pre_tokenizers.Split(
        " ", behavior="merged_with_previous", invert=False
    )
    inner.decoder = _spelled(strip=False)
    return inner


def _spaced(
    model: models.Model,
    rules: Sequence[Any],
    before: Sequence[Any] = (),
    scheme: str = "always",
) -> tokenizers.Tokenizer:
    """Build a tokenizer with the space before a word as a mark at its beginning."""
    inner = tokenizers.Tokenizer(model)
    if rules:
        inner.normalizer = normalizers.Sequence([*rules])
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [*before, pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme=scheme)]
    )
    inner.decoder = decoders.Metaspace(SPACE_MARK, prepend_scheme=scheme)
    return inner


def _unigrams(making: Making, unk_id: int) -> models.Model:
    return models.Unigram(list(making.vocabulary.pieces), unk_id, False)


def _charsmap(making: Making) -> list[Any]:
    charsmap = making.vocabulary.charsmap
    return [normalizers.Precompiled(charsmap)] if charsmap else []


def _scheme(making: Making, otherwise: str = "never") -> str:
    return "always" if making.flag("add_prefix_space", True) else otherwise


_ONE_SPACE = normalizers.Replace(Regex(" {2,}"), " ")
_AT_SPACES = pre_tokenizers.WhitespaceSplit()


def t5(making: Making) -> tokenizers.Tokenizer:
    return _spaced(_unigrams(making, 2), _charsmap(making), [_AT_SPACES])


def t5_extra(settings: TokenizerSettings) -> Sequence[str]:
    return [f"<extra_id_{i}>" for i in range(settings.count("extra_ids", 100))]


def xlm_roberta(making: Making) -> tokenizers.Tokenizer:
    return _spaced(
        _unigrams(making, 3), _charsmap(making), [_AT_SPACES], _scheme(making)
    )


def mbart(making: Making) -> tokenizers.Tokenizer:
    return _spaced(_unigrams(making, 3), [], [_AT_SPACES])


def mbart50(making: Making) -> tokenizers.Tokenizer:
    if not making.vocabulary.ids.keys() & {*MBART50_LANGUAGES}:
        raise ValueError(
            "it has none of the languages of MBart50Tokenizer; fetch the SentencePiece model"
        )
    return _spaced(_unigrams(making, 3), [*_charsmap(making), _ONE_SPACE])


def nllb(making: Making) -> tokenizers.Tokenizer:
    model = _pair_model(
        making, unk_token=making.token("unk_token"), fuse_unk=True
    ).model
    charsmap = _charsmap(making)
    return _spaced(model, [*charsmap, _ONE_SPACE] if charsmap else [])


def nllb_extra(settings: TokenizerSettings) -> Sequence[str]:
    raise ValueError(
        f"{settings.where} names no languages: list them in extra_special_tokens"
    )


def language(making: Making, default: str) -> str:
    return str(making.settings.record.get("src_lang") or default)


def nllb_around(making: Making) -> Sequence[str]:
    source = language(making, "eng_Latn")
    end = making.token("eos_token")
    return (
        ["$A", end, source]
        if making.flag("legacy_behaviour", False)
        else [source, "$A", end]
    )


def camembert(making: Making) -> tokenizers.Tokenizer:
    unk_id = making.vocabulary.ids.get(making.token("unk_token"), 0)
    return _spaced(
        _unigrams(making, unk_id), _charsmap(making), [_AT_SPACES], _scheme(making)
    )


def albert(making: Making) -> tokenizers.Tokenizer:
    rules: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not making.flag("keep_accents", False):
        rules += [normalizers.NFKD(), normalizers.StripAccents()]
    if making.flag("do_lower_case", True):
        rules.append(normalizers.Lowercase())
    return _spaced(
        _unigrams(making, 1),
        [*rules, *_charsmap(making)],
        [_AT_SPACES],
        _scheme(making),
    )


def deberta_v2(making: Making) -> tokenizers.Tokenizer:
    pieces = making.vocabulary.pieces
    unknown = (making.token("unk_token"), 0.0)
    stated = making.settings.record.get("unk_id")
    unk_id = (
        pieces.index(unknown) if unknown in pieces else 1 if stated is None else stated
    )
    joined = normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " ")
    rules = [joined, normalizers.NFC(), normalizers.Strip(left=False, right=True)]
    if making.flag("do_lower_case", False):
        rules = [normalizers.Lowercase(), *rules]
    split = making.flag("split_by_punct", False)
    words = [pre_tokenizers.Punctuation(behavior="isolated")] if split else []
    return _spaced(_unigrams(making, unk_id), rules, words, _scheme(making, "first"))


def pegasus(making: Making) -> tokenizers.Tokenizer:
    unk_id = making.vocabulary.pieces.index((making.token("unk_token"), 0.0), 1)
    rules = _charsmap(making) or [normalizers.Replace(Regex(r"\n"), " ")]
    return _spaced(_unigrams(making, unk_id), [*rules, _ONE_SPACE])


def pegasus_extra(settings: TokenizerSettings) -> Sequence[str]:
    mask = settings.record.get("mask_token_sent", "<mask_1>")
    unknowns = [f"<unk_{i}>" for i in range(2, settings.count("offset", 103))]
    return unknowns if mask is None else [str(mask), *unknowns]


def xglm(making: Making) -> tokenizers.Tokenizer:
    return _spaced(
        _unigrams(making, 3), [*_charsmap(making), _ONE_SPACE], scheme=_scheme(making)
    )
