"""Losses of a model on windows of texts, for predicted tokens or for classes of whole texts.

A batch of windows computes its loss from hidden states, so that a model with an ablated head can supply them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from triptych.core.algebra.forms import at_least_float32
from triptych.core.models import (
    AttentionSite,
    EncoderDecoder,
    LanguageModel,
    require_finite_values,
)
from triptych.errors import UsageError
from triptych.running.batching import batches_of_like_length, padded_alike
from triptych.running.measuring.windows import DocumentWindow, Windows
from triptych.running.opening.layer_calls import TextIds
from triptych.running.opening.reader import Reader
from triptych.running.text.masking import MaskingSpec
from triptych.running.text.tokenizers import Tokenizer
from triptych.running.token_nats import nats_of


@dataclass(frozen=True, eq=False)
class WindowBatch(ABC):
    """A batch of windows."""

    units: Int[Tensor, " rows"]  # unit of each window
    texts: list[TextIds]  # model inputs; some tokens of encoders are masked
    # True = source token, False = padding; None for models of one stack
    src_tokens: Bool[Tensor, "rows src_len"] | None
    tokens: Bool[Tensor, "rows length"]  # True = token of `texts`, False = padding

    def tokens_of(self, site: AttentionSite) -> Bool[Tensor, "rows length"]:
        """Return a mask over the layer's queries: True = token, False = padding."""
        return (
            self.src_tokens
            if site.stack == "encoder" and self.src_tokens is not None
            else self.tokens
        )

    @property
    @abstractmethod
    def counts(self) -> Int[Tensor, " rows"]:
        """The number of predictions of each row."""

    @abstractmethod
    def losses(
        self, reader: Reader, hidden: Float[Tensor, "all length d_model"]
    ) -> Float[Tensor, "times rows"]:
        """Sum the losses of each row in nats; `hidden` may repeat the rows of the batch."""


@final
@dataclass(frozen=True, eq=False)
class TokenBatch(WindowBatch):
    """A batch of windows with predicted tokens."""

    targets: Int[Tensor, "rows length"]  # target token at each position
    predicts: Bool[Tensor, "rows length"]  # True = the target counts

    @property
    def counts(self) -> Int[Tensor, " rows"]:
        return self.predicts.sum(dim=1)

    def losses(
        self, reader: Reader, hidden: Float[Tensor, "all length d_model"]
    ) -> Float[Tensor, "times rows"]:
        model = reader.model
        assert model.head is not None, "`require_loss` asks for it"
        times = hidden.shape[0] // self.predicts.shape[0]
        counted = self.predicts.repeat(times, 1)
        wanted = self.targets.repeat(times, 1)[counted]
        rows = counted.nonzero()[:, 0]
        check = partial(require_finite_values, model)
        losses = nats_of(wanted, hidden[counted], model.head, check)
        sums = torch.zeros(counted.shape[0], dtype=torch.float64, device=hidden.device)
        return sums.index_add_(0, rows, losses.double()).view(times, -1)


@final
@dataclass(frozen=True, eq=False)
class ClassBatch(WindowBatch):
    """A batch of whole texts with their classes."""

    labels: Int[Tensor, " rows"]  # number of the right class of each text

    @property
    def counts(self) -> Int[Tensor, " rows"]:
        return torch.ones_like(self.labels)

    def losses(
        self, reader: Reader, hidden: Float[Tensor, "all length d_model"]
    ) -> Float[Tensor, "times rows"]:
        # The head reads each text without padding.
        times = hidden.shape[0] // len(self.texts)
        repeated = self.texts * times
        logits = torch.stack(
            [
                reader.text_logits(own[: len(text.ids)], text.ids)
                for own, text in zip(hidden, repeated, strict=True)
            ]
        )
        losses = nn.functional.cross_entropy(
            at_least_float32(logits), self.labels.repeat(times), reduction="none"
        )
        return losses.double().view(times, -1)


def require_loss(reader: Reader, what: str) -> None:
    """Check that the model predicts next tokens or masked tokens; `what` names the use of the loss."""
    model = reader.model
    head = reader.last_stack.head
    if head is None or head.config.outputs not in (None, reader.last_stack.vocab_size):
        raise UsageError(
            f"{reader.name} has no head that predicts tokens, and so no loss: {what} needs one"
        )
    if (
        isinstance(model, LanguageModel)
        and not model.causal
        and reader.tokenizer.mask_id is None
    ):
        raise UsageError(
            f"the tokenizer of {reader.name} has no mask token: without it an encoder has no loss, and "
            f"{what} needs one"
        )


def require_classes(reader: Reader) -> None:
    """Check that the model gives each text one class of several."""
    if reader.why_no_classes:
        raise UsageError(
            f"{reader.name} {reader.why_no_classes}: labelled texts are for models that give a text one "
            "class of several (SequenceClassification)"
        )


def batches_of(
    reader: Reader, windows: Windows, most_tokens: int
) -> Iterator[WindowBatch]:
    """Yield batches of windows of similar length, with at most `most_tokens` tokens."""
    # Texts past the limit of rotary positions share a batch with texts of the same length only.
    units = torch.tensor(windows.unit_of)
    whole = windows.windows
    lengths = [[0] * window.num_tokens for window in whole]
    limit = (
        reader.model.rotary_limit if isinstance(reader.model, LanguageModel) else None
    )
    for like in batches_of_like_length(lengths, max(1, most_tokens)):
        for part in padded_alike(like, [len(own) for own in lengths], limit):
            numbered = [(i, whole[i]) for i in part]
            if windows.are_labelled:
                yield _class_batch(reader, [whole[i] for i in part], units[part])
            else:
                yield _token_batch(reader, numbered, units[part])


def _class_batch(
    reader: Reader, windows: Sequence[DocumentWindow], units: Tensor
) -> ClassBatch:
    texts = [window.text for window in windows]
    labels = torch.tensor([window.label for window in windows], device=reader.device)
    return ClassBatch(
        units,
        texts,
        _source_tokens(reader, texts),
        _tokens(reader, texts),
        labels,
    )


def _token_batch(
    reader: Reader, windows: Sequence[tuple[int, DocumentWindow]], units: Tensor
) -> TokenBatch:
    model = reader.model
    texts = [window.text for _, window in windows]
    targets = [list(text.ids) for text in texts]
    # Causal models predict the next token, encoders the masked tokens, encoder-decoders the target.
    src = _source_tokens(reader, texts)
    predicts = None
    if isinstance(model, LanguageModel) and model.causal:
        texts = [TextIds(text.ids[:-1]) for text in texts]
        targets = [own[1:] for own in targets]
    elif isinstance(model, LanguageModel):
        hidden = [
            _hidden(reader.tokenizer, window.text.ids, number)
            for number, window in windows
        ]
        texts = [TextIds(tuple(ids)) for ids, _ in hidden]
        predicts = _padded_rows([places for _, places in hidden], reader.device).bool()
    tokens = _tokens(reader, texts)
    return TokenBatch(
        units,
        texts,
        src,
        tokens,
        _padded_rows(targets, reader.device),
        tokens if predicts is None else predicts,
    )


def _source_tokens(
    reader: Reader, texts: Sequence[TextIds]
) -> Bool[Tensor, "rows src_len"] | None:
    if not isinstance(reader.model, EncoderDecoder):
        return None
    rows = [[1] * len(text.source or ()) for text in texts]
    return _padded_rows(rows, reader.device).bool()


def _tokens(reader: Reader, texts: Sequence[TextIds]) -> Bool[Tensor, "rows length"]:
    return _padded_rows([[1] * len(text.ids) for text in texts], reader.device).bool()


def _hidden(
    tokenizer: Tokenizer, ids: Sequence[int], number: int
) -> tuple[list[int], list[int]]:
    """Mask tokens of an encoder's window; return the ids, and 1 at every masked position.

    The share of masked tokens is the default of training. The choice depends on `number` alone.
    """
    ordinary = [
        place for place, token in enumerate(ids) if token not in tokenizer.special_ids
    ]
    order = torch.randperm(
        len(ordinary), generator=torch.Generator().manual_seed(number)
    ).tolist()
    # At least one token is masked, so that every window has a loss.
    chosen = {
        ordinary[i] for i in order[: max(1, round(MaskingSpec().share * len(ordinary)))]
    }
    assert tokenizer.mask_id is not None, "`require_loss` asks for it"
    read = [
        tokenizer.mask_id if place in chosen else token
        for place, token in enumerate(ids)
    ]
    return read, [int(place in chosen) for place in range(len(ids))]


def _padded_rows(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return nn.utils.rnn.pad_sequence(
        [torch.tensor(list(row)) for row in rows], batch_first=True
    ).to(device)
