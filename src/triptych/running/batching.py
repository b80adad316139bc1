"""Texts in batches of like length, and a model's mode while they are run."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from torch import nn


def batches_of_like_length(
    sentences: Sequence[Sequence[int]],
    batch_tokens: int | None = None,
    batch_sentences: int | None = None,
    *,
    pads: bool = True,
) -> Iterator[list[int]]:
    """Yield batches of sentence indices in order of falling length.

    Sentences of a batch have similar lengths. If `pads` is False, they have equal lengths.
    """
    batch: list[int] = []
    for i in sorted(range(len(sentences)), key=lambda i: -len(sentences[i])):
        longest = len(sentences[batch[0]] if batch else sentences[i])
        # Sentences come in falling length, so the first sentence sets the padded length; 1 for the end.
        full = (
            batch_tokens is not None and (longest + 1) * (len(batch) + 1) > batch_tokens
        )
        other = not pads and longest != len(sentences[i])
        if batch and (full or other or len(batch) == batch_sentences):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def padded_alike(
    batch: Sequence[int], lengths: Sequence[int], limit: int | None
) -> Iterator[list[int]]:
    """Split a batch so that texts do not change each other's results.

    Texts longer than `limit` share a batch only with texts of the same length.
    """
    if limit is None or max(lengths[i] for i in batch) <= limit:
        yield [*batch]
        return
    by_length: dict[int, list[int]] = {}
    for i in batch:
        by_length.setdefault(lengths[i], []).append(i)
    yield from by_length.values()


@final
class EvaluationMode:
    """Context manager for evaluation mode; on exit, the previous mode is restored."""

    def __init__(self, model: "nn.Module") -> None:
        self.model = model
        self.was_training = model.training

    def __enter__(self) -> None:
        self.model.eval()

    def __exit__(self, *_: object) -> None:
        self.model.train(self.was_training)
