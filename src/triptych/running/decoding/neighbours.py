"""Parts of a model for which a text's bits may depend on the other texts of its batch."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from triptych.core.attention import MultiHeadAttention
from triptych.core.models import Experts
from triptych.running.decoding.cache import even_length, hidden_past
from triptych.running.decoding.fused import FusedAttention, numbers_of

# The split of activations among more threads depends on the number of rows.
MOST_THREADS = 2
# Compared lengths of a text, and of the longest text of its batch.
_LENGTHS = (1, 13, 29, 61)
_LONGEST = (16, 40, 64, 130)
_BATCHES = (1, 3)


def why_batches_matter(
    modules: Iterable[nn.Module], device: torch.device, dtype: torch.dtype
) -> str:
    """Return the reasons why a batch may change a text's bits on this machine, or ""."""
    if device.type != "cpu":
        return f"products on {device.type} are not compared"
    every = [*modules]
    attention = [module for module in every if isinstance(module, FusedAttention)]
    reasons = {
        "mixtures of experts": any(isinstance(module, Experts) for module in every),
        "attention that is not fused": any(
            isinstance(module, MultiHeadAttention) for module in every
        ),
        f"products in {dtype} that are not packed": any(
            type(module) is nn.Linear for module in every
        ),
        f"more than {MOST_THREADS} threads": torch.get_num_threads() > MOST_THREADS,
        f"attention in {dtype} of which sums depend on the number of keys": _differs(
            attention, dtype
        ),
    }
    return ", ".join(reason for reason, holds in reasons.items() if holds)


def _differs(layers: Iterable[FusedAttention], dtype: torch.dtype) -> bool:
    of_each_shape = {
        (layer.num_heads, layer.groups, layer.width): layer for layer in layers
    }
    return any(attention_differs(layer, dtype) for layer in of_each_shape.values())


@torch.no_grad()
def attention_differs(layer: FusedAttention, dtype: torch.dtype) -> bool:
    """Return True if attention outputs of a text differ in bits when it is batched with longer texts.

    All keys but one come in equal pairs with opposite values, which cancel each other. The outputs show
    rounding errors, and so a different order of summation, in any dtype.
    """
    draw = torch.Generator().manual_seed(0)
    for length in _LENGTHS:
        q, k, v = _text(layer, length, dtype, draw)
        for found in (_steps(layer, q, k, v), _prompts(layer, q, k, v)):
            alone = next(found)
            if any(not torch.equal(alone, beside) for beside in found):
                return True
    return False


def _text(
    layer: FusedAttention, length: int, dtype: torch.dtype, draw: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw queries `[heads, length, width]`, and keys and values `[groups, length, width]`."""
    half = -(-length // 2)
    places = torch.randperm(length, generator=draw)
    given = torch.randn(2, layer.groups, half, layer.width, generator=draw)
    twice = torch.cat(
        [given, given * torch.tensor([1.0, -1.0])[:, None, None, None]], dim=2
    )
    k, v = twice[:, :, :length][:, :, places].to(dtype)
    q = (
        torch.randn(layer.num_heads, length, layer.width, generator=draw)
        * layer.width**-0.5
    )
    return q.to(dtype), k, v


def _steps(layer: FusedAttention, q: Tensor, k: Tensor, v: Tensor) -> Iterator[Tensor]:
    """Yield outputs of the last query: first of the text alone, then in batches with longer texts.

    The other texts of a batch have the padded number of keys.
    """
    length = k.shape[1]
    for longest in (length, *(number for number in _LONGEST if number > length)):
        for batch in _BATCHES:
            keys, values = (_beside(of, even_length(longest), batch) for of in (k, v))
            lengths = torch.full((batch,), keys.shape[2])
            lengths[-1] = length
            hidden = hidden_past(lengths, keys.shape[2], k.dtype)[:, None]
            yield layer.gathered(
                _beside(q[:, -1:], 1, batch), keys, values, hidden, varies=False
            )[-1]


def _prompts(
    layer: FusedAttention, q: Tensor, k: Tensor, v: Tensor
) -> Iterator[Tensor]:
    """Yield outputs of all queries: first of the text alone, then in batches with longer texts."""
    length = k.shape[1]
    for longest in (length, *(number for number in _LONGEST if number > length)):
        places = torch.arange(longest)
        for batch in _BATCHES:
            queries, keys, values = (_beside(of, longest, batch) for of in (q, k, v))
            hidden = numbers_of(places <= places[:, None], keys)
            yield layer.gathered(queries, keys, values, hidden, varies=True)[
                -1, :, :length
            ]


def _beside(own: Tensor, length: int, batch: int) -> Tensor:
    """Put a text's tensor, padded to a length, last in a batch of ones."""
    filled = own.new_ones(batch, own.shape[0], length, own.shape[2])
    filled[-1, :, : own.shape[1]] = own
    return filled
