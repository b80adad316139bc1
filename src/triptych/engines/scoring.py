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
    """Score a language model on texts; see `triptych.decoding.measure_likelihood`."""
    model, logits = opened.language_model, None
    if engine == "ctranslate2":
        require_ctranslate2()
        if model.causal:  # before it is converted
            logits = CTranslate2Generator(model, "fp32", "cpu").logits
    return measure_likelihood(model, opened.tokenizer, documents, context, stride, progress, logits)
