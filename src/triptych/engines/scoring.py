"""A language model scored on texts, by the library that is to run it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from triptych.decoding import Likelihood, measure_likelihood
from triptych.engines.ctranslate2 import require_ctranslate2
from triptych.engines.generating import CTranslate2Generator
from triptych.engines.loading import EngineName
from triptych.errors import UsageError
from triptych.runs import open_text_model


def evaluate_text(
    path: str | Path,
    documents: Sequence[str],
    device: str = "auto",
    *,
    context: int | None = None,
    stride: int | None = None,
    engine: EngineName = "triptych",
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Likelihood:
    """Score a language model on texts; see `triptych.decoding.measure_likelihood`.

    Args:
        path: a run folder, a folder in Hugging Face's format, or a name on the Hub.
        documents: texts, each scored by itself.
        device: where the model goes; "auto" takes a GPU if there is one. "ctranslate2" scores on the CPU.
        context: tokens of a window.
        stride: tokens by which a window begins after the one before.
        engine: "triptych", or "ctranslate2" for models of GPT-2's or Llama's structure, in float32.
        dtype: of the model's numbers; the one that most of the file's have if None.
        progress: told how many documents of how many are done.

    Raises:
        UsageError: no such device, an encoder, a context or stride that is not possible, a model that does
            not fit the engine, or a missing library.
        DataError: files missing or damaged, a family that cannot be run, or nothing to predict.
    """
    if engine == "triptych":
        model, tokenizer, _ = open_text_model(path, device, dtype)
        return measure_likelihood(model, tokenizer, documents, context, stride, progress)
    require_ctranslate2()
    if device not in ("auto", "cpu"):
        raise UsageError(f"--engine ctranslate2 scores texts on the CPU: leave out --device {device}")
    if dtype is not None:
        raise UsageError("--engine ctranslate2 scores texts in float32: leave out --dtype")
    model, tokenizer, _ = open_text_model(path, "cpu")
    if not model.causal:  # before it is converted
        return measure_likelihood(model, tokenizer, documents, context, stride, progress)
    logits = CTranslate2Generator(model, "fp32", "cpu").logits
    return measure_likelihood(model, tokenizer, documents, context, stride, progress, logits)
