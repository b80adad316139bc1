"""What translates or continues text with an opened model, by the library that is to run it."""

from typing import Literal

from triptych.decoding import Precision, SearchOptions, TextGenerator, Translator
from triptych.decoding.text_generator import check_vocabulary
from triptych.engines.ctranslate2 import require_ctranslate2
from triptych.engines.generating import CTranslate2Generator
from triptych.engines.translating import CTranslate2Searcher
from triptych.opening import OpenedModel

EngineName = Literal["triptych", "ctranslate2"]


def make_translator(
    opened: OpenedModel,
    options: SearchOptions,
    *,
    engine: EngineName = "triptych",
    precision: Precision = "fp32",
    workers: int = 1,
    device: str = "auto",
) -> Translator:
    """A translator."""
    if engine == "triptych":
        return opened.translator(options, precision=precision, workers=workers)
    require_ctranslate2()
    opened.require_recipe()
    searcher = CTranslate2Searcher(opened, options, precision, workers, device)
    return Translator(opened.encoder_decoder, opened.tokenizers, options, searcher=searcher)


def make_generator(
    opened: OpenedModel,
    *,
    engine: EngineName = "triptych",
    precision: Precision = "fp32",
    device: str = "auto",
) -> TextGenerator:
    """What continues texts; arguments and errors as those of `make_translator`."""
    if engine == "triptych":
        return opened.generator(precision=precision)
    require_ctranslate2()
    model, tokenizer = opened.language_model, opened.tokenizer
    check_vocabulary(model, tokenizer)
    other = CTranslate2Generator(model, precision, device, tokenizer.vocab_size)
    return TextGenerator(model, tokenizer, precision=precision, end_ids=opened.end_ids, other=other)
