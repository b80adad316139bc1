"""Models with their tokenizers, as texts are given to them."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from triptych.attending.attention import Attention, LayerAttention, Stack
from triptych.attending.capture import AttentionKind, LayerCall, record_calls
from triptych.checkpoints.checkpoint import open_checkpoint
from triptych.checkpoints.models import load_encoder_decoder
from triptych.checkpoints.own import is_own
from triptych.decoding import GenerationOptions, TextGenerator, Translator
from triptych.decoding.batches import EvaluationMode, batches_of_like_length, padded_alike
from triptych.decoding.lengths import LONGEST_SHOWN, check_length
from triptych.decoding.text_generator import check_vocabulary
from triptych.errors import DataError, TriptychError, UsageError
from triptych.models import EncoderDecoder, LanguageModel
from triptych.models.device import find_device
from triptych.runs import OpenedModel, Run, open_text_model
from triptych.runs.folder import settings
from triptych.text import Tokenizer, load_tokenizer

# Padded tokens that a model reads at a time.
BATCH_TOKENS = 8192


class Reader(ABC):
    """A model with its tokenizer, ready to read texts.

    Attributes:
        name: the path of the model, or its id on the Hub.
        model: the model; it reads in evaluation mode and is left in the mode that it was in.
    """

    name: str
    model: LanguageModel | EncoderDecoder

    @property
    @abstractmethod
    def output_tokenizer(self) -> Tokenizer:
        """Of the tokens that the output table stands for."""

    @abstractmethod
    def read(
        self,
        texts: Sequence[str],
        targets: Sequence[str] | None = None,
        max_new_tokens: int = 0,
        max_tokens: int | None = None,
    ) -> list[Attention]:
        """The attention on texts, those of like length in one batch.

        Args:
            texts: at least one character each.
            targets: of an encoder-decoder, what its decoder reads for each text; its own translation if
                None. Not for other models.
            max_new_tokens: of a decoder, how many tokens it continues each text by at most, the most
                probable ones.
            max_tokens: of a text, those that it is continued by included; see `triptych.attend`.

        Raises:
            UsageError: a text is empty or too long, or something that this kind of model
                does not do is asked for.
        """


@final
class LanguageReader(Reader):
    """Reads with a decoder or an encoder."""

    def __init__(self, name: str, opened: OpenedModel) -> None:
        """Put a reader together.

        Raises:
            DataError: the tokenizer has tokens that the model has not.
        """
        check_vocabulary(opened.model, opened.tokenizer)
        self.name, self.tokenizer = name, opened.tokenizer
        self.model: LanguageModel = opened.model
        self._end_ids = opened.end_ids
        config = self.model.architecture.embeddings
        masked = None if config.masked is None else config.masked.padding
        choices = (config.padding_id, masked, self.tokenizer.pad_id, 0)
        self._pad_id = next(choice for choice in choices if choice is not None)

    @property
    def output_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def read(
        self,
        texts: Sequence[str],
        targets: Sequence[str] | None = None,
        max_new_tokens: int = 0,
        max_tokens: int | None = None,
    ) -> list[Attention]:
        if targets is not None:
            raise UsageError(f"{self.name} has no decoder beside its encoder: leave out the target")
        if max_new_tokens and not self.model.causal:
            raise UsageError(f"{self.name} is an encoder, which does not continue texts")
        require_text(texts)
        # An encoder's text may hold its mask token.
        ids = self.tokenizer.encode(texts, add_special=True, parse_special=not self.model.causal)
        if not max_new_tokens:
            return self.read_ids(ids, max_tokens=max_tokens)
        self._check(ids, max_tokens)
        context = self.model.context
        if context is not None:
            for which, length in _lengths(ids, "text"):
                if length >= context:
                    raise UsageError(
                        f"{which} has {length:,} tokens, which leaves no room for new ones in the "
                        f"{context:,} that the model reads at once: shorten it, or leave out max_new_tokens"
                    )
        generator = TextGenerator(self.model, self.tokenizer, end_ids=self._end_ids)
        options = GenerationOptions(max_new_tokens, max_prompt_tokens=max_tokens)
        with EvaluationMode(self.model):
            found = [new.ids for (new,) in generator.continue_tokens(ids, options)]
        if context is not None:  # the last token is read too, here
            room = [context - len(own) for own in ids]
            found = [new[:most] for new, most in zip(found, room, strict=True)]
        whole = [[*own, *new] for own, new in zip(ids, found, strict=True)]
        return self.read_ids(whole, [len(new) for new in found], max_tokens=max_tokens)

    def read_ids(
        self,
        texts: Sequence[Sequence[int]],
        num_generated: Sequence[int] | None = None,
        *,
        max_tokens: int | None = None,
    ) -> list[Attention]:
        """The attention on texts that are token ids already, those of like length in one batch.

        Args:
            texts: token ids, at least one each.
            num_generated: how many of each the model produced; none if None.
            max_tokens: of a text; see `triptych.attend`.

        Raises:
            UsageError: a text is empty or too long.
        """
        self._check(texts, max_tokens)
        counts = [0] * len(texts) if num_generated is None else num_generated
        found: list[Attention | None] = [None] * len(texts)
        lengths, limit = [len(ids) for ids in texts], self.model.rotary_limit
        batches = batches_of_like_length([[*ids] for ids in texts], BATCH_TOKENS)
        for batch in (part for whole in batches for part in padded_alike(whole, lengths, limit)):
            calls = self._run([texts[i] for i in batch])
            for row, i in enumerate(batch):
                length = lengths[i]
                tokens = tuple(self.tokenizer.pieces(texts[i]))
                own = [call.of_row(row, length, length) for call in calls]
                stack = _stack(self.model.architecture.kind, own, tokens, tokens)
                found[i] = Attention(self.name, tuple(texts[i]), tokens, counts[i], (stack,))
        return [one for one in found if one is not None]

    @torch.no_grad()
    def _run(self, texts: Sequence[Sequence[int]]) -> list[LayerCall]:
        device = self.model.embeddings.table.weight.device
        ids, mask = _padded(texts, self._pad_id, device), None
        if not self.model.causal and len({len(own) for own in texts}) > 1:
            lengths = torch.tensor([len(own) for own in texts], device=device)
            mask = (torch.arange(ids.shape[1], device=device) < lengths[:, None])[:, None, None, :]
        with EvaluationMode(self.model), record_calls(self.model) as calls:
            self.model.hidden(ids, mask=mask)
        return calls

    def _check(self, texts: Sequence[Sequence[int]], most: int | None) -> None:
        _check_lengths(texts, self.model.max_tokens, most, "text")


@final
class PairReader(Reader):
    """Reads with an encoder and a decoder."""

    def __init__(
        self,
        name: str,
        model: EncoderDecoder,
        tokenizers: "TranslatorTokens | CheckpointTokens",
    ) -> None:
        """Put a reader together."""
        self.name, self._tokens = name, tokenizers
        self.model: EncoderDecoder = model

    def read(
        self,
        texts: Sequence[str],
        targets: Sequence[str] | None = None,
        max_new_tokens: int = 0,
        max_tokens: int | None = None,
    ) -> list[Attention]:
        if max_new_tokens:
            raise UsageError(f"{self.name} has an encoder and a decoder: it translates and does not continue")
        generated = targets is None
        return self.read_ids(*self.ids_of(texts, targets), generated=generated, max_tokens=max_tokens)

    def ids_of(
        self, texts: Sequence[str], targets: Sequence[str] | None = None
    ) -> tuple[list[list[int]], list[list[int]]]:
        """What the encoder reads, and what the decoder produces: the model's own translation if not given.

        Raises:
            UsageError: a text is empty, or there are not as many targets as texts.
        """
        require_text(texts)
        if targets is not None and len(targets) != len(texts):
            raise UsageError(f"there are {len(texts)} texts and {len(targets)} targets: give one for each")
        sources = self._tokens.source(texts)
        if targets is None:
            return sources, self._tokens.translated(self.name, sources)
        return sources, self._tokens.target(targets)

    @property
    def start_id(self) -> int:
        """The token that the decoder reads first."""
        return self._tokens.start_id

    @property
    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        """Of the source and of the target."""
        return self._tokens.source_tokenizer, self._tokens.target_tokenizer

    @property
    def output_tokenizer(self) -> Tokenizer:
        return self._tokens.target_tokenizer

    def read_ids(
        self,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        *,
        generated: bool = False,
        max_tokens: int | None = None,
    ) -> list[Attention]:
        """The attention on pairs that are token ids already, those of like length in one batch.

        Args:
            sources: what the encoder reads, the end of sentence included.
            targets: what the decoder produces, the end of sentence included.
            generated: whether the model produced the targets itself.
            max_tokens: of a text or a target; see `triptych.attend`.

        Raises:
            UsageError: a text is empty or too long.
        """
        source = self.model.architecture.source
        most = source.num_positions if source.positions == "learned" else None
        _check_lengths(sources, most, max_tokens, "text")
        _check_lengths(targets, self.model.max_target_tokens, max_tokens, "target")
        found: list[Attention | None] = [None] * len(sources)
        for batch in batches_of_like_length([[*ids] for ids in sources], BATCH_TOKENS):
            calls = self._run([sources[i] for i in batch], [targets[i] for i in batch])
            for row, i in enumerate(batch):
                found[i] = self._of_row(calls, row, sources[i], targets[i], generated)
        return [one for one in found if one is not None]

    @torch.no_grad()
    def _run(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[LayerCall]:
        model, device = self.model, next(self.model.parameters()).device
        src = _padded(sources, model.pad_id, device)
        shifted = [[self._tokens.start_id, *ids[:-1]] for ids in targets]
        with EvaluationMode(model), record_calls(model) as calls:
            memory = model.encode(src)
            model.decode(_padded(shifted, model.pad_id, device), memory, model.memory_mask(src))
        return calls

    def _of_row(
        self,
        calls: Sequence[LayerCall],
        row: int,
        source: Sequence[int],
        target: Sequence[int],
        generated: bool,
    ) -> Attention:
        read = tuple(self._tokens.source_tokenizer.pieces(source))
        produced = tuple(self._tokens.target_tokenizer.pieces(target))
        # The decoder reads what it produces one place later.
        start, *_ = self._tokens.target_tokenizer.pieces([self._tokens.start_id])
        sides: dict[AttentionKind, tuple[tuple[str, ...], tuple[str, ...]]] = {
            "encoder": (read, read),
            "decoder": (produced, (start, *produced[:-1])),
            "cross": (produced, read),
        }
        stacks = []
        for kind, (queries, keys) in sides.items():
            own = [call.of_row(row, len(queries), len(keys)) for call in calls if call.kind == kind]
            stacks.append(_stack(kind, own, queries, keys))
        return Attention(
            self.name,
            tuple(target),
            produced,
            len(produced) if generated else 0,
            tuple(stacks),
            tuple(source),
            read,
        )


@final
class TranslatorTokens:
    """Tokens of a translator: a run of ours, or an encoder-decoder of others that is searched.

    Tokens that every output is forced to begin with count as produced.
    """

    def __init__(self, translator: Translator) -> None:
        """Of its tokenizers; its search translates."""
        self._translator = translator
        self.source_tokenizer: Tokenizer = translator.tokenizers.source
        self.target_tokenizer: Tokenizer = translator.tokenizers.target
        self.start_id, *self._forced = translator.tokenizers.target.rules.start

    def source(self, texts: Sequence[str]) -> list[list[int]]:
        """What the encoder reads."""
        own = self._translator.tokenizers.source
        return [[*ids, own.eos_id] for ids in own.encode([text.strip() for text in texts])]

    def target(self, texts: Sequence[str]) -> list[list[int]]:
        """What the decoder produces."""
        found = self._translator.tokenizers.target.encode([text.strip() for text in texts])
        return [self._whole(ids) for ids in found]

    def translated(self, name: str, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        """The model's own translations."""
        found = self._translator.search_tokens([[*ids[:-1]] for ids in sources])
        return [self._whole(best.ids) for best, *_ in found]

    def _whole(self, ids: Sequence[int]) -> list[int]:
        return [*self._forced, *ids, self._translator.tokenizers.target.eos_id]


@final
class CheckpointTokens:
    """Tokens of another library's encoder-decoder."""

    def __init__(self, tokenizer: Tokenizer, start_id: int) -> None:
        """One tokenizer for both sides.

        Args:
            tokenizer: of the checkpoint.
            start_id: the token that the decoder reads first.
        """
        self.source_tokenizer = self.target_tokenizer = tokenizer
        self.start_id = start_id

    def source(self, texts: Sequence[str]) -> list[list[int]]:
        """What the encoder reads."""
        return self.source_tokenizer.encode(texts, add_special=True)

    def target(self, texts: Sequence[str]) -> list[list[int]]:
        """What the decoder produces."""
        return self.target_tokenizer.encode(texts, add_special=True)

    def translated(self, name: str, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        """Refuse: only translators of ours and Marian models are searched.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{name} is not searched for a translation here: give the decoder's text (--target)")


def open_reader(path: str | Path, device: str = "auto") -> Reader:
    """The model of a run, of a folder in Hugging Face's format, or of a repository on the Hub.

    Args:
        path: the folder or the id.
        device: where the model goes; "auto" takes a GPU if there is one.

    Raises:
        UsageError: no such device.
        DataError: files missing or damaged, or a family that cannot be run; `inspect` may read it.
    """
    folder, name = Path(path), str(path)
    if folder.is_dir():
        config = settings(folder)
        ours = is_own(config) and config.get("model_type") != "triptych"  # which language models have
        if ours or config.get("model_type") == "marian":
            return reader_of(name, Run.open(folder, device))
        if config.get("is_encoder_decoder"):
            with contextlib.suppress(
                DataError, UsageError
            ):  # one that cannot be searched is read all the same
                return reader_of(name, Run.open(folder, device))
            return _pair_reader(folder, config.get("decoder_start_token_id"), device)
    try:
        return reader_of(name, open_text_model(path, device))
    except DataError as error:
        raise _with_advice(path, error) from None


def reader_of(name: str, opened: OpenedModel | Run | Translator | TextGenerator) -> Reader:
    """A reader of a model that is open already.

    Args:
        name: of the model, for messages and reports.
        opened: the model with its tokenizer.
    """
    match opened:
        case Run():
            return reader_of(name, opened.translator())
        case Translator():
            return PairReader(name, opened.model, TranslatorTokens(opened))
        case TextGenerator():
            return LanguageReader(name, OpenedModel(opened.model, opened.tokenizer, opened.end_ids))
        case _:
            return LanguageReader(name, opened)


def require_text(texts: Sequence[str], what: str = "text") -> None:
    """There is something to read.

    Raises:
        UsageError: there is no text, or one is empty.
    """
    if not texts:
        raise UsageError(f"there is no {what}: give at least one")
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            which = f"{what} {number}" if len(texts) > 1 else f"the {what}"
            raise UsageError(f"{which} is empty: give it some words")


def _pair_reader(folder: Path, start_id: object, device: str) -> Reader:
    try:
        model = load_encoder_decoder(folder, find_device(device))
    except DataError as error:
        raise _with_advice(folder, error) from None
    if not isinstance(start_id, int):
        raise DataError(f"{folder}/config.json: there is no decoder_start_token_id")
    tokenizer = load_tokenizer(folder, vocab_size=model.src_vocab_size)
    return PairReader(str(folder), model, CheckpointTokens(tokenizer, start_id))


def _with_advice(path: str | Path, error: DataError) -> DataError:
    """The error; of a checkpoint whose heads can be read, with what can be done instead."""
    try:
        can_be_inspected = Path(path).exists() and bool(open_checkpoint(Path(path)).sites)
    except TriptychError:
        can_be_inspected = False
    return DataError(f"{error}; triptych inspect can read its heads") if can_be_inspected else error


def _check_lengths(
    texts: Sequence[Sequence[int]], positions: int | None, most: int | None, what: str
) -> None:
    for which, length in _lengths(texts, what):
        check_length(which, length, positions, most, LONGEST_SHOWN, "max_tokens")


def _lengths(texts: Sequence[Sequence[int]], what: str) -> Iterator[tuple[str, int]]:
    """What each text is called in a message, and its tokens."""
    for number, ids in enumerate(texts, start=1):
        yield f"{what} {number}" if len(texts) > 1 else f"the {what}", len(ids)


def _padded(texts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> Tensor:
    rows = [torch.tensor(list(ids)) for ids in texts]
    return pad_sequence(rows, batch_first=True, padding_value=pad_id).to(device)


def _stack(
    kind: AttentionKind, calls: Sequence[LayerCall], queries: tuple[str, ...], keys: tuple[str, ...]
) -> Stack:
    return Stack(kind, queries, keys, tuple(LayerAttention(i, call) for i, call in enumerate(calls)))
