"""A language model scored on texts, by the library that is to run it."""

from collections.abc import Callable, Sequence

from triptych.decoding import Likelihood, measure_likelihood
from triptych.engines.ctranslate2 import require_ctranslate2
from triptych.engines.generating import CTranslate2Generator
from triptych.engines.loading import EngineName
from triptych.opening import OpenedModel


def evaluate_text(
    opened: OpenedModel,
    documents: Sequence[str],
    *,
    context: int | None = None,
    stride: int | None = None,
    engine: EngineName = "triptych",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Likelihood:
    """Score a language model on texts; see `triptych.decoding.measure_likelihood`.

    Args:
        opened: the model; on the CPU and in float32 for "ctranslate2".
        documents: texts, each scored by itself.
        context: tokens of a window.
        stride: tokens by which a window begins after the one before.
        engine: "triptych", or "ctranslate2" for models of GPT-2's or Llama's structure, in float32.
        progress: told how many documents of how many are done.

    Raises:
        UsageError: an encoder, a context or stride that is not possible, a model that does not fit the
            engine, or a missing library.
        DataError: nothing to predict.
    """
    model, logits = opened.language_model, None
    if engine == "ctranslate2":
        require_ctranslate2()
        if model.causal:  # before it is converted
            logits = CTranslate2Generator(model, "fp32", "cpu").logits
    return measure_likelihood(model, opened.tokenizer, documents, context, stride, progress, logits)
