"""Tiny models with a head of classes, and the tokenizers that their families have in `transformers`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import processors

from checkpoints.oracle import saved
from checkpoints.tiny_models import TINY
from text.test_pretrained import configure
from text.test_tokenizer_classes import whole_albert, whole_byte_level, whole_t5, whole_words

LABELS = {0: "bad", 1: "fair", 2: "good"}
# More rows than any of the tokenizers has tokens, and more positions than the texts.
_SIZES = {"vocab_size": 440, "max_position_embeddings": 80}


class Kind(NamedTuple):
    """A class before "For", with the maker of its tokenizer's files."""

    tiny: str  # name of the tiny model
    tokens: Callable[[Path], None]
    options: dict[str, Any]  # settings of the tokenizer
    settings: dict[str, Any]  # settings of the model


def _whole_template(folder: Path) -> None:
    """A tokenizer without a class: all of it is in `tokenizer.json`."""
    whole_words(folder)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [(token, inner.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=special
    )
    inner.save(str(folder / "tokenizer.json"))


_PADDED_BYTES = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
KINDS = {
    "Bert": Kind("bert", whole_words, {"tokenizer_class": "BertTokenizer"}, {}),
    "Electra": Kind("electra", whole_words, {}, {}),
    "DistilBert": Kind("distilbert", whole_words, {"tokenizer_class": "DistilBertTokenizer"}, {}),
    "MPNet": Kind("mpnet", whole_words, {"model_type": "mpnet"}, {}),
    "ModernBert": Kind("modernbert", _whole_template, {"tokenizer_class": "PreTrainedTokenizerFast"}, {}),
    "Albert": Kind("albert", whole_albert, {}, {}),
    "DebertaV2": Kind("deberta-v2", whole_albert, {"unk_token": "<unk>"}, {"type_vocab_size": 2}),
    "Roberta": Kind("roberta", whole_byte_level, {}, {**_PADDED_BYTES, "type_vocab_size": 1}),
    "Bart": Kind("bart", whole_byte_level, {"tokenizer_class": "BartTokenizer"}, _PADDED_BYTES),
    "GPT2": Kind("gpt2", whole_byte_level, {"pad_token": "<pad>"}, {"pad_token_id": None}),
    "T5": Kind("t5", whole_t5, {"extra_ids": 10}, {"eos_token_id": 1, "pad_token_id": 0}),
}


def classifier(name: str, folder: Path, task: str = "SequenceClassification", **changes: Any) -> Any:
    """A tiny model with the head of a task in float64, saved in a folder with its tokenizer."""
    import transformers  # heavy, and only needed here

    kind = KINDS[name]
    folder.mkdir(exist_ok=True)
    kind.tokens(folder)
    configure(folder, **kind.options)
    of_class = getattr(transformers, f"{name}For{task}")

    def make() -> Any:
        settings = {**TINY[kind.tiny].settings, **_SIZES, "id2label": LABELS, **kind.settings, **changes}
        config = of_class.config_class(**settings)
        config._attn_implementation = "eager"
        return config

    return saved(of_class, make, folder)
