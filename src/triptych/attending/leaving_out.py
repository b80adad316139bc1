"""Batches through a model with one head of a layer left out, in rows of its own for every head of the layer.

A head is left out where its output would meet W_O: its slice of the heads side by side is replaced. The
blocks before the layer are not run again.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from triptych.algebra.function import channels, gated, of_heads
from triptych.attending.over_text import Window, Windows
from triptych.decoding.batches import padded_alike
from triptych.models import EncoderDecoder, LanguageModel
from triptych.models.sites import AnyModel, AttentionSite
from triptych.opening import LayerCall, Reader, record_calls
from triptych.text import Tokenizer
from triptych.text.masking import MaskingSpec

Instead = Literal["zero", "mean", "even"]
# Of all rows that run together, each with another head left out.
_TOKENS_AT_A_TIME = 1 << 13
_LOGITS_AT_A_TIME = 1 << 25


class Batch(NamedTuple):
    """Windows that run together.

    Attributes:
        rows: their units.
        read: what the decoder reads, padded, or an encoder alone, with masks in the place of some tokens.
        targets: what it predicts at each place.
        tokens: where `read` is not padding.
        predicts: where it predicts a token that counts.
        src: what the encoder of an encoder-decoder reads; None without one.
    """

    rows: tuple[int, ...]
    read: Int[Tensor, "rows length"]
    targets: Int[Tensor, "rows length"]
    tokens: Bool[Tensor, "rows length"]
    predicts: Bool[Tensor, "rows length"]
    src: Int[Tensor, "rows src_len"] | None

    def tokens_of(self, site: AttentionSite, model: AnyModel) -> Bool[Tensor, "rows length"]:
        """Where a layer's queries are tokens, not padding."""
        if site.stack == "encoder" and isinstance(model, EncoderDecoder):
            assert self.src is not None
            return self.src != model.pad_id
        return self.tokens

    def mask_of(self, model: LanguageModel) -> Bool[Tensor, "rows 1 1 length"] | None:
        """What the tokens of a model of one stack may attend to; None where causality says it."""
        return None if model.causal else self.tokens[:, None, None, :]


def run_whole(model: AnyModel, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """The output of the last norm, `[rows, length, d_model]`, and the memory of an encoder-decoder."""
    if isinstance(model, LanguageModel):
        return model.hidden(batch.read, mask=batch.mask_of(model)), None
    assert batch.src is not None
    memory = model.encode(batch.src)
    return model.decode(batch.read, memory, model.memory_mask(batch.src)), memory


def batches_of(reader: Reader, windows: Windows, num_heads: int) -> Iterator[Batch]:
    """Windows of like lengths together, within a number of tokens times the heads of a layer."""
    units, whole = windows.unit_of, windows.windows
    order = sorted(range(len(whole)), key=lambda i: whole[i].num_tokens)
    together = list[int]()
    lengths = [window.num_tokens for window in whole]
    limit = reader.model.rotary_limit if isinstance(reader.model, LanguageModel) else None
    for place, i in enumerate(order):
        together.append(i)
        after = whole[order[place + 1]].num_tokens if place + 1 < len(order) else 0
        if after and (len(together) + 1) * after * num_heads <= _TOKENS_AT_A_TIME:
            continue
        for part in padded_alike(together, lengths, limit):
            yield _batch(reader, [(j, whole[j]) for j in part], tuple(units[j] for j in part))
        together = []


def _batch(reader: Reader, windows: Sequence[tuple[int, Window]], units: tuple[int, ...]) -> Batch:
    model, src, pad_id, predicts = reader.model, None, 0, None
    device = next(model.parameters()).device
    produced = [list(window.text.ids) for _, window in windows]
    if isinstance(model, EncoderDecoder):
        pad_id = model.pad_id
        read = [[reader.start_id, *ids[:-1]] for ids in produced]
        src = _padded([window.text.source or () for _, window in windows], pad_id, device)
    elif model.causal:
        read, produced = [ids[:-1] for ids in produced], [ids[1:] for ids in produced]
    else:
        hidden = [_hidden(reader.tokenizer, window.text.ids, number) for number, window in windows]
        read = [ids for ids, _ in hidden]
        predicts = _padded([places for _, places in hidden], 0, device).bool()
    lengths = torch.tensor([len(ids) for ids in read], device=device)
    padded = _padded(read, pad_id, device)
    tokens = torch.arange(padded.shape[1], device=device) < lengths[:, None]
    return Batch(
        units, padded, _padded(produced, 0, device), tokens, tokens if predicts is None else predicts, src
    )


def _hidden(tokenizer: Tokenizer, ids: Sequence[int], number: int) -> tuple[list[int], list[int]]:
    """A window of an encoder with some tokens hidden, and 1 where; the same for the same number.

    So many are hidden as in training, each by the mask token.
    """
    ordinary = [place for place, token in enumerate(ids) if token not in tokenizer.special_ids]
    order = torch.randperm(len(ordinary), generator=torch.Generator().manual_seed(number)).tolist()
    chosen = {ordinary[i] for i in order[: max(1, round(MaskingSpec().share * len(ordinary)))]}
    assert tokenizer.mask_id is not None, "`require_loss` asks for it"
    read = [tokenizer.mask_id if place in chosen else token for place, token in enumerate(ids)]
    return read, [int(place in chosen) for place in range(len(ids))]


def _padded(rows: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> Tensor:
    tensors = [torch.tensor(list(row)) for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=pad_id).to(device)


@final
class WholeRun:
    """A batch through the whole model, and from any of its layers on.

    Attributes:
        model: the model.
        losses: `[rows]`, sums in nats over the tokens predicted.
        outputs: by site, what meets W_O at every call of its layer, `[rows, length, heads · d_v]`.
    """

    def __init__(self, model: AnyModel, batch: Batch) -> None:
        self.model, self._batch = model, batch
        self._streams: dict[int, Tensor] = {}  # what the first call of each block reads
        self._memory: Tensor | None = None
        self._calls: dict[str, list[LayerCall]] = {}
        self.outputs: dict[str, list[Tensor]] = {}
        self.losses = batch.predicts.new_zeros(0)

    @classmethod
    def of(cls, model: AnyModel, sites: Sequence[AttentionSite], batch: Batch) -> "WholeRun":
        """Run a batch."""
        found = cls(model, batch)
        with ExitStack() as stack:
            for block in _blocks(model):
                stack.callback(block.register_forward_pre_hook(found._keep_stream).remove)
            found.outputs = stack.enter_context(head_outputs(sites))
            calls = stack.enter_context(record_calls(model))
            hidden, found._memory = run_whole(model, batch)
        for call in calls:
            found._calls.setdefault(call.site.name, []).append(call)
        found.losses = found._losses(hidden)[0]
        return found

    def _keep_stream(self, block: nn.Module, given: tuple[Any, ...]) -> None:
        self._streams.setdefault(id(block), given[0])

    def width_of(self, site: AttentionSite) -> int:
        """Channels of a head of a layer where it meets W_O."""
        return self.outputs[site.name][0].shape[-1] // site.layer.num_heads

    def even_outputs(self, site: AttentionSite) -> list[Tensor]:
        """What would meet W_O at every call if all heads looked evenly at the keys that they see."""
        return [even_output(call) for call in self._calls[site.name]]

    def losses_from(self, site: AttentionSite) -> Float[Tensor, "heads rows"]:
        """The losses of rows that run from a layer's block on, once for every head of the layer."""
        model, times = self.model, site.layer.num_heads
        if isinstance(model, LanguageModel):
            order = model.architecture.order or tuple(range(len(model.blocks)))
            x = self._repeated(self._streams[id(model.blocks[site.block])], times)
            mask = self._batch.mask_of(model)
            mask = None if mask is None else self._repeated(mask, times)
            for number in order[order.index(site.block) :]:
                x = model.blocks[number](x, mask, causal=model.causal)
            return self._losses(model.final_norm(x))
        assert self._batch.src is not None
        assert self._memory is not None
        mask = self._repeated(model.memory_mask(self._batch.src), times)
        if site.stack == "encoder":
            x = self._repeated(self._streams[id(model.encoder[site.block])], times)
            for block in model.encoder[site.block :]:
                x = block(x, mask)
            read = self._repeated(self._batch.read, times)
            return self._losses(model.decode(read, model.encoder_norm(x), mask))
        x, memory = (
            self._repeated(t, times) for t in (self._streams[id(model.decoder[site.block])], self._memory)
        )
        for block in model.decoder[site.block :]:
            x = block(x, causal=True, memory=memory, memory_mask=mask)
        return self._losses(model.decoder_norm(x))

    @staticmethod
    def _repeated(x: Tensor, times: int) -> Tensor:
        return x.repeat(times, *[1] * (x.ndim - 1))

    def _losses(self, hidden: Float[Tensor, "all length d_model"]) -> Float[Tensor, "times rows"]:
        """Sums over the tokens of each row; the rows may come several times."""
        model, predicts, targets = self.model, self._batch.predicts, self._batch.targets
        logits_of = model.logits if isinstance(model, EncoderDecoder) else model.head
        assert logits_of is not None
        times = hidden.shape[0] // predicts.shape[0]
        counted = predicts.repeat(times, 1)
        wanted, rows = targets.repeat(times, 1)[counted], counted.nonzero()[:, 0]
        vocab = model.tgt_vocab_size if isinstance(model, EncoderDecoder) else model.vocab_size
        read, step = hidden[counted], max(1, _LOGITS_AT_A_TIME // vocab)
        parts = [
            _nats(logits_of(read[start : start + step]), wanted[start : start + step])
            for start in range(0, len(read), step)
        ]
        sums = torch.zeros(counted.shape[0], dtype=torch.float64, device=hidden.device)
        return sums.index_add_(0, rows, torch.cat(parts).double()).view(times, -1)


def _nats(logits: Float[Tensor, "tokens vocab"], ids: Int[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.logsumexp(dim=-1) - logits.gather(1, ids[:, None])[:, 0]


def _blocks(model: AnyModel) -> list[nn.Module]:
    if isinstance(model, LanguageModel):
        return [*model.blocks]
    return [*model.encoder, *model.decoder]


@contextmanager
def head_outputs(sites: Sequence[AttentionSite]) -> Iterator[dict[str, list[Tensor]]]:
    """Record what meets W_O in layers, by site, one for each call: `[rows, length, heads · d_v]`."""
    found: dict[str, list[Tensor]] = {site.name: [] for site in sites}

    def keep(module: nn.Module, given: tuple[Tensor, ...], *, name: str) -> None:
        found[name].append(given[0].detach())

    with ExitStack() as stack:
        for site in sites:
            hook = partial(keep, name=site.name)
            stack.callback(site.layer.projections.o_proj.register_forward_pre_hook(hook).remove)
        yield found


@contextmanager
def heads_left_out(site: AttentionSite, instead: Sequence[Tensor]) -> Iterator[None]:
    """Replace the output of head i in the i-th of as many equal parts of the rows as the layer has heads."""
    num_heads, calls = site.layer.num_heads, iter(instead)

    def replace(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (joined,) = given
        parts = joined.clone().view(num_heads, -1, joined.shape[1], num_heads, joined.shape[2] // num_heads)
        other = next(calls).expand(parts.shape[1], joined.shape[1], -1).reshape(parts.shape[1:])
        for head in range(num_heads):
            parts[head, :, :, head] = other[:, :, head]
        return (parts.view(joined.shape),)

    hook = site.layer.projections.o_proj.register_forward_pre_hook(replace)
    try:
        yield
    finally:
        hook.remove()


def even_output(call: LayerCall) -> Float[Tensor, "rows length joined"]:
    """What would meet W_O if every head looked evenly at the keys that its queries see."""
    weights = call.layer.weights()
    v = of_heads(channels(weights, call.x, call.memory).v, weights.num_heads)
    even = call.queries_and_keys().visible().to(v.dtype)
    mixed = gated(weights, call.x, even / even.sum(dim=-1, keepdim=True).clamp(min=1) @ v)
    for link in weights.o[:-1]:
        mixed = link.of_heads(weights.num_heads)(mixed)
    return mixed.transpose(1, 2).flatten(2)
