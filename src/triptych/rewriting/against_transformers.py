"""Comparison of a model's outputs with `transformers`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F

from triptych.core.checkpoints.source import Source
from triptych.core.models import EncoderDecoder
from triptych.errors import DataError, UsageError
from triptych.extras import require_extra
from triptych.printable import table_html
from triptych.running.opening import (
    Reader,
    TransformersReader,
    Window,
    open_reader,
    record_calls,
)

_SEED = 20170612


@final
@dataclass(frozen=True)
class Check:
    """The largest differences between a model and `transformers`, in float32 on the CPU.

    Attributes:
        model: name of the model.
        by: name and version of the library.
        on: "random tokens", or "the text".
        tokens: number of tokens read, or produced by an encoder-decoder.
        logits: largest difference of a logit, or of a hidden state for models without an output table.
        largest: largest absolute value of the compared outputs.
        loss: largest difference of the mean loss of a text, in nats per token; None for encoders.
        attention: largest difference of an attention weight; None if `transformers` returns no weights.
        layers: number of compared attention layers.
        same_tokens: equality of the tokens of the text; None for random tokens.
    """

    model: str
    by: str
    on: str
    tokens: int
    logits: float
    largest: float
    loss: float | None
    attention: float | None
    layers: int
    same_tokens: bool | None = None

    def rows(self) -> list[tuple[str, str]]:
        """Return the compared quantities and their largest differences."""
        found = [("logits", f"{self.logits:.1e} (they reach {self.largest:.3g})")]
        if self.loss is not None:
            found.append(("loss", f"{self.loss:.1e} nats per token"))
        weights = "not given by transformers"
        if self.attention is not None:
            weights = f"{self.attention:.1e} ({self.layers} layers)"
        found.append(("attention weights", weights))
        if self.same_tokens is not None:
            found.append(("tokens", "the same" if self.same_tokens else "not the same"))
        return found

    def __repr__(self) -> str:
        first = (
            f"Check of {self.model} against {self.by} on {self.on} ({self.tokens} tokens), "
            "largest difference"
        )
        return "\n".join(
            [first, *(f"  {what:18}{found}" for what, found in self.rows())]
        )

    def _repr_html_(self) -> str:
        return table_html(f"{self.model} against {self.by}", self.rows())


@torch.no_grad()
def check_against_transformers(
    source: Source, text: str | None, target: str | None
) -> Check:
    """Run both models on the text, or on random tokens."""
    if source.is_own:
        raise UsageError(
            f"{source.name} is a run of triptych, which transformers does not read: convert it to hf first"
        )
    if target is not None and (text is None or not source.translates):
        raise UsageError(
            "target goes with the text that an encoder-decoder translates: leave it out"
        )
    require_extra("run", "transformers", what="check")
    ours = open_reader(source, "cpu", torch.float32)
    theirs = TransformersReader(source.folder, source.tokenizer_folder)
    windows = [
        _without_padding(one, ours, theirs) for one in ours.random_windows(_SEED)
    ]
    same = None
    if text is not None:
        windows, same = _windows_of(ours, theirs, text, target)
    logits = largest = 0.0
    loss: float | None = None
    attention: float | None = None
    tokens = layers = 0
    # Differences are maxima over windows; attention weights are recomputed from recorded inputs.
    for window in windows:
        with record_calls(ours.model) as calls:
            one = ours.outputs(window).float()
        other = theirs.outputs(window).float()
        if one.shape != other.shape:
            raise DataError(
                f"{source.name}: transformers gives {list(other.shape)} for our {list(one.shape)}: its class "
                "has another head"
            )
        logits = max(logits, float((one - other).abs().max()))
        largest = max(largest, float(other.abs().max()))
        tokens += len(one)
        if ours.kind == "causal" and one.shape[-1] > 1:
            ids = window.inputs["input_ids"][0, 1:]
            apart = F.cross_entropy(one[:-1], ids) - F.cross_entropy(other[:-1], ids)
            loss = max(loss or 0.0, float(apart.abs()))
        elif window.targets is not None:
            apart = F.cross_entropy(one, window.targets) - F.cross_entropy(
                other, window.targets
            )
            loss = max(loss or 0.0, float(apart.abs()))
        found: dict[str, list[Tensor]] = {}
        for call in calls:
            found.setdefault(call.kind, []).append(call.steps().weights[0])
        pairs = _both_weights(found, theirs.attentions(window))
        layers = len(pairs)
        if pairs:
            attention = max(
                attention or 0.0, *(float((a - b).abs().max()) for a, b in pairs)
            )
    return Check(
        source.name,
        theirs.by,
        "random tokens" if text is None else "the text",
        tokens,
        logits,
        largest,
        loss,
        attention,
        layers,
        same,
    )


def _without_padding(
    window: Window, ours: Reader, theirs: TransformersReader
) -> Window:
    """Replace padding tokens in random tokens: some models mask the padding id."""
    pad = getattr(theirs.model.config, "pad_token_id", None)
    model = ours.model
    if pad is None or isinstance(
        model, EncoderDecoder
    ):  # their random tokens exclude padding
        return window
    ids = window.inputs["input_ids"]
    return Window(
        {"input_ids": ids.masked_fill(ids == pad, (pad + 1) % model.vocab_size)}
    )


def _windows_of(
    ours: Reader, theirs: TransformersReader, text: str, target: str | None
) -> tuple[list[Window], bool]:
    (ids,) = ours.encode([text], None if target is None else [target])
    read = list(ids.ids if ids.source is None else ids.source)
    same = theirs.encode(text) == read
    inputs = {"input_ids": torch.tensor([read])}
    if ids.source is None:
        return [Window(inputs)], same
    inputs["decoder_input_ids"] = torch.tensor(
        [[ours.first_id(ids.ids), *ids.ids[:-1]]]
    )
    return [Window(inputs, torch.tensor(ids.ids))], same


def _both_weights(
    ours: Mapping[str, list[Tensor]], theirs: Mapping[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    """Pair the attention weights of equal layers, for stacks with equal numbers of layers."""
    found: list[tuple[Tensor, Tensor]] = []
    for kind, layers in ours.items():
        given = theirs.get(kind) or ()
        if len(given) != len(layers):
            continue
        for one, other in zip(layers, given, strict=True):
            if other is not None and one.shape == other[0].shape:
                found.append((one.float(), other[0].float()))
    return found
