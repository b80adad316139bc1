"""Models that triptych runs itself: runs of ours, and checkpoints of others that become models of ours."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from triptych.checkpoints.layer import AttentionSource, Site
from triptych.errors import DataError
from triptych.models import EncoderDecoder, LanguageModel, attention_sites
from triptych.opening import OpenedModel, record_calls
from triptych.rewriting.running import (
    RANDOM_WINDOWS,
    WINDOW_TOKENS,
    RunnableModel,
    Seen,
    Window,
    read_pairs,
    up_to,
    windows_of_text,
)
from triptych.training.language import TOKENIZER

_RANDOM_PAIR = 24  # tokens on each side


@final
class OwnRunnable(RunnableModel):
    """A model whose attention layers are ours; in float32, but for translators of a recipe or Marian's."""

    by = "triptych"

    def __init__(self, opened: OpenedModel | LanguageModel, longest: int) -> None:
        """Of an opened model, on the CPU."""
        self._given, self._longest = opened, longest
        model = opened.model if isinstance(opened, OpenedModel) else opened
        if not (isinstance(model, EncoderDecoder) and model.recipe is not None):
            model = model.float()
        self.model: LanguageModel | EncoderDecoder = model.eval()
        self.kind = (
            "pairs"
            if isinstance(model, EncoderDecoder)
            else "causal"
            if model.causal and model.head is not None
            else "encoder"
        )
        self._watched: dict[str, str] = {}

    def windows(self, text: Path, most_tokens: int) -> Iterator[Window]:
        """Windows of 128 tokens side by side; for encoders a line is one, for pairs a line with a tab."""
        if self.kind == "pairs":
            return up_to(most_tokens, self._pairs(text))
        length = min(WINDOW_TOKENS, self._longest)
        return windows_of_text(text, most_tokens, length, self._encode, causal=self.kind == "causal")

    def random_windows(self, seed: int) -> Iterator[Window]:
        generator = torch.Generator().manual_seed(seed)
        model = self.model
        for _ in range(RANDOM_WINDOWS):
            if isinstance(model, EncoderDecoder):
                window, pad = {}, model.pad_id
                for side, size in (("src", model.src_vocab_size), ("tgt", model.tgt_vocab_size)):
                    ids = torch.randint(0, size, (1, _RANDOM_PAIR), generator=generator)
                    window[side] = ids.masked_fill(ids == pad, (pad + 1) % size)  # Marian's pad comes last
                yield Window(window, None)
            else:
                length = max(4, min(32, self._longest) - 4)
                ids = torch.randint(0, model.vocab_size, (1, length), generator=generator)
                yield Window({"input_ids": ids}, None)

    @torch.inference_mode()
    def outputs(self, window: Window) -> Tensor:
        self.seen = {}
        with record_calls(self.model) as calls:
            result: Tensor = (
                self.model(window.inputs["src"], window.inputs["tgt"])
                if isinstance(self.model, EncoderDecoder)
                else self.model(window.inputs["input_ids"]).logits
            )
        for call in calls:
            if (name := self._watched.get(call.site.name)) is not None:
                self.seen.setdefault(name, []).append(Seen(call.x, call.memory))
        return result[0]

    def watch(self, source: AttentionSource, sites: Sequence[Site]) -> contextlib.ExitStack:
        self._watched = {_place(site): site.name for site in sites}
        stack = contextlib.ExitStack()
        stack.callback(self._watched.clear)
        return stack

    def attention_module(self, site: Site) -> nn.Module:
        stack, _, number = _place(site).partition(".")
        return next(
            there.layer
            for there in attention_sites(self.model)
            if there.block == int(number) and (self.kind != "pairs" or there.stack == stack)
        )

    @property
    def _opened(self) -> OpenedModel:
        if not isinstance(self._given, OpenedModel):
            raise DataError(f"a text cannot be read: the folder of the model has no {TOKENIZER}")
        return self._given

    def _encode(self, text: str, special: bool) -> list[int]:
        return self._opened.tokenizer.encode([text], add_special=special, parse_special=not special)[0]

    def _pairs(self, text: Path) -> Iterator[Window]:
        model = self._opened.encoder_decoder
        tokenizers, start = self._opened.tokenizers, self._opened.tokenizers.target.rules.start
        longest, most = model.max_source_tokens, model.max_target_tokens
        for source, target in read_pairs(text):
            (src,), (tgt,) = tokenizers.source.encode([source]), tokenizers.target.encode([target])
            if model.recipe is None:  # of others' models there are only so many positions
                src, tgt = src[:longest], tgt[: None if most is None else most - len(start)]
            inputs = {
                "src": torch.tensor([[*src, tokenizers.source.eos_id]]),
                "tgt": torch.tensor([[*start, *tgt]]),
            }
            yield Window(inputs, torch.tensor([*start[1:], *tgt, tokenizers.target.eos_id]))


def _place(site: Site) -> str:
    """The name of a layer as `attention_sites` spells it; a model of one stack has its own word for that."""
    if site.kind == "cross":
        return f"cross.{site.layer}"
    return f"{'encoder' if site.stack == 'encoder' else 'decoder'}.{site.layer}"
