"""Likelihood of texts under a language model."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.core.algebra.forms import at_least_float32
from triptych.core.algebra.resampling import ratio_intervals
from triptych.core.models import (
    LanguageModel,
    require_finite_logits,
    require_finite_values,
)
from triptych.errors import DataError, UsageError
from triptych.literals import SpecialTokens
from triptych.progress import Progress, untold
from triptych.running.batching import padded_alike
from triptych.running.text.encoding import encode_texts
from triptych.running.text.tokenizers import Tokenizer
from triptych.running.text.unknown_characters import count_unknown, why_no_bits
from triptych.running.token_nats import nats_of

_LONGEST_CONTEXT = 1024  # maximum default context, also for a model without a limit
# Maximum number of logits of the windows of a batch.
_LOGITS_OF_A_BATCH = 1 << 26

# Function from token ids `[rows, length]` to logits of the next token at each position.
Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Likelihood:
    """The loss of a model on a text."""

    nats: float  # total negative log-probability of the predicted tokens
    tokens: int  # number of predicted tokens
    num_bytes: int  # length of the predicted text in UTF-8 bytes
    context: int  # window length in tokens
    stride: int  # distance between windows in tokens
    documents: int  # number of texts, scored independently
    interval: tuple[float, float]  # 95 % bootstrap interval of the nats per token
    units: str  # resampling unit: "documents", or "windows" of a single document
    unknown: float = 0.0  # share of characters unknown to the tokenizer (lower bound)

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats_per_token, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of the text; None if too many characters are unknown to the tokenizer."""
        return None if self.why_no_bits else self.nats / math.log(2) / self.num_bytes

    @property
    def why_no_bits(self) -> str:
        """Reason why bits per byte are missing; "" if they are given."""
        return why_no_bits(self.unknown)

    def figures(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {
            "nats_per_token": self.nats_per_token,
            "interval": list(self.interval),
            "interval_over": self.units,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
            "bytes": self.num_bytes,
            "unknown": self.unknown,
            "documents": self.documents,
            "context": self.context,
            "stride": self.stride,
        }


@torch.inference_mode()
def token_losses(
    model: LanguageModel,
    ids: Sequence[int],
    context: int,
    stride: int,
    compute: Logits | None = None,
    tell: Callable[[Tensor], None] = lambda losses: None,
) -> list[Float[Tensor, " tokens"]]:
    """Compute negative log-probabilities in nats of all tokens but the first, in a list by window."""
    whole = torch.tensor(ids, device=model.embeddings.table.weight.device)
    last = len(ids) - 1  # number of tokens read: the last token is only predicted
    found, windows = (
        [],
        list[tuple[int, int, int]](),
    )  # begin, end, tokens predicted before
    predicted = 0
    while predicted < last:
        end = predicted + (stride if predicted else context)
        windows.append((end - context, min(end, last), predicted))
        predicted = end
    # Windows of equal length share a batch, limited by the size of its logits.
    at_a_time = max(1, _LOGITS_OF_A_BATCH // (context * model.vocab_size))
    place = 0
    while place < len(windows):
        length = windows[place][1] - windows[place][0]
        batch = [w for w in windows[place : place + at_a_time] if w[1] - w[0] == length]
        place += len(batch)
        read = torch.stack([whole[begin:end] for begin, end, _ in batch])
        rows = model.hidden(read) if compute is None else compute(read)
        for (begin, end, before), row in zip(batch, rows, strict=True):
            targets = whole[before + 1 : end + 1]
            head = model.head if compute is None else None
            again = None if compute else partial(model, read)
            check = partial(require_finite_values, model, again=again)
            found.append(nats_of(targets, row[before - begin :], head, check))
            tell(found[-1])
    return found


@final
class _Told:
    """The progress of a measurement in characters, with the loss so far."""

    def __init__(self, progress: Progress, characters: int) -> None:
        self._progress = progress
        self._total = characters
        self._done = 0  # characters of finished documents
        self._of_document = 0.0
        self._nats = 0.0
        self._tokens = 0

    def window(self, characters: float, losses: Float[Tensor, " tokens"]) -> None:
        """Count the tokens of a window; `characters` is the mean length of a token."""
        self._nats += float(losses.sum())
        self._tokens += len(losses)
        self._of_document += characters * len(losses)
        done = min(round(self._done + self._of_document), self._total)
        so_far = self._nats / max(1, self._tokens)
        self._progress(f"scoring, {so_far:.4f} nats per token", done, self._total)

    def document(self, characters: int) -> None:
        """Count a finished document."""
        self._done += characters
        self._of_document = 0.0


@torch.inference_mode()
def score_continuations(
    model: LanguageModel,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    max_tokens: int,
    batch_rows: int = 16,
) -> list[tuple[float, bool]]:
    """Compute the log-probability of each continuation given its context, in nats.

    Returns the log-probability of each continuation, and True if greedy decoding would give the continuation.
    """
    texts = [[*before, *after][-max_tokens - 1 :] for before, after in pairs]
    found = [(0.0, True)] * len(pairs)
    order = sorted(
        (i for i in range(len(pairs)) if pairs[i][1]), key=lambda i: -len(texts[i])
    )
    device = model.embeddings.table.weight.device
    model.eval()
    batches = (
        order[start : start + batch_rows] for start in range(0, len(order), batch_rows)
    )
    lengths = [len(text) - 1 for text in texts]  # the last token is only predicted
    for batch in chain.from_iterable(
        padded_alike(whole, lengths, model.rotary_limit) for whole in batches
    ):
        rows = [torch.tensor(texts[i][:-1]) for i in batch]
        read = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        for i, logits in zip(batch, model(read).logits, strict=True):
            count = min(len(pairs[i][1]), len(texts[i]) - 1)
            own = at_least_float32(
                logits[len(texts[i]) - 1 - count : len(texts[i]) - 1]
            )
            require_finite_logits(model, own, partial(model, read))
            targets = torch.tensor(texts[i][-count:], device=device)
            log_probs = own.log_softmax(dim=-1).gather(1, targets[:, None])
            found[i] = (
                float(log_probs.double().sum()),
                bool((own.argmax(dim=-1) == targets).all()),
            )
    return found


def measure_likelihood(
    model: LanguageModel,
    tokenizer: Tokenizer,
    documents: Sequence[str],
    context: int | None = None,
    stride: int | None = None,
    progress: Progress = untold,
    compute: Logits | None = None,
    special_tokens: SpecialTokens = "tokens",
) -> Likelihood:
    """Score a model on whole texts, independently of each other."""
    if not model.causal:
        raise UsageError(
            "an encoder predicts no text: evaluate --text is for decoder-only models"
        )
    limit = model.max_tokens
    context = (
        min(model.context or _LONGEST_CONTEXT, _LONGEST_CONTEXT)
        if context is None
        else context
    )
    stride = context if stride is None else stride
    if context < 1 or (limit is not None and context > limit):
        bounds = (
            "at least 1"
            if limit is None
            else f"between 1 and the model's {limit:,} positions"
        )
        raise UsageError(f"the context is {context:,} tokens: give {bounds}")
    if not 1 <= stride <= context:
        raise UsageError(
            f"the stride is {stride:,} tokens: give between 1 and the context of {context:,}"
        )
    losses = list[list[Tensor]]()
    num_bytes = 0
    characters = unknown = 0
    model.eval()
    told = _Told(progress, sum(map(len, documents)))
    for document in documents:
        if document:
            (ids,) = encode_texts(tokenizer, [document], special_tokens)
            tell = partial(told.window, len(document) / max(1, len(ids) - 1))
            losses.append(token_losses(model, ids, context, stride, compute, tell))
            characters += len(document)
            unknown += count_unknown(tokenizer, document, ids, special_tokens)
            # The first token is not predicted.
            num_bytes += len(document.encode()) - len(
                "".join(tokenizer.decode([ids[:1]] if ids else [])).encode()
            )
        told.document(len(document))
    units = "documents" if len(losses) > 1 else "windows"
    parts = (
        [torch.cat(own) for own in losses if own]
        if len(losses) > 1
        else [*chain.from_iterable(losses)]
    )
    if not parts:
        raise DataError(
            "the text is empty or a single token: give one of at least two tokens"
        )
    sums = torch.stack([part.double().sum() for part in parts]).cpu()
    counts = torch.tensor([len(part) for part in parts], dtype=torch.float64)
    low, high = map(float, ratio_intervals(sums, counts))
    nats = float(sums.sum())
    tokens = int(counts.sum())
    share = unknown / max(1, characters)
    return Likelihood(
        nats,
        tokens,
        max(1, num_bytes),
        context,
        stride,
        len(losses),
        (low, high),
        units,
        share,
    )
