"""The tokenizer classes of `transformers` 5: normalization, splitting, and special tokens around text.

A class uses the vocabulary and the merges of `tokenizer.json`, and builds everything else from the settings
in `tokenizer_config.json`, as in `transformers`. Only checkpoints without such a class use all of
`tokenizer.json`.
"""

from functools import partial

from tokenizers import normalizers

from triptych.running.text import tokenizer_parts as parts
from triptych.running.text.tokenizer_making import TokenizerClass
from triptych.running.text.tokenizer_settings import TokenizerSettings

_WHOLE = "TokenizersBackend"  # all of `tokenizer.json` is used

_END_OF_TEXT = "<|endoftext|>"
_GPT2 = {
    "bos_token": _END_OF_TEXT,
    "eos_token": _END_OF_TEXT,
    "unk_token": _END_OF_TEXT,
}
_BERT = {
    **{
        "unk_token": "[UNK]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
    },
    "mask_token": "[MASK]",
}
_DEBERTA = {**_BERT, "bos_token": "[CLS]", "eos_token": "[SEP]"}
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_XGLM = {**_LLAMA, "sep_token": "</s>", "cls_token": "<s>", "pad_token": "<pad>"}
_ROBERTA = {**_XGLM, "mask_token": "<mask>"}
_COHERE = {
    **{
        "unk_token": "<UNK>",
        "bos_token": "<BOS_TOKEN>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
    },
    **{
        "pad_token": "<PAD>",
        "cls_token": "<CLS>",
        "sep_token": "<SEP>",
        "mask_token": "<MASK_TOKEN>",
    },
}
# Source: the regular expression of Qwen2's published tokenizer.json.
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_IN_BRACKETS = parts.around("cls_token", "$A", "sep_token")
_IN_SENTENCE = parts.around("bos_token", "$A", "eos_token")
# Continuations of templates for the second text of a pair.
_OF_TYPE_1 = parts.around("$B:1", "sep_token:1")
_BETWEEN_SEPARATORS = parts.around("sep_token", "$B", "sep_token")
_NEXT_SENTENCE = parts.around("eos_token", "$B", "eos_token")
_SPACE_BEFORE_MASK = {"mask_token": {"lstrip": True}}

CLASSES: dict[str, TokenizerClass] = {
    "GPT2Tokenizer": TokenizerClass("pairs", parts.byte_pairs, _GPT2),
    "CodeGenTokenizer": TokenizerClass("pairs", parts.byte_pairs, _GPT2),
    "GPTNeoXTokenizer": TokenizerClass(
        "pairs",
        partial(parts.byte_pairs, normalizer=normalizers.NFC()),
        {**_GPT2, "pad_token": "<|padding|>"},
    ),
    "Qwen2Tokenizer": TokenizerClass(
        "pairs",
        partial(
            parts.byte_pairs,
            cut=partial(parts.cut_words, pattern=_QWEN2_WORDS),
            normalizer=normalizers.NFC(),
        ),
        {
            "eos_token": _END_OF_TEXT,
            "pad_token": _END_OF_TEXT,
            "unk_token": _END_OF_TEXT,
        },
        resets_flags=True,
    ),
    "CohereTokenizer": TokenizerClass(
        "pairs",
        partial(parts.byte_pairs, cut=parts.cut_digits, normalizer=normalizers.NFC()),
        _COHERE,
    ),
    "RobertaTokenizer": TokenizerClass(
        *("pairs", parts.byte_pairs, _ROBERTA, _IN_BRACKETS),
        second=_BETWEEN_SEPARATORS,
    ),
    "DebertaTokenizer": TokenizerClass(
        *("pairs", parts.byte_pairs, _DEBERTA, _IN_BRACKETS),
        second=_BETWEEN_SEPARATORS,
    ),
    "BlenderbotTokenizer": TokenizerClass(
        "pairs",
        partial(parts.byte_pairs, space=True),
        _ROBERTA,
        flags={"mask_token": {"lstrip": True, "normalized": False}},
    ),
    "OpenAIGPTTokenizer": TokenizerClass(
        "pairs", parts.openai_gpt, {"unk_token": "<unk>"}
    ),
    "BertTokenizer": TokenizerClass(
        *("words", parts.word_pieces, _BERT, _IN_BRACKETS), second=_OF_TYPE_1
    ),
    "MPNetTokenizer": TokenizerClass(
        *("words", parts.word_pieces, {**_ROBERTA, "unk_token": "[UNK]"}, _IN_BRACKETS),
        second=_BETWEEN_SEPARATORS,
        flags=_SPACE_BEFORE_MASK,
    ),
    "LlamaTokenizer": TokenizerClass("pairs", parts.llama, _LLAMA),
    "CodeLlamaTokenizer": TokenizerClass(
        *(
            "pairs",
            partial(parts.llama, is_code=True),
            _LLAMA,
            parts.around("bos_token", "$A"),
        ),
        keeps_surrounding=True,
        extra=lambda settings: ["▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>", "<FILL_ME>"],
    ),
    "GemmaTokenizer": TokenizerClass(
        *("pairs", parts.gemma),
        {
            **_LLAMA,
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
    ),
    "NllbTokenizer": TokenizerClass(
        *("pairs", parts.nllb, _ROBERTA, parts.nllb_around),
        flags={"mask_token": {"lstrip": True, "normalized": True}},
        extra=parts.nllb_extra,
    ),
    "T5Tokenizer": TokenizerClass(
        *(
            "unigrams",
            parts.t5,
            {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        ),
        parts.around("$A", "eos_token"),
        second=parts.around("$B", "eos_token"),
        extra=parts.t5_extra,
    ),
    "AlbertTokenizer": TokenizerClass(
        *(
            "unigrams",
            parts.albert,
            {**_DEBERTA, "unk_token": "<unk>", "pad_token": "<pad>"},
            _IN_BRACKETS,
        ),
        second=_OF_TYPE_1,
        keeps_surrounding=True,
    ),
    "DebertaV2Tokenizer": TokenizerClass(
        *("unigrams", parts.deberta_v2, _DEBERTA, _IN_BRACKETS), second=_OF_TYPE_1
    ),
    "XLMRobertaTokenizer": TokenizerClass(
        *("unigrams", parts.xlm_roberta, _ROBERTA, _IN_SENTENCE), second=_NEXT_SENTENCE
    ),
    "CamembertTokenizer": TokenizerClass(
        *("unigrams", parts.camembert, _ROBERTA, _IN_SENTENCE),
        second=_NEXT_SENTENCE,
        flags=_SPACE_BEFORE_MASK,
        extra=lambda settings: ["<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED"],
    ),
    "MBartTokenizer": TokenizerClass(
        *("unigrams", parts.mbart, _ROBERTA),
        lambda making: [
            "$A",
            making.token("eos_token"),
            parts.language(making, "en_XX"),
        ],
        flags=_SPACE_BEFORE_MASK,
        extra=lambda settings: parts.MBART_LANGUAGES,
    ),
    "MBart50Tokenizer": TokenizerClass(
        *(
            "unigrams",
            parts.mbart50,
            {name: token for name, token in _ROBERTA.items() if name != "bos_token"},
        ),
        lambda making: [
            parts.language(making, "en_XX"),
            "$A",
            making.token("eos_token"),
        ],
        flags=_SPACE_BEFORE_MASK,
        extra=lambda settings: parts.MBART50_LANGUAGES,
    ),
    "PegasusTokenizer": TokenizerClass(
        "unigrams",
        parts.pegasus,
        {
            "pad_token": "<pad>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "mask_token": "<mask_2>",
        },
        parts.around("$A", "eos_token"),
        extra=parts.pegasus_extra,
    ),
    "XGLMTokenizer": TokenizerClass(
        *("unigrams", parts.xglm, _XGLM, parts.around("eos_token", "$A")),
        second=parts.around("eos_token", "eos_token", "$B"),
        extra=lambda settings: [f"<madeupword{i}>" for i in range(7)],
    ),
}
# Classes equal to another class.
_ALIASES = {
    **dict.fromkeys(("Bart", "LED", "Longformer", "Mvp"), "Roberta"),
    **dict.fromkeys(
        ("DistilBert", "Electra", "LayoutLM", "Lxmert", "MobileBert", "SqueezeBert"),
        "Bert",
    ),
    "Phi3": "Llama",
}
# Classes with token types: 1 for the second text of a pair.
_WITH_TYPES = {
    *("Bert", "Deberta", "DebertaV2", "Electra", "LayoutLM", "Lxmert", "MobileBert"),
    "SqueezeBert",
}
# Unsupported classes: their code in `transformers` is not reproduced here.
_OTHERS = """
Barthez Bartpho BertGeneration BertJapanese Bertweet BigBird BioGpt BlenderbotSmall ByT5 CLIP CTRL Canine
Clvp Cpm CpmAnt DPRContextEncoder DPRQuestionEncoder DPRReader Dia Esm Esmc FSMT FastSpeech2Conformer
Flaubert Funnel GPTNeoXJapanese GPTSw3 Herbert Lasr LayoutLMv2 LayoutLMv3 LayoutXLM Luke M2M100 MLuke
Marian MarkupLM Mgpstr MyT5 Nougat PLBart Perceiver Phobert ProphetNet Rag Qwen3_5 Reformer RemBert RoCBert
RoFormer SeamlessM4T Siglip Siglip2 Speech2Text SpeechT5 Splinter Tapas Tipsv2 Udop VideoPrism Vits
Wav2Vec2CTC Wav2Vec2PhonemeCTC Whisper XLM XLNet
"""
_CLASS_OF_TYPE = {
    **dict.fromkeys(
        (
            "codegen",
            "gpt2",
            "gpt_neo",
            "gptj",
            "opt",
            "phi",
            "starcoder2",
            "jais2",
            "dbrx",
        ),
        "GPT2Tokenizer",
    ),
    **dict.fromkeys(("gpt_neox", "mpt", "olmo", "olmoe"), "GPTNeoXTokenizer"),
    **dict.fromkeys(
        ("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), "GPTNeoXTokenizer"
    ),
    **dict.fromkeys(
        ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer"
    ),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "Qwen2Tokenizer"),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        "Qwen3_5Tokenizer",
    ),
    **dict.fromkeys(
        ("bart", "longformer", "roberta", "roberta-prelayernorm", "data2vec-text"),
        "RobertaTokenizer",
    ),
    **dict.fromkeys(
        ("bert", "distilbert", "electra", "ernie", "megatron-bert", "nomic_bert"),
        "BertTokenizer",
    ),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("gemma3n", "gemma3n_text", "t5gemma"), "GemmaTokenizer"),
    **dict.fromkeys(("cohere", "cohere2"), "CohereTokenizer"),
    **dict.fromkeys(("mt5", "t5"), "T5Tokenizer"),
    **{
        "albert": "AlbertTokenizer",
        "biogpt": "BioGptTokenizer",
        "blenderbot": "BlenderbotTokenizer",
    },
    **{
        "blenderbot-small": "BlenderbotSmallTokenizer",
        "camembert": "CamembertTokenizer",
    },
    **{
        "clip": "CLIPTokenizer",
        "deberta": "DebertaTokenizer",
        "deberta-v2": "DebertaV2Tokenizer",
    },
    **{"esm": "EsmTokenizer", "led": "LEDTokenizer", "m2m_100": "M2M100Tokenizer"},
    **{
        "marian": "MarianTokenizer",
        "mbart": "MBartTokenizer",
        "mobilebert": "MobileBertTokenizer",
    },
    **{
        "mpnet": "MPNetTokenizer",
        "openai-gpt": "OpenAIGPTTokenizer",
        "pegasus": "PegasusTokenizer",
    },
    **{
        "perceiver": "PerceiverTokenizer",
        "roformer": "RoFormerTokenizer",
        "siglip": "SiglipTokenizer",
    },
    **{
        "siglip2": "Siglip2Tokenizer",
        "whisper": "WhisperTokenizer",
        "xglm": "XGLMTokenizer",
    },
    **dict.fromkeys(
        ("gte", "jina_embeddings_v3", "xlm-roberta"), "XLMRobertaTokenizer"
    ),
    **{"mvp": "MvpTokenizer", "plbart": "PLBartTokenizer", "xlnet": "XLNetTokenizer"},
    **dict.fromkeys(("hubert", "wav2vec2"), "Wav2Vec2CTCTokenizer"),
    **dict.fromkeys(
        ("ernie4_5", "glm", "glm4", "glm4_moe", "gpt_bigcode", "granite", "internlm2"),
        _WHOLE,
    ),
    **dict.fromkeys(
        ("granitemoe", "granitemoehybrid", "granitemoeshared", "jamba"), _WHOLE
    ),
    **dict.fromkeys(
        ("ministral", "ministral3", "mistral", "mistral3", "mixtral", "modernbert"),
        _WHOLE,
    ),
    **dict.fromkeys(
        ("nemotron", "olmo2", "olmo3", "phi3", "phimoe", "stablelm", "umt5"), _WHOLE
    ),
    **dict.fromkeys(
        ("ernie4_5_moe", "flex_olmo", "glm4_moe_lite", "hyperclovax", "kimi_linear"),
        _WHOLE,
    ),
    **dict.fromkeys(
        ("minicpm3", "minimax_m2", "modernbert-decoder", "olmo_hybrid", "persimmon"),
        _WHOLE,
    ),
    **dict.fromkeys(("internlm3", "iquestcoder", "xlm-roberta-xl", "smolvlm"), _WHOLE),
    "ctrl": "CTRLTokenizer",
    "fsmt": "FSMTTokenizer",
    "rembert": "RemBertTokenizer",
}
# Model types with a wrong class name in their published files.
_MISTAKEN_TYPES = {
    *(
        "ernie4_5",
        "internlm2",
        "jamba",
        "modernbert",
        "nemotron",
        "phi3",
        "phimoe",
        "qwen2",
    ),
    *(
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "siglip2",
        "ernie4_5_moe",
        "hyperclovax",
    ),
    *("internlm3", "iquestcoder", "minicpm3", "minimax_m2", "modernbert-decoder"),
    "smolvlm",
}


def class_of(settings: TokenizerSettings, *, is_byte_level: bool) -> str | None:
    """Return the key in `CLASSES` of `AutoTokenizer`'s choice; None to use all of `tokenizer.json`."""
    own = _chosen(settings, is_byte_level=is_byte_level)
    if own in _OTHERS.split():
        raise ValueError(
            f"its class is {own}Tokenizer, whose code in transformers is not followed here"
        )
    key = f"{_ALIASES.get(own, own)}Tokenizer"
    return key if key in CLASSES else None


def gives_types(settings: TokenizerSettings, *, is_byte_level: bool) -> bool:
    """Return True if `AutoTokenizer`'s choice gives token types to a model."""
    stated = settings.record.get("model_input_names")
    if isinstance(stated, list):
        return "token_type_ids" in stated
    return _chosen(settings, is_byte_level=is_byte_level) in _WITH_TYPES


def _chosen(settings: TokenizerSettings, *, is_byte_level: bool) -> str:
    """Return the name of `AutoTokenizer`'s choice, without "Tokenizer"."""
    # The class of the model type overrides the stated class if it is `_WHOLE` or the type is a mistaken type.
    stated = settings.tokenizer_class
    of_type = _CLASS_OF_TYPE.get(settings.model_type or "")
    mistaken = settings.model_type in _MISTAKEN_TYPES
    if stated is None:
        name = of_type or _WHOLE
    elif stated == "LlamaTokenizer" and is_byte_level and not mistaken:
        name = _WHOLE
    else:
        name = (
            of_type
            if of_type is not None and (of_type == _WHOLE or mistaken)
            else stated
        )
    return name.removesuffix("Tokenizer")
