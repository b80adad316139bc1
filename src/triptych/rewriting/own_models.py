"""Models that triptych runs itself: runs of ours, and checkpoints of others that become models of ours."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from triptych.checkpoints.checkpoint import Checkpoint, open_checkpoint
from triptych.checkpoints.layer import AttentionSource, Site
from triptych.checkpoints.models import read_model
from triptych.checkpoints.own import OwnModel
from triptych.errors import DataError
from triptych.models import EncoderDecoder, LanguageModel, attention_sites
from triptych.models.blocks import Block
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
from triptych.runs import Run
from triptych.text import Tokenizer, load_tokenizer, read_tokenizer


class _OwnRunnable(RunnableModel):
    """A model whose attention layers are ours."""

    by = "triptych"

    def watch(self, source: AttentionSource, sites: Sequence[Site]) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        for site in sites:
            hook = partial(self._hear, site)
            layer = self.attention_module(site)
            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        return stack

    def _hear(self, site: Site, _: nn.Module, given: tuple[Any, ...], by_name: dict[str, Any]) -> None:
        memory = by_name.get("memory") if site.kind == "cross" else None
        self.seen.setdefault(site.name, []).append(Seen(given[0].detach(), memory))


@final
class LanguageRunnable(_OwnRunnable):
    """A run of a language model, or a checkpoint of others that becomes one, in float32.

    Raises:
        DataError: it does not, with the reason.
    """

    def __init__(self, path: Path) -> None:
        checkpoint = open_checkpoint(path)
        if isinstance(checkpoint, Checkpoint):
            model = read_model(checkpoint, torch.float32)
        elif isinstance(checkpoint, OwnModel) and isinstance(checkpoint.model, LanguageModel):
            model = checkpoint.model.float()
        else:
            raise DataError(f"{path} holds no language model")
        self.model: LanguageModel = model
        self._is_own = isinstance(checkpoint, OwnModel)
        self.kind = "causal" if self.model.causal and self.model.head is not None else "encoder"
        self._path = path
        self._longest = checkpoint.longest_text(checkpoint.sites[0])

    def windows(self, text: Path, most_tokens: int) -> Iterator[Window]:
        """Windows of 128 tokens side by side; for encoders a line is one."""
        length = min(WINDOW_TOKENS, self._longest)
        return windows_of_text(text, most_tokens, length, self._encode, causal=self.kind == "causal")

    def _encode(self, text: str, special: bool) -> list[int]:
        return self._tokenizer.encode([text], add_special=special, parse_special=not special)[0]

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if self._is_own:
            return read_tokenizer(self._path / "tokenizer.json")
        return load_tokenizer(self._path, vocab_size=self.model.vocab_size)

    def random_windows(self, seed: int) -> Iterator[Window]:
        generator = torch.Generator().manual_seed(seed)
        length = max(4, min(32, self._longest) - 4)
        for _ in range(RANDOM_WINDOWS):
            ids = torch.randint(0, self.model.vocab_size, (1, length), generator=generator)
            yield Window({"input_ids": ids}, None)

    @torch.inference_mode()
    def outputs(self, window: Window) -> Tensor:
        self.seen = {}
        result: Tensor = self.model(window.inputs["input_ids"]).logits
        return result[0]

    def attention_module(self, site: Site) -> nn.Module:
        return cast(Block, self.model.blocks[site.layer]).self_attention


@final
class TranslatorRunnable(_OwnRunnable):
    """A run that translates, or an encoder-decoder of others; one that is not Marian's in float32.

    Raises:
        DataError, UsageError: see `Run.open`.
    """

    def __init__(self, path: Path) -> None:
        self._run = Run.open(path, "cpu")
        model = self._run.model.eval()
        self.model: EncoderDecoder = model if model.recipe is not None else model.float()
        self.kind = "pairs"

    def windows(self, text: Path, most_tokens: int) -> Iterator[Window]:
        return up_to(most_tokens, self._pairs(text))

    def _pairs(self, text: Path) -> Iterator[Window]:
        tokenizers, start = self._run.tokenizers, self._run.tokenizers.target.rules.start
        longest, most = self.model.max_source_tokens, self.model.max_target_tokens
        for source, target in read_pairs(text):
            (src,), (tgt,) = tokenizers.source.encode([source]), tokenizers.target.encode([target])
            if self.model.recipe is None:  # of others' models there are only so many positions
                src, tgt = src[:longest], tgt[: None if most is None else most - len(start)]
            inputs = {
                "src": torch.tensor([[*src, tokenizers.source.eos_id]]),
                "tgt": torch.tensor([[*start, *tgt]]),
            }
            yield Window(inputs, torch.tensor([*start[1:], *tgt, tokenizers.target.eos_id]))

    def random_windows(self, seed: int) -> Iterator[Window]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(RANDOM_WINDOWS):
            window, pad = {}, self.model.pad_id
            sizes = {"src": self.model.src_vocab_size, "tgt": self.model.tgt_vocab_size}
            for side, size in sizes.items():
                ids = torch.randint(0, size, (1, 24), generator=generator)
                window[side] = ids.masked_fill(ids == pad, (pad + 1) % size)  # Marian's pad comes last
            yield Window(window, None)

    @torch.inference_mode()
    def outputs(self, window: Window) -> Tensor:
        self.seen = {}
        result: Tensor = self.model(window.inputs["src"], window.inputs["tgt"])
        return result[0]

    def attention_module(self, site: Site) -> nn.Module:
        layers = {(str(there.stack), there.block): there.layer for there in attention_sites(self.model)}
        stack = "cross" if site.kind == "cross" else "encoder" if site.stack == "encoder" else "decoder"
        return layers[stack, site.layer]
