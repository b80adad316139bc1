"""What language models learn: the next token, or the tokens that were hidden."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import final

import numpy as np
from jaxtyping import Int64
from torch import nn

from triptych.attention import PositionIds
from triptych.models import LanguageModel
from triptych.text.packing import NOT_COUNTED, LanguageBatch
from triptych.training.losses import Loss, head_loss
from triptych.training.objectives import Batches, Objective


@final
class TokensOfText(Objective[LanguageModel, LanguageBatch]):
    """Tokens of a packed text: the next ones for a decoder, hidden ones for an encoder."""

    def __init__(
        self,
        model: LanguageModel,
        train: Batches[LanguageBatch],
        valid: Batches[LanguageBatch],
        bytes_per_token: float,
        sample: Callable[[LanguageModel], str] | None = None,
    ) -> None:
        super().__init__(model, train, valid)
        self.bytes_per_token, self._sample = bytes_per_token, sample

    @property
    def d_model(self) -> int:
        return self.model.architecture.d_model

    @property
    def uses_whole_model(self) -> bool:
        return self._sample is not None

    def blocks(self, model: LanguageModel) -> Iterator[nn.Module]:
        yield from model.blocks

    def training_loss(self, model: LanguageModel, batch: LanguageBatch, step: int) -> Loss:
        del step
        return self.loss(model, batch)

    def loss(self, model: LanguageModel, batch: LanguageBatch) -> Loss:
        device = model.embeddings.table.weight.device
        ids, targets = (side.to(device, non_blocking=True) for side in (batch.ids, batch.targets))
        mask, places = batch.mask, batch.positions
        if mask is not None:
            mask = mask.to(device, non_blocking=True)
        positions = None if places is None else PositionIds(places.to(device), ids.shape[1])
        x, said = model.hidden(ids, mask=mask, positions=positions).flatten(0, 1), targets.flatten()
        if batch.num_target_tokens < said.numel():
            counted = (said != NOT_COUNTED).nonzero()[:, 0]
            x, said = x.index_select(0, counted), said.index_select(0, counted)
        assert model.head is not None, "a model that is trained has a head"
        return head_loss(model.head, x, said)

    def timed_part(self, indices: Int64[np.ndarray, "batch"], tokens: int) -> Int64[np.ndarray, "part"]:
        context = self.train.collate(indices).ids.shape[1]
        return indices[: max(tokens // context, 2)]

    def lines(self, batch: LanguageBatch) -> tuple[int, ...]:
        del batch
        return ()

    def figures(self, loss: float, model: LanguageModel) -> dict[str, float]:
        del model
        return {
            "valid_loss": loss,
            "valid_perplexity": math.exp(min(loss, 50)),
            "valid_bits_per_byte": loss / self.bytes_per_token / math.log(2),
        }

    def describe(self, figures: Mapping[str, float]) -> str:
        return f"{super().describe(figures)}  {figures['valid_bits_per_byte']:.4f} bits per byte"

    def sample(self, model: LanguageModel) -> str | None:
        return None if self._sample is None else self._sample(model)
