"""A model ready to translate, by the library that is to run it."""

from pathlib import Path
from typing import Literal

from triptych.decoding import Precision, Stop, Translator
from triptych.engines.ctranslate2 import require_ctranslate2
from triptych.engines.translating import CTranslate2Searcher
from triptych.runs import Run

EngineName = Literal["triptych", "ctranslate2"]


def load(
    folder: str | Path,
    device: str = "auto",
    *,
    beam_size: int | None = None,
    alpha: float | None = None,
    num_best: int = 1,
    max_extra_tokens: int | None = None,
    stop: Stop | None = None,
    precision: Precision = "fp32",
    workers: int = 1,
    engine: EngineName = "triptych",
) -> Translator:
    """The translator of a run folder: `load("runs/demo").translate(["Guten Tag."])`.

    Args:
        folder: of a run, of a converted model, or of a Marian checkpoint.
        device: where the model goes; "auto" takes a GPU if there is one.
        beam_size: hypotheses kept; the recipe's or the checkpoint's if None, and likewise below.
        alpha: exponent of the length penalty.
        num_best: translations of each line.
        max_extra_tokens: an output ends at the length of its input plus this.
        stop: when a sentence is done, as in `SearchOptions`. "ctranslate2" has "full" alone, whatever the
            recipe says.
        precision: of the model's maps, as in `Translator`; "ctranslate2" rounds in its own way.
        workers: processes that translate side by side on a CPU, as in `Translator`.
        engine: "triptych", or "ctranslate2" for models that `convert` can write for it. The model is
            converted when it is first used, and kept in `~/.cache/triptych`.

    Raises:
        UsageError: no such folder or device, options that do not go together or that the engine does not
            have, a model that does not fit, or a missing library.
        DataError: files missing or damaged.
    """
    if engine == "triptych":
        run = Run.open(Path(folder), device)
        options = run.search_options(beam_size, alpha, num_best, max_extra_tokens, stop)
        return run.translator(options, precision=precision, workers=workers)
    require_ctranslate2()
    run = Run.open(Path(folder), "cpu")
    options = run.search_options(beam_size, alpha, num_best, max_extra_tokens, stop or "full")
    searcher = CTranslate2Searcher(run, options, precision, workers, device)
    return Translator(run.model, run.tokenizers, options, searcher=searcher)
