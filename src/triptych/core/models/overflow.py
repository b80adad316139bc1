"""Detection of NaN and infinity in the output of a model, and of the layer where they begin.

Weights are checked when a model is read. Values computed from finite weights may still overflow their dtype,
most often float16. Only the output of a model is checked; the layer is searched after a failed check.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from triptych.core.algebra.forms import are_finite
from triptych.core.models.blocks import Block
from triptych.core.models.encoder_decoder import EncoderDecoder
from triptych.core.models.language_model import LanguageModel
from triptych.errors import DataError

_IN_WORDS = {
    "self_attention": "the attention",
    "cross_attention": "the attention to the text that is read",
    "feed_forward": "the feed-forward layer",
}


class NumbersOverflowError(DataError):
    """Overflow: a model computes NaN or infinity from finite weights."""


def require_finite_values(
    model: EncoderDecoder | LanguageModel,
    values: Tensor,
    again: Callable[[], object] | None = None,
) -> None:
    """Check that computed values are finite; `again` repeats the computation to find the first layer."""
    if not are_finite(values):
        raise overflow(model, "" if again is None else _first_overflow(model, again))


def require_finite_logits(
    model: EncoderDecoder | LanguageModel,
    logits: Tensor,
    again: Callable[[], object] | None = None,
) -> None:
    """Check logits as `require_finite_values` checks values, but allow −inf for excluded tokens."""
    if not are_finite(logits) and not _are_scores(logits):
        raise overflow(model, "" if again is None else _first_overflow(model, again))


def overflow_again(
    model: EncoderDecoder | LanguageModel, again: Callable[[], object]
) -> NumbersOverflowError:
    """Make the error after a fused copy of the model overflowed; `again` computes the same with `model`."""
    return overflow(model, _first_overflow(model, again))


def overflow(
    model: EncoderDecoder | LanguageModel, part: str = ""
) -> NumbersOverflowError:
    """Make the error; `part` names the first part of the model with NaN or infinity, where it is known."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    wider = "float32 or bfloat16" if dtype == "float16" else "float64"
    by = f"{part} of the model" if part else "the model"
    return NumbersOverflowError(
        f"{by} computed numbers that are not finite (NaN or infinite) from weights that are: they overflow "
        f"{dtype}; read the model in {wider} (dtype=, --dtype)"
    )


def _are_scores(logits: Tensor) -> bool:
    """Return True if logits are free of NaN and +inf, and every row has a value above −inf."""
    rows = logits.detach().amax(dim=-1)  # a NaN in a row makes its maximum NaN
    return are_finite(rows)


def _first_overflow(
    model: EncoderDecoder | LanguageModel, again: Callable[[], object]
) -> str:
    """Find the first part of a model with NaN or infinity in its output, in words; "" if not found."""
    found = list[str]()

    def look(module: nn.Module, given: Any, result: Any, *, words: str) -> None:
        if not found and any(not are_finite(tensor) for tensor in _tensors_of(result)):
            found.append(words)

    with ExitStack() as hooks, torch.no_grad():
        for words, module in _parts(model):
            hooks.callback(
                module.register_forward_hook(partial(look, words=words)).remove
            )
        again()
    return found[0] if found else ""


def _parts(model: EncoderDecoder | LanguageModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts of a model with their names, inner parts before the containing part."""
    for name, stack in model.stacks.items():
        of = f"{name}." if len(model.stacks) > 1 else ""
        yield "the embeddings", stack.embeddings
        for number, block in enumerate(stack.blocks):
            assert isinstance(block, Block)
            for child, words in _IN_WORDS.items():
                if hasattr(block, child):
                    yield f"{words} in layer {of}{number}", getattr(block, child)
            yield f"layer {of}{number}", block
        yield "the last norm", stack.final_norm
        if stack.head is not None:
            yield "the output table", stack.head
        for task_head in (stack.task, stack.second):
            if task_head is not None:
                yield "the head", task_head


def _tensors_of(result: Any) -> Iterator[Tensor]:
    """Yield the tensors in the output of a part of a model; only `output` of an attention layer."""
    if isinstance(result, Tensor):
        if result.is_floating_point():
            yield result
    elif isinstance(output := getattr(result, "output", None), Tensor):
        yield output
    elif isinstance(result, tuple):
        for part in result:
            yield from _tensors_of(part)
