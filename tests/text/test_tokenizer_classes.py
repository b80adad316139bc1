"""Every class of tokenizers that transformers makes in a way of its own, out of either kind of files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from checkpoints.tiny_spm import BYTE_PIECES, PIECES, RULES, Piece, charsmap, spm
from text.test_pretrained import (
    CORPUS,
    assert_as_transformers,
    byte_level,
    configure,
    pieces_of_llama,
    sentence_pieces,
    word_pieces,
)
from triptych.errors import DataError
from triptych.running.text import load_tokenizer

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "[CLS]", "[SEP]", "[UNK]", "[PAD]", "[MASK]", "<mask>"]
LETTERS: list[Piece] = [(letter, -5.0, "normal") for letter in "dghjklmnopqrstuvwxyzTIQ'D0"]
SENTINELS = [f"<extra_id_{number}>" for number in range(10)]


def save(inner: tokenizers.Tokenizer, folder: Path, *special: str) -> None:
    """Write `tokenizer.json` with parts that no class has."""
    inner.post_processor = processors.ByteLevel(trim_offsets=True)
    inner.add_special_tokens([token for token in special if inner.token_to_id(token) is not None])
    inner.save(str(folder / "tokenizer.json"))


def whole_byte_level(folder: Path) -> None:
    byte_level(folder)
    inner = tokenizers.Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    inner.decoder = decoders.ByteLevel()
    save(inner, folder, "<|endoftext|>", "<s>", "</s>")


def whole_words(folder: Path) -> None:
    word_pieces(folder)
    inner = tokenizers.Tokenizer(models.WordPiece.from_file(str(folder / "vocab.txt")))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.WordPiece()
    save(inner, folder, *SPECIAL)


def unigrams(folder: Path, *first: str) -> None:
    """A Unigram tokenizer.json that begins with some special tokens."""
    pieces = [*((token, 0.0) for token in first), *((text, score) for text, score, _ in PIECES[3:])]
    pieces += [(letter, score) for letter, score, _ in LETTERS]
    inner = tokenizers.Tokenizer(models.Unigram(pieces, first.index("<unk>")))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Precompiled(charsmap(RULES)), normalizers.Lowercase()]
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    inner.decoder = decoders.Metaspace(prepend_scheme="never")
    save(inner, folder, *first)


def whole_t5(folder: Path) -> None:
    unigrams(folder, "<pad>", "</s>", "<unk>", *reversed(SENTINELS))


def whole_fairseq(folder: Path) -> None:
    unigrams(folder, "<s>", "<pad>", "</s>", "<unk>", "<mask>", "de_DE", "en_XX", "[CLS]", "[SEP]")


def whole_albert(folder: Path) -> None:
    unigrams(folder, "<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "[PAD]")


def whole_pegasus(folder: Path) -> None:
    unigrams(folder, "<pad>", "</s>", "<mask_1>", "<mask_2>", "<unk_2>", "<unk_3>", "<unk>")


def whole_spelled(folder: Path) -> None:
    """Byte pairs of SentencePiece, normalized as Llama 2's were before `legacy` was."""
    pieces = [*PIECES[:3], ("<pad>", 0.0, "control"), *BYTE_PIECES, *PIECES[3:], *LETTERS]
    ids = {text: number for number, (text, *_) in enumerate(pieces)}
    ids |= {"eng_Latn": len(ids), "deu_Latn": len(ids) + 1, "<mask>": len(ids) + 2}
    cuts = [(text[:at], text[at:]) for text in ids for at in range(1, len(text))]
    merges = [cut for cut in cuts if ids.keys() >= {*cut}]
    model = models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    inner = tokenizers.Tokenizer(model)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1)]
    inner.decoder = decoders.Sequence(steps)
    inner.add_special_tokens(["<unk>", "<s>", "</s>", "eng_Latn", "deu_Latn"])
    bos = [("<s>", ids["<s>"])]
    inner.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=bos)
    inner.save(str(folder / "tokenizer.json"))


def whole_gpt(folder: Path) -> None:
    inner = tokenizers.Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    inner.train_from_iterator(CORPUS, trainer)
    save(inner, folder, "<unk>")


Options = dict[str, Any]
# What `tokenizer.json` is made like, and the settings beside it.
WHOLE: list[tuple[Callable[[Path], None], Options]] = [
    (whole_byte_level, {"model_type": "gpt2"}),
    (whole_byte_level, {"model_type": "gpt2", "tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}),
    (whole_byte_level, {"model_type": "gpt2", "tokenizer_class": "PreTrainedTokenizerFast"}),
    (whole_byte_level, {"model_type": "codegen", "tokenizer_class": "CodeGenTokenizerFast"}),
    (whole_byte_level, {"model_type": "granite", "tokenizer_class": "GPT2TokenizerFast"}),
    (whole_byte_level, {"model_type": "gpt_neox", "add_bos_token": True}),
    (
        whole_byte_level,
        {"model_type": "olmo", "tokenizer_class": "GPTNeoXTokenizerFast", "pad_token": "<pad>"},
    ),
    (
        whole_byte_level,
        {
            **{"model_type": "qwen3", "tokenizer_class": "Qwen2Tokenizer", "bos_token": None},
            "added_tokens_decoder": {"420": {"content": "<|im_end|>", "lstrip": True, "special": True}},
            "additional_special_tokens": ["<|im_end|>"],
        },
    ),
    (whole_byte_level, {"model_type": "qwen2", "tokenizer_class": "PreTrainedTokenizerFast"}),
    (whole_byte_level, {"model_type": "llama", "tokenizer_class": "LlamaTokenizerFast"}),
    (whole_byte_level, {"model_type": "roberta", "add_prefix_space": True}),
    (
        whole_byte_level,
        {"model_type": "roberta", "mask_token": {"__type": "AddedToken", "content": "<mask>"}},
    ),
    (whole_byte_level, {"model_type": "bart", "tokenizer_class": "BartTokenizer"}),
    (whole_byte_level, {"model_type": "deberta"}),
    (whole_byte_level, {"model_type": "blenderbot"}),
    (whole_byte_level, {"model_type": "cohere", "tokenizer_class": "CohereTokenizerFast"}),
    (whole_byte_level, {"model_type": "cohere2", "add_prefix_space": True}),
    (whole_words, {"model_type": "bert"}),
    (whole_words, {"model_type": "bert", "do_lower_case": False}),
    (whole_words, {"model_type": "bert", "tokenizer_class": "BertTokenizerFast", "strip_accents": False}),
    (whole_words, {"model_type": "distilbert", "strip_accents": True, "do_lower_case": False}),
    (whole_words, {"model_type": "electra", "tokenizer_class": "ElectraTokenizerFast"}),
    (
        whole_words,
        {"model_type": "bert", "tokenize_chinese_chars": False, "clean_up_tokenization_spaces": True},
    ),
    (whole_words, {"model_type": "mpnet", "do_lower_case": False}),
    (whole_words, {"model_type": "modernbert", "tokenizer_class": "BertTokenizer"}),
    (whole_gpt, {"model_type": "openai-gpt", "tokenizer_class": "OpenAIGPTTokenizer"}),
    (whole_spelled, {"model_type": "llama", "tokenizer_class": "LlamaTokenizer"}),
    (whole_spelled, {"model_type": "llama", "tokenizer_class": "LlamaTokenizerFast", "legacy": True}),
    (whole_spelled, {"model_type": "llama", "tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}),
    (whole_spelled, {"model_type": "llama", "tokenizer_class": "CodeLlamaTokenizerFast"}),
    (whole_spelled, {"model_type": "llama"}),
    (whole_spelled, {"model_type": "mistral", "tokenizer_class": "LlamaTokenizer", "legacy": False}),
    (whole_spelled, {"model_type": "gemma", "bos_token": "<s>", "eos_token": "</s>"}),
    (
        whole_spelled,
        {
            **{"model_type": "m2m_100", "tokenizer_class": "NllbTokenizerFast"},
            "additional_special_tokens": ["eng_Latn", "deu_Latn"],
        },
    ),
    (
        whole_spelled,
        {
            **{"model_type": "m2m_100", "tokenizer_class": "NllbTokenizer", "src_lang": "deu_Latn"},
            **{"extra_special_tokens": ["eng_Latn", "deu_Latn"], "legacy_behaviour": True},
        },
    ),
    (whole_t5, {"model_type": "t5", "extra_ids": 10}),
    (whole_t5, {"model_type": "t5", "tokenizer_class": "T5TokenizerFast", "extra_ids": 0}),
    (whole_t5, {"model_type": "mt5", "additional_special_tokens": SENTINELS}),
    (whole_albert, {"model_type": "albert"}),
    (whole_albert, {"model_type": "albert", "do_lower_case": False, "keep_accents": True}),
    (whole_albert, {"model_type": "albert", "add_prefix_space": False}),
    (whole_albert, {"model_type": "deberta-v2", "do_lower_case": True}),
    (whole_albert, {"model_type": "deberta-v2", "split_by_punct": True, "add_prefix_space": False}),
    (whole_albert, {"model_type": "deberta-v2", "unk_token": "<unk>"}),
    (whole_fairseq, {"model_type": "xlm-roberta"}),
    (whole_fairseq, {"model_type": "xlm-roberta", "add_prefix_space": False}),
    (whole_fairseq, {"model_type": "camembert"}),
    (whole_fairseq, {"model_type": "mbart"}),
    (whole_fairseq, {"model_type": "mbart", "src_lang": "de_DE", "tokenizer_class": "MBartTokenizer"}),
    (whole_fairseq, {"model_type": "mbart", "tokenizer_class": "MBart50TokenizerFast"}),
    (whole_fairseq, {"model_type": "xglm"}),
    (whole_pegasus, {"model_type": "pegasus", "offset": 4}),
]


def spm_of_t5(folder: Path) -> None:
    special: list[Piece] = [("<pad>", 0.0, "control"), ("</s>", 0.0, "control"), ("<unk>", 0.0, "unknown")]
    (folder / "spiece.model").write_bytes(spm([*special, *PIECES[3:]], "unigram", RULES, unk_id=2))


def spm_of_fairseq(folder: Path) -> None:
    sentence_pieces(folder, "sentencepiece.bpe.model", "unigram")


def spm_of_nllb(folder: Path) -> None:
    sentence_pieces(folder, "sentencepiece.bpe.model", "bpe", ("eng_Latn", 0.0, "control"))


_OPT = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
_LLAMA = {"model_type": "llama", "tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
# The files that came before `tokenizer.json`, beyond the makers of `test_pretrained.py`.
OLDER: list[tuple[Callable[[Path], None], Options]] = [
    (byte_level, {"model_type": "opt", "tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, **_OPT}),
    (
        byte_level,
        {
            **{"model_type": "roberta", "tokenizer_class": "RobertaTokenizer"},
            "mask_token": {"__type": "AddedToken", "content": "<mask>", "lstrip": True, "normalized": False},
        },
    ),
    (
        byte_level,
        {
            **{"model_type": "qwen2", "tokenizer_class": "Qwen2Tokenizer", "bos_token": None},
            "added_tokens_decoder": {
                "420": {"content": "<|im_start|>", "special": True, "normalized": False}
            },
            "additional_special_tokens": ["<|im_start|>"],
        },
    ),
    (word_pieces, {"model_type": "bert", "do_lower_case": False, "strip_accents": False}),
    (pieces_of_llama, {**_LLAMA, "add_eos_token": True, "legacy": True}),
    (pieces_of_llama, {**_LLAMA, "bos_token": None}),
    (spm_of_t5, {"model_type": "t5", "tokenizer_class": "T5Tokenizer", "extra_ids": 0}),
    (word_pieces, {"model_type": "electra", "tokenizer_class": "ElectraTokenizer"}),
    (spm_of_t5, {"model_type": "t5", "extra_ids": 10, "additional_special_tokens": SENTINELS}),
    (spm_of_t5, {"model_type": "pegasus", "offset": 5}),
    (spm_of_nllb, {"model_type": "m2m_100", "tokenizer_class": "NllbTokenizer"}),
]


def name_of(value: object) -> str:
    if isinstance(value, dict):
        return "-".join(str(part)[:30] for key, part in value.items() if key != "added_tokens_decoder")
    return getattr(value, "__name__", "")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "options"), [*WHOLE, *OLDER], ids=name_of)
def test_a_class_gives_the_ids_and_texts_of_transformers(
    make: Callable[[Path], None], options: Options, tmp_path: Path
) -> None:
    make(tmp_path)
    configure(tmp_path, **options)
    assert_as_transformers(tmp_path)


def test_every_type_and_class_that_transformers_knows_is_followed_or_refused() -> None:
    from transformers.models.auto import tokenization_auto as auto

    from triptych.core.checkpoints.family import families
    from triptych.running.text import tokenizer_classes as ours

    ours_of, theirs_of = ours._CLASS_OF_TYPE, auto.TOKENIZER_MAPPING_NAMES
    types = {name for family in families() for name in family.model_types}
    assert {name: ours_of.get(name) for name in types} == {name: theirs_of.get(name) for name in types}
    mistaken = auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    assert mistaken & ours_of.keys() == ours._MISTAKEN_TYPES
    own = {name for name in theirs_of.values() if name and name.endswith("Tokenizer")}
    for name in own:
        made = auto.tokenizer_class_from_name(name)
        if made is not None and "__init__" in made.__dict__:
            short = name.removesuffix("Tokenizer")
            assert name in ours.CLASSES or short in ours._ALIASES or short in ours._OTHERS.split(), name


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (whole_words, {"model_type": "esm"}, "its class is EsmTokenizer, whose code in transformers"),
        (whole_words, {"model_type": "gpt2"}, "goes with a vocabulary of pairs, and it has one of words"),
        (byte_level, {"model_type": "granite"}, "granite, which is known by its tokenizer.json alone"),
        (spm_of_t5, {"model_type": "t5", "extra_ids": "ten"}, "extra_ids is 'ten'"),
        (whole_pegasus, {"model_type": "pegasus", "offset": 10**9}, "offset is 1000000000"),
        (
            word_pieces,
            {"model_type": "gpt2"},
            "GPT2Tokenizer has a vocabulary of pairs, and it is one of words",
        ),
        (spm_of_fairseq, {"model_type": "xglm"}, "XGLMTokenizer does not read it; fetch tokenizer.json"),
    ],
    ids=name_of,
)
def test_a_class_that_is_not_followed_is_refused_by_name(
    make: Callable[[Path], None], options: Options, said: str, tmp_path: Path
) -> None:
    make(tmp_path)
    configure(tmp_path, **options)
    with pytest.raises(DataError, match=said) as refused:
        load_tokenizer(tmp_path)
    assert "\n" not in str(refused.value)


def test_tokens_of_a_class_that_the_embedding_has_no_rows_for_are_left_out(tmp_path: Path) -> None:
    whole_fairseq(tmp_path)
    configure(tmp_path, model_type="mbart")
    rows = len(json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"])
    assert load_tokenizer(tmp_path).vocab_size > rows
    assert load_tokenizer(tmp_path, vocab_size=rows).vocab_size == rows
