"""Tokens written by heads: W_OV decoded through a model's output table."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from triptych.core.models import EncoderDecoder, LanguageModel
from triptych.errors import UsageError
from triptych.running.measuring import (
    HeadFigures,
    LayerAttention,
    Part,
    Place,
    Told,
    UnitSums,
    Windows,
    read_windows,
    stack_ids,
)
from triptych.running.opening import LayerCall, Reader

# A head writes a token if the token is among this many nearest to the head's output.
NEAREST = 5
# Multiplications for the logits of one layer and one window: larger models are measured at fewer tokens.
_MOST_PRODUCTS = 1 << 32
_LOGITS_AT_A_TIME = 1 << 25


@final
@dataclass(frozen=True, eq=False)
class OutputTable:
    """The last norm and the output table of a model, applied to a change of the stream."""

    norm: nn.Module  # the norm before the table
    table: Float[Tensor, "vocab d_model"]

    @classmethod
    def of(
        cls, model: EncoderDecoder | LanguageModel, stack: str
    ) -> "OutputTable | None":
        """Return the table of a stack; None if the stack is not decoded to tokens.

        An encoder without output uses its embedding table.
        """
        if isinstance(model, EncoderDecoder):
            if stack == "encoder":
                return None
            model = model.decoder
        if (
            model.streams is not None
        ):  # the output depends on a head through several streams
            return None
        if model.head is not None and model.head.config.width is None:
            return cls(model.final_norm, model.head.output.weight)
        table = model.embeddings.table.weight
        return cls(model.final_norm, table) if model.embeddings.map is None else None

    def logits(
        self, written: Float[Tensor, "*rows d_model"]
    ) -> Float[Tensor, "*rows vocab"]:
        """Compute the logits of an output alone in the stream, without the bias of the norm."""
        nothing = self.norm(torch.zeros_like(written[..., :1, :]))
        logits: Tensor = (self.norm(written) - nothing) @ self.table.mT
        return logits


@torch.no_grad()
def nearest_tokens(
    layer: LayerAttention, table: OutputTable, head: int, count: int = NEAREST
) -> Int[Tensor, "keys count"]:
    """Return the tokens nearest to a head's output for each visible key, in order of distance."""
    layer.require_heads([head])
    written = _written_by_heads(layer.call, slice(None))[head]
    step = max(1, _LOGITS_AT_A_TIME // len(table.table))
    count = min(count, len(table.table))
    found = [
        table.logits(written[start : start + step]).topk(count, dim=-1).indices
        for start in range(0, len(written), step)
    ]
    return torch.cat(found)


@final
class TokenWriter:
    """The outputs of a model's heads for each attended token of a text, decoded to tokens.

    The output is `y W_V W_O` for the input y of the token, without biases, decoded through a norm after the
    layer, if any, the last norm and the output table. Encoders without an output table use the embedding
    table.
    """

    def __init__(self, reader: Reader, count: int = NEAREST) -> None:
        """Prepare the decoding of heads' outputs to `count` tokens."""
        if count < 1:
            raise UsageError(
                f"{count} tokens of what a head writes: at least 1 is needed"
            )
        self._reader = reader
        self._count = count

    def of(self, part: Part, head: int) -> tuple[tuple[str, ...], ...] | None:
        """Return the tokens nearest to a head's output for each key of a stack, in order of distance."""
        table = OutputTable.of(self._reader.model, part.stack.kind)
        tokenizer = self._reader.tokenizer
        if table is None:
            return None
        own = OutputTable(
            table.norm, table.table[: tokenizer.vocab_size]
        )  # rows past it are not tokens
        found = nearest_tokens(part.layer, own, head, self._count)
        return tuple(tuple(tokenizer.pieces(ids)) for ids in found.tolist())


def _written_by_heads(
    call: LayerCall, keys: slice | Tensor
) -> Float[Tensor, "heads keys d_model"]:
    """Compute every head's output for inputs: `y W_V W_O` without biases, through a norm after the layer."""
    y = (call.x if call.memory is None else call.memory)[0, keys]
    written = call.layer.weights().ov.apply(y)
    return call.site.residual.part_added(written, written)


@torch.no_grad()
def measure_copies(
    reader: Reader, windows: Windows, progress: Told
) -> dict[Place, dict[str, HeadFigures]]:
    """Measure the share of a head's weight on tokens it writes, over a text; cross-attention is skipped.

    `copies` is the share of weight on tokens among the 5 nearest to the head's output for them.
    """
    found = UnitSums(windows.num_units)
    for unit, text, stacks in read_windows(reader, windows, progress):
        for stack in stacks:
            table = OutputTable.of(reader.model, stack.kind)
            if table is None or stack.kind == "cross":
                continue
            ids = stack_ids(text, stack.kind)[1].to(table.table.device)
            for layer in stack.layers:
                keys = _spread_keys(
                    ids, _MOST_PRODUCTS // (layer.num_heads * table.table.numel())
                )
                looked = layer.weights().sum(dim=1)[:, keys].double()
                logits = table.logits(_written_by_heads(layer.call, keys))
                # Rank of the key's own token among the decoded tokens.
                own = logits.gather(-1, ids[keys].expand(len(logits), -1)[..., None])
                hits = ((logits > own).sum(dim=-1) < NEAREST).double()
                sums = (looked * hits).sum(dim=1)[None]
                counts = looked.sum(dim=1)[None]
                found.add(unit, (stack.kind, layer.number), ("copies",), sums, counts)
    return found.figures()


def _spread_keys(ids: Int[Tensor, " keys"], most: int) -> Int[Tensor, " kept"]:
    """Select between one and `most` evenly spaced keys; ids below 0 are not tokens."""
    keys = (ids >= 0).nonzero()[:, 0]
    step = -(-len(keys) // max(1, most))
    return keys[::step]
