"""A model ready to translate or to continue text, by the library that is to run it."""

from pathlib import Path
from typing import Literal

import torch

from triptych.checkpoints.translators import Languages
from triptych.decoding import Precision, Stop, TextGenerator, Translator
from triptych.decoding.text_generator import check_vocabulary
from triptych.engines.ctranslate2 import require_ctranslate2
from triptych.engines.generating import CTranslate2Generator
from triptych.engines.translating import CTranslate2Searcher
from triptych.errors import UsageError
from triptych.runs import Run, open_text_model

EngineName = Literal["triptych", "ctranslate2"]


def load(
    folder: str | Path,
    device: str = "auto",
    *,
    beam_size: int | None = None,
    alpha: float | None = None,
    num_best: int = 1,
    max_extra_tokens: int | None = None,
    max_source_tokens: int | None = None,
    stop: Stop | None = None,
    precision: Precision = "fp32",
    workers: int = 1,
    engine: EngineName = "triptych",
    languages: tuple[str, str] | None = None,
) -> Translator:
    """The translator of a run folder: `load("runs/demo").translate(["Guten Tag."])`.

    Args:
        folder: of a run, of a converted model, or of an encoder-decoder in Hugging Face's format.
        device: where the model goes; "auto" takes a GPU if there is one.
        beam_size: hypotheses kept; the recipe's or the checkpoint's if None, and likewise below.
        alpha: exponent of the length penalty.
        num_best: translations of each line.
        max_extra_tokens: an output ends at the length of its input plus this.
        max_source_tokens: a longer line is translated in pieces; the model's limit, or 1,024 where it has
            none, if None.
        stop: when a sentence is done, as in `SearchOptions`. "ctranslate2" has "full" alone, whatever the
            recipe says.
        precision: of the model's maps, as in `Translator`; "ctranslate2" rounds in its own way.
        workers: processes that translate side by side on a CPU, as in `Translator`.
        engine: "triptych", or "ctranslate2" for models that `convert` can write for it. The model is
            converted when it is first used, and kept in `~/.cache/triptych`.
        languages: of the text and of its translation, for checkpoints of several languages, as their
            tokenizer writes them: `("de_DE", "en_XX")`.

    Raises:
        UsageError: no such folder or device, options that do not go together or that the engine does not
            have, a model that does not fit, or a missing library.
        DataError: files missing or damaged.
    """
    chosen = None if languages is None else Languages(*languages)
    if engine == "triptych":
        run = Run.open(Path(folder), device, chosen)
        options = run.search_options(beam_size, alpha, num_best, max_extra_tokens, stop, max_source_tokens)
        return run.translator(options, precision=precision, workers=workers)
    require_ctranslate2()
    run = Run.open(Path(folder), "cpu", chosen)
    run.require_recipe()
    options = run.search_options(
        beam_size, alpha, num_best, max_extra_tokens, stop or "full", max_source_tokens
    )
    searcher = CTranslate2Searcher(run, options, precision, workers, device)
    return Translator(run.model, run.tokenizers, options, searcher=searcher)


def load_generator(
    path: str | Path,
    device: str = "auto",
    *,
    precision: Precision = "fp32",
    engine: EngineName = "triptych",
    dtype: torch.dtype | None = None,
) -> TextGenerator:
    """A model that continues text: `load_generator("gpt2").generate(["Once upon"], GenerationOptions())`.

    Args:
        path: a run folder, a folder in Hugging Face's format, or a name on the Hub.
        device: where the model goes; "auto" takes a GPU if there is one.
        precision: of the model's maps, as in `TextGenerator`; "ctranslate2" rounds in its own way.
        engine: "triptych", or "ctranslate2" for models of GPT-2's or Llama's structure, greedy or by beam.
            The model is converted when it is first used, and kept in `~/.cache/triptych`.
        dtype: of the model's numbers, with "triptych"; the one that most of the file's have if None.

    Raises:
        UsageError: no such device, an encoder, a precision that the device cannot have, a model that does not
            fit the engine, or a missing library.
        DataError: files missing or damaged, or a family that cannot be run.
    """
    if engine == "triptych":
        model, tokenizer, end_ids = open_text_model(path, device, dtype)
        return TextGenerator(model, tokenizer, precision=precision, end_ids=end_ids)
    require_ctranslate2()
    if dtype is not None:
        raise UsageError("--engine ctranslate2 rounds by --precision: leave out --dtype")
    model, tokenizer, end_ids = open_text_model(path, "cpu")
    check_vocabulary(model, tokenizer)
    other = CTranslate2Generator(model, precision, device, tokenizer.vocab_size)
    return TextGenerator(model, tokenizer, precision=precision, end_ids=end_ids, other=other)
