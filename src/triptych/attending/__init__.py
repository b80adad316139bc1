"""Where the heads of a model look on a text, and what they do there."""

from collections.abc import Sequence
from pathlib import Path
from typing import overload

from triptych.attending.attention import (
    Attention,
    AttentionBatch,
    HeadNote,
    LayerAttention,
    Part,
    Stack,
)
from triptych.attending.capture import AttentionKind, LayerCall, record_calls
from triptych.attending.readers import LanguageReader, PairReader, Reader, open_reader, reader_of
from triptych.decoding import TextGenerator, Translator
from triptych.runs import OpenedModel, Run

__all__ = [
    "Attention",
    "AttentionBatch",
    "AttentionKind",
    "HeadNote",
    "LanguageReader",
    "LayerAttention",
    "LayerCall",
    "PairReader",
    "Part",
    "Reader",
    "Stack",
    "attend",
    "open_reader",
    "reader_of",
    "record_calls",
]

Attended = str | Path | Reader | OpenedModel | Run | Translator | TextGenerator


@overload
def attend(  # type: ignore[overload-overlap]
    model: Attended,
    text: str,
    *,
    target: str | None = None,
    max_new_tokens: int = 0,
    max_tokens: int | None = None,
    device: str = "auto",
) -> Attention: ...


@overload
def attend(
    model: Attended,
    text: Sequence[str],
    *,
    target: Sequence[str] | None = None,
    max_new_tokens: int = 0,
    max_tokens: int | None = None,
    device: str = "auto",
) -> AttentionBatch: ...


def attend(
    model: Attended,
    text: str | Sequence[str],
    *,
    target: str | Sequence[str] | None = None,
    max_new_tokens: int = 0,
    max_tokens: int | None = None,
    device: str = "auto",
) -> Attention | AttentionBatch:
    """Where every head of a model looks: `attend("gpt2", "The cat sat.").weights[3]` is layer 3.

    The model runs as it is, with its own kernels. Its output is not changed. The weights are computed
    afterwards from the inputs of its layers, by the plain formula in float32 at least, when they are asked
    for: `softmax(q kᵀ · scale + bias + mask)`, `[heads, queries, keys]`.

    Row i of a language model is what token i looked at when it was read. Row i of an encoder-decoder's
    decoder is what was looked at to produce target token i.

    Args:
        model: a run folder, a folder in Hugging Face's format, a name on the Hub, or a model that is open.
        text: one text, or several, which the model reads in padded batches.
        target: of an encoder-decoder, what its decoder reads, one for each text; its own translation if None.
        max_new_tokens: of a decoder, how many tokens it continues the text by at most, greedily.
        max_tokens: longest text, continued or not; None for as many tokens as the model has positions for, or
            8,192 where it has no limit. Time grows with the square of the length.
        device: where a model that is not open yet goes; "auto" takes a GPU if there is one.

    Returns:
        The attention on the text; for several texts a batch, whose weights have a first dimension more.

    Raises:
        UsageError: an empty text, one that is too long, or something that the model does not do.
        DataError: files missing or damaged, or a family that cannot be run.
    """
    reader = model if isinstance(model, Reader) else _opened(model, device)
    if isinstance(text, str):
        if target is not None and not isinstance(target, str):
            raise TypeError("the target of one text is one text")
        (found,) = reader.read([text], None if target is None else [target], max_new_tokens, max_tokens)
        return found
    if isinstance(target, str):
        raise TypeError("the targets of several texts are a sequence")
    return AttentionBatch(reader.read(text, target, max_new_tokens, max_tokens))


def _opened(model: str | Path | OpenedModel | Run | Translator | TextGenerator, device: str) -> Reader:
    if isinstance(model, str | Path):
        return open_reader(model, device)
    return reader_of(str(model.folder) if isinstance(model, Run) else "the model", model)
