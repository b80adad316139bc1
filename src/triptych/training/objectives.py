"""Training objectives: batches, the call of the model, the loss, and the figures of a validation.

BLEU of a model that cannot translate yet is noise: a few n-grams match by chance. BLEU or chrF decides which
validation is best from the first validation whose 95 % bootstrap interval of BLEU lies above `LEAST_BLEU`.
This validation is better than all before it. Until then the loss decides.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar, final, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64

from triptych.core.attention import PositionIds
from triptych.core.models import EncoderDecoder, LanguageModel
from triptych.training.corpora.packing import NOT_COUNTED, LanguageBatch
from triptych.training.corpora.pair_batches import Batch, TokenBatches
from triptych.training.losses import (
    Loss,
    head_loss,
    output_factors,
    output_loss,
    rdrop_loss,
    teacher_loss,
)
from triptych.training.sections import Metric, TrainingConfig, ValidationConfig

# A model with the same frequent words for every source stays below this BLEU; so does the lower end of any
# model's interval on a few sentences.
LEAST_BLEU = 5.0


class Quality(NamedTuple):
    """Quality of the translations of the validation text."""

    bleu: float  # BLEU of the whole text, 0 to 100
    bleu_low: float  # lower end of its 95 % bootstrap interval
    chrf: float  # chrF of the whole text, 0 to 100
    num_at_limit: int  # number of translations that end at the limit of their length


class Score(NamedTuple):
    """Score of a validation; higher is better, and every score of translations is above every loss."""

    by: Metric
    score: float  # BLEU or chrF, or minus the loss

    def better_than(self, other: "Score") -> bool:
        return (self.by != "loss", self.score) > (other.by != "loss", other.score)


def judge(figures: Mapping[str, float], metric: Metric) -> Score:
    """Return the score of a validation: BLEU or chrF if BLEU is above noise level, else minus the loss."""
    if metric != "loss" and figures["valid_bleu_low"] > LEAST_BLEU:
        return Score(metric, figures[f"valid_{metric}"])
    return Score("loss", -figures["valid_loss"])


@runtime_checkable
class TrainingBatch(Protocol):
    """Batch of the text, as tensors."""

    @property
    def num_target_tokens(self) -> int: ...

    def pinned(self) -> "TrainingBatch":
        """Copy the batch to page-locked memory for asynchronous transfers to a GPU."""


ModelT = TypeVar("ModelT", EncoderDecoder, LanguageModel)
BatchT = TypeVar("BatchT", bound=TrainingBatch)
MadeT_co = TypeVar("MadeT_co", bound=TrainingBatch, covariant=True)


@runtime_checkable
class Batches(Protocol[MadeT_co]):
    """Text divided into batches."""

    @property
    def num_target_tokens(self) -> int:
        """Number of target tokens in one epoch."""

    def plan(self, epoch: int) -> list[Int64[np.ndarray, "batch"]]:
        """Return the item indices of each batch of an epoch; depends only on text, seed and epoch."""

    def collate(self, indices: Int64[np.ndarray, "batch"]) -> MadeT_co:
        """Make the tensors of one batch of a plan."""


class Objective(ABC, Generic[ModelT, BatchT]):
    """Training objective: the model, its training and validation texts, the loss and the metrics."""

    def __init__(
        self,
        model: ModelT,
        train: Batches[BatchT],
        valid: Batches[BatchT],
        bytes_per_token: float | None = None,
        metric: Metric = "loss",
        *,
        uses_whole_model: bool = False,
    ) -> None:
        self.model: ModelT = model
        self.train = train
        self.valid = valid
        self.bytes_per_token = bytes_per_token
        self._metric = metric
        self.uses_whole_model = (
            uses_whole_model  # True if `figures` or `sample` call the model
        )

    def training_loss(self, model: ModelT, batch: BatchT, step: int) -> Loss:
        """Compute the loss that update `step` minimises, with the model or its bfloat16 twin."""
        del step
        return self.loss(model, batch)

    @abstractmethod
    def loss(self, model: ModelT, batch: BatchT) -> Loss:
        """Compute the validation loss of a batch."""

    @abstractmethod
    def timed_part(
        self, indices: Int64[np.ndarray, "batch"], tokens: int
    ) -> Int64[np.ndarray, "part"]:
        """Return the first items of a batch of the plan, about `tokens` tokens and at least one item."""

    def lines(self, batch: BatchT) -> tuple[int, ...]:
        """Return the line numbers of a batch in the training text; empty if the text is not read by lines."""
        del batch
        return ()

    def padding_waste(self) -> float:
        """Return the share of padding in the training batches."""
        return 0.0

    def figures(self, loss: float, model: ModelT) -> dict[str, float]:
        """Return the figures of a validation, "valid_loss" included; `loss` is in nats per token."""
        del model
        found = {"valid_loss": loss, "valid_perplexity": math.exp(min(loss, 50))}
        if self.bytes_per_token is not None:
            found["valid_bits_per_byte"] = loss / self.bytes_per_token / math.log(2)
        return found

    def judge(self, figures: Mapping[str, float]) -> Score:
        """Return the score of a validation."""
        return judge(figures, self._metric)

    def describe(self, figures: Mapping[str, float]) -> str:
        """Format the figures as one line of text."""
        loss = figures["valid_loss"]
        return f"loss {loss:.4f}  perplexity {math.exp(min(loss, 50)):.2f}"

    def sample(self, model: ModelT) -> str | None:
        """Return a text that the model generates, to be printed; None if the recipe asks for no sample."""
        del model
        return None


# Translates the validation text with a model and measures the quality.
Scorer = Callable[[EncoderDecoder], Quality]


@final
class TranslationObjective(Objective[EncoderDecoder, Batch]):
    """Translation: predict each target token from the source sentence and the target tokens before it."""

    train: TokenBatches

    def __init__(
        self,
        model: EncoderDecoder,
        train: TokenBatches,
        valid: TokenBatches,
        config: TrainingConfig,
        validation: ValidationConfig,
        score: Scorer | None,
        bytes_per_token: float | None = None,
        teacher: EncoderDecoder | None = None,
    ) -> None:
        super().__init__(
            model,
            train,
            valid,
            bytes_per_token,
            validation.metric,
            uses_whole_model=score is not None,
        )
        self.config = config
        self.score = score
        # The teacher only gives probabilities: no dropout, no gradients.
        self._teacher = (
            None if teacher is None else teacher.eval().requires_grad_(False)
        )

    def training_loss(self, model: EncoderDecoder, batch: Batch, step: int) -> Loss:
        rdrop = self.config.rdrop if step > self.config.rdrop_after else 0.0
        return self._loss(
            model, batch, self.config.label_smoothing, rdrop, self._teacher
        )

    def loss(self, model: EncoderDecoder, batch: Batch) -> Loss:
        return self._loss(model, batch, 0.0, 0.0, None)

    def _loss(
        self,
        model: EncoderDecoder,
        batch: Batch,
        label_smoothing: float,
        rdrop: float,
        teacher: EncoderDecoder | None,
    ) -> Loss:
        device = model.decoder.embeddings.table.weight.device
        src, tgt_in, tgt_out = (
            side.to(device, non_blocking=True)
            for side in (batch.src, batch.tgt_in, batch.tgt_out)
        )
        # Padding is left out before the output layer.
        real = tgt_out != model.pad_id
        said = tgt_out[real]
        if rdrop:  # one batch holds both passes: every row has a dropout mask
            src = src.repeat(2, 1)
            tgt_in = tgt_in.repeat(2, 1)
        hidden = model.decode(tgt_in, model.encode(src), model.memory_mask(src))
        passes = hidden.chunk(2) if rdrop else (hidden,)
        factors = [output_factors(model.head, x[real]) for x in passes]
        features, weight = factors[0]
        if teacher is not None:
            with torch.no_grad():
                of_teacher = teacher.decode(
                    tgt_in, teacher.encode(src), teacher.memory_mask(src)
                )[real]
            head = teacher.head
            share = self.config.teacher_weight
            return teacher_loss(
                features,
                weight,
                said,
                label_smoothing,
                lambda rows: head(of_teacher[rows]),
                share,
            )
        if not rdrop:
            return output_loss(features, weight, said, label_smoothing)
        second, _ = factors[1]
        return rdrop_loss(features, second, weight, said, label_smoothing, rdrop)

    def timed_part(
        self, indices: Int64[np.ndarray, "batch"], tokens: int
    ) -> Int64[np.ndarray, "part"]:
        batch = self.train.collate(indices)
        longest = max(batch.src.shape[1], batch.tgt_out.shape[1])
        return indices[: max(tokens // longest, 1)]

    def lines(self, batch: Batch) -> tuple[int, ...]:
        return batch.line_numbers

    def padding_waste(self) -> float:
        return self.train.padding_waste(0)

    def figures(self, loss: float, model: EncoderDecoder) -> dict[str, float]:
        found = super().figures(loss, model)
        if self.score is None:
            return found
        quality = self.score(model)
        return {
            **found,
            "valid_bleu": quality.bleu,
            "valid_bleu_low": quality.bleu_low,
            "valid_chrf": quality.chrf,
            "valid_at_limit": quality.num_at_limit,
        }

    def describe(self, figures: Mapping[str, float]) -> str:
        said = super().describe(figures)
        if "valid_bleu" not in figures:
            return said
        said += f"  BLEU {figures['valid_bleu']:.2f}  chrF {figures['valid_chrf']:.2f}"
        at_limit = figures["valid_at_limit"]
        return said + (
            f"  {at_limit} translations end at the limit (max_extra_tokens)"
            if at_limit
            else ""
        )


@final
class LanguageObjective(Objective[LanguageModel, LanguageBatch]):
    """Language modelling of a packed text: next tokens for a decoder, masked tokens for an encoder."""

    def __init__(
        self,
        model: LanguageModel,
        train: Batches[LanguageBatch],
        valid: Batches[LanguageBatch],
        bytes_per_token: float | None,
        sample: Callable[[LanguageModel], str] | None = None,
    ) -> None:
        super().__init__(
            model, train, valid, bytes_per_token, uses_whole_model=sample is not None
        )
        self._sample = sample

    def loss(self, model: LanguageModel, batch: LanguageBatch) -> Loss:
        device = model.embeddings.table.weight.device
        ids, targets = (
            side.to(device, non_blocking=True) for side in (batch.ids, batch.targets)
        )
        mask = batch.mask
        places = batch.positions
        if mask is not None:
            mask = mask.to(device, non_blocking=True)
        positions = (
            None if places is None else PositionIds(places.to(device), ids.shape[1])
        )
        x = model.hidden(ids, mask=mask, positions=positions).flatten(0, 1)
        said = targets.flatten()
        # Only positions with a target reach the output layer.
        if batch.num_target_tokens < said.numel():
            counted = (said != NOT_COUNTED).nonzero()[:, 0]
            x = x.index_select(0, counted)
            said = said.index_select(0, counted)
        assert model.head is not None, "a model that is trained has a head"
        return head_loss(model.head, x, said)

    def timed_part(
        self, indices: Int64[np.ndarray, "batch"], tokens: int
    ) -> Int64[np.ndarray, "part"]:
        context = self.train.collate(indices).ids.shape[1]
        return indices[: max(tokens // context, 2)]

    def describe(self, figures: Mapping[str, float]) -> str:
        bits = figures.get("valid_bits_per_byte")
        return super().describe(figures) + (
            "" if bits is None else f"  {bits:.4f} bits per byte"
        )

    def sample(self, model: LanguageModel) -> str | None:
        return None if self._sample is None else self._sample(model)
