"""Models in memory with their tokenizers: runs, converted models, and checkpoints of other libraries."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import tomli_w
import torch

from triptych.core.algebra.forms import are_finite
from triptych.core.checkpoints.source import Source, find_source
from triptych.core.checkpoints.stored_models import load_encoder_decoder, load_language_model
from triptych.core.models import EncoderDecoder, LanguageModel, write_model
from triptych.core.models.device import find_device
from triptych.core.models.storage import read_own_model
from triptych.errors import DataError, TriptychError, UsageError
from triptych.files import write_text
from triptych.literals import Precision, Stop
from triptych.running.decoding_options import SearchOptions
from triptych.running.input_limits import check_vocabulary
from triptych.running.opening.generation_config import GenerationConfig
from triptych.running.opening.run_folder import DECODING, TOKENIZER, DecodingConfig, read_decoding
from triptych.running.opening.translators import Languages, read_translator
from triptych.running.text import NumberedTokens, Tokenizer, TokenizerPair, load_tokenizer, read_tokenizer
from triptych.running.text.shortlists import Shortlist, read_shortlist
from triptych.untrusted import read_json, shown

if TYPE_CHECKING:
    from triptych.running.decoding import TextGenerator, Translator


@final
class OpenedModel:
    """A model of one stack with its tokenizer, or an encoder-decoder with two."""

    def __init__(
        self,
        name: str,
        folder: Path,
        model: LanguageModel | EncoderDecoder,
        tokenizers: Tokenizer | TokenizerPair | TriptychError,
        *,
        decoding: DecodingConfig | None = None,
        end_ids: tuple[int, ...] = (),
        begin_id: int | None = None,
        start_id: int | None = None,
        unsearched: TriptychError | None = None,
        generation: GenerationConfig | None = None,
    ) -> None:
        """Combine a model with its tokenizers, or with the error about missing tokenizers.

        `start_id` is the decoder's first token, by default the target tokenizer's. `unsearched` is the error
        raised by an encoder-decoder without a supported search.
        """
        self.name = name
        self.folder = folder
        self.model = model
        self._tokenizers = (
            _numbered(model, tokenizers) if isinstance(tokenizers, TriptychError) else tokenizers
        )
        self.unsearched, self.generation = unsearched, generation or GenerationConfig()
        self.shortlist: Shortlist | None = None
        self.ensemble: tuple[EncoderDecoder, ...] = ()  # further translators of an ensemble
        self._decoding = decoding
        self.end_ids = end_ids
        if isinstance(tokenizers, TokenizerPair) and start_id is None:
            start_id = tokenizers.target.rules.start[0]
        self.start_id = start_id
        self._begin_id = begin_id

    @property
    def has_tokenizer(self) -> bool:
        """Return True if the model can read texts as well as token ids."""
        return not isinstance(self._tokenizers, NumberedTokens)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model, or the target tokenizer of an encoder-decoder.

        A model without a tokenizer has a `NumberedTokens`: it refuses texts and shows tokens by their ids.
        """
        return self._tokenizers.target if isinstance(self._tokenizers, TokenizerPair) else self._tokenizers

    @property
    def begin_id(self) -> int | None:
        """The beginning-of-text token, which also encodes an empty text; None if the files do not name it."""
        own = self.tokenizer.bos_id
        return self._begin_id if own is None else own

    @property
    def translates(self) -> bool:
        """Return True if the model has an encoder and a decoder."""
        return isinstance(self.model, EncoderDecoder)

    @property
    def is_searched(self) -> bool:
        """Return True for an encoder-decoder with a supported search."""
        return self._decoding is not None

    @property
    def decoding(self) -> DecodingConfig:
        """The search settings of an encoder-decoder."""
        if self._decoding is None:
            raise self.unsearched or _does_not_translate(self.name)
        return self._decoding

    @property
    def tokenizers(self) -> TokenizerPair:
        """The source and target tokenizers of a translator with a supported search."""
        if not isinstance(self._tokenizers, TokenizerPair):
            raise self.unsearched or _does_not_translate(self.name)
        return self._tokenizers

    @property
    def language_model(self) -> LanguageModel:
        """The model, checked to have one stack."""
        if not isinstance(self.model, LanguageModel):
            raise UsageError(f"{self.name} translates: it has no language model; see triptych translate")
        return self.model

    @property
    def encoder_decoder(self) -> EncoderDecoder:
        """The model, checked to have two stacks."""
        if not isinstance(self.model, EncoderDecoder):
            raise _does_not_translate(self.name)
        return self.model

    def named(self, name: str) -> "OpenedModel":
        """Return the same model under another name, for records and messages."""
        changed = copy.copy(self)
        changed.name = name
        return changed

    def with_model(self, model: LanguageModel | EncoderDecoder) -> "OpenedModel":
        changed = copy.copy(self)
        changed.model = model
        return changed

    def without_tokenizer(self, why: TriptychError) -> "OpenedModel":
        """Return the same model without a tokenizer; texts raise the error `why`."""
        changed = copy.copy(self)
        changed._tokenizers = _numbered(self.model, why)
        return changed

    def with_shortlist(self, file: Path) -> "OpenedModel":
        """Return the same translator, restricted to the target tokens of a shortlist."""
        changed = copy.copy(self)
        changed.shortlist = read_shortlist(file, self.tokenizers)
        return changed

    def with_ensemble(self, others: Sequence["OpenedModel"]) -> "OpenedModel":
        """Return the same translator in an ensemble with translators of the same tokenizers."""
        own = _tokens_of(self)
        changed = copy.copy(self)
        for other in others:
            if _tokens_of(other) != own:
                raise UsageError(
                    f"{other.name} has other tokens than {self.name}: models of an ensemble share their "
                    "tokenizers, as runs of one recipe with several seeds do"
                )
        changed.ensemble = tuple(other.encoder_decoder for other in others)
        return changed

    def with_decoding(self, decoding: DecodingConfig) -> "OpenedModel":
        changed = copy.copy(self)
        changed._decoding = decoding
        return changed

    def require_recipe(self) -> None:
        """Check that the model is from a recipe or Marian, so that it can be converted."""
        if self.encoder_decoder.recipe is None:
            kind = read_json(self.folder / "config.json").get("model_type")
            raise UsageError(
                f"{self.folder} is a checkpoint of {kind}, which is run here, and not converted: of other "
                "libraries' translators only Marian's are, with scaled embeddings and feed-forward layers of "
                "one width"
            )

    def save_tokenizers(self, folder: Path) -> None:
        """Write the tokenizer files of a triptych model into its folder."""
        if isinstance(self._tokenizers, TokenizerPair):
            self._tokenizers.save(folder)
        else:
            self.tokenizer.save(folder / TOKENIZER)

    def save(self, folder: Path) -> None:
        """Write model, tokenizers and search settings into a folder, without a recipe."""
        write_model(self.encoder_decoder, folder)
        self.tokenizers.save(folder)
        write_text(folder / DECODING, tomli_w.dumps(self.decoding.model_dump()))

    def search_options(
        self,
        beam_size: int | None = None,
        alpha: float | None = None,
        num_best: int = 1,
        max_extra_tokens: int | None = None,
        stop: Stop | None = None,
        max_source_tokens: int | None = None,
    ) -> SearchOptions:
        """Return the search options: the arguments, or else the recipe's or the checkpoint's settings."""
        decoding = self.decoding
        # Without a given beam size, the beam is at least as large as the number of results.
        try:
            return SearchOptions(
                beam_size=max(decoding.beam_size, num_best) if beam_size is None else beam_size,
                alpha=decoding.alpha if alpha is None else alpha,
                max_extra_tokens=max_extra_tokens or decoding.max_extra_tokens,
                num_best=num_best,
                stop=stop or decoding.stop,
                max_source_tokens=max_source_tokens,
            )
        except ValueError as error:
            raise UsageError(str(error)) from None

    def translator(
        self, options: SearchOptions | None = None, *, precision: Precision = "fp32", workers: int = 1
    ) -> "Translator":
        """Build a translator; the default is the model's search options."""
        from triptych.running.decoding.translator import Translator

        options = options or self.search_options()
        return Translator(
            self.encoder_decoder,
            self.tokenizers,
            options,
            precision=precision,
            workers=workers,
            shortlist=self.shortlist,
            ensemble=self.ensemble,
        )

    def generator(self, *, precision: Precision = "fp32", batch_rows: int = 32) -> "TextGenerator":
        """Build a generator of continuations."""
        from triptych.running.decoding.text_generator import TextGenerator

        return TextGenerator(
            self.language_model,
            self.tokenizer,
            precision=precision,
            end_ids=self.end_ids,
            begin_id=self.begin_id,
            batch_rows=batch_rows,
        )


def _numbered(model: LanguageModel | EncoderDecoder, why: TriptychError) -> NumberedTokens:
    size = model.tgt_vocab_size if isinstance(model, EncoderDecoder) else model.vocab_size
    return NumberedTokens(size, why)


def _tokens_of(opened: OpenedModel) -> tuple[object, ...]:
    """Return the tokenizers and the output width: equal for all models of an ensemble."""
    pair = opened.tokenizers
    model = opened.encoder_decoder
    return pair.source.to_json(), pair.target.to_json(), model.head.output.out_features


def _does_not_translate(name: str) -> UsageError:
    return UsageError(f"{name} is a language model, which does not translate: see triptych generate or fill")


def open_model(
    source: str | Path | Source,
    device: str = "auto",
    dtype: torch.dtype | None = None,
    languages: Languages | None = None,
) -> OpenedModel:
    """Open a run, a converted model, a checkpoint of another library, or a model of the Hub."""
    found = find_source(source)
    opened = _open_found(found, find_device(device), dtype, languages)
    _require_finite_parameters(found, opened.model)
    return opened


def _open_found(
    found: Source, where: torch.device, dtype: torch.dtype | None, languages: Languages | None
) -> OpenedModel:
    if found.is_own:
        if languages is not None:
            raise UsageError(f"{found.name} is a run of one pair of languages: leave out --languages")
        if found.tokenizer is not None:
            raise UsageError(
                f"{found.name} is a run, which is read with its own tokenizers: leave out tokenizer"
            )
        opened = _own_translator(found) if found.translates else _own_language_model(found)
        opened.model.to(where, dtype)
        return opened
    if found.translates:
        return _others_translator(found, where, dtype, languages)
    if languages is not None:
        raise UsageError(f"{found.name} does not translate: leave out --languages")
    loaded = load_language_model(found, where, dtype)
    tokenizer = _tokenizer_in(found.tokenizer_folder, loaded.model.vocab_size)
    generation = GenerationConfig.read(loaded.folder)
    # End-of-text tokens of `generation_config.json` take precedence over `config.json` and the tokenizer.
    ends = generation.end_ids
    if not ends:
        own = None if isinstance(tokenizer, DataError) else tokenizer.eos_id
        ends = (*_end_ids(loaded.config), *(() if own is None else (own,)))
    return OpenedModel(
        found.name,
        loaded.folder,
        loaded.model,
        tokenizer,
        end_ids=ends,
        begin_id=_begin_id(generation, loaded.config, loaded.model.vocab_size),
        generation=generation,
    )


class NotFiniteError(DataError):
    """The error for weights with NaN or infinite values."""


def require_finite_tensors(source: Source) -> None:
    """Check that the tensors of a checkpoint are finite; the error names the first bad tensor."""
    tensors = source.tensors(mapped=True)
    for name, info in tensors.infos.items():
        if info.dtype.is_floating_point and not are_finite(tensor := tensors.read(name)):
            count = int((~tensor.isfinite()).sum())
            raise NotFiniteError(
                f"{source.name}: tensor {shown(name)} has {count:,} of {tensor.numel():,} numbers that are "
                "not finite (NaN or infinite): the model cannot be run"
            )


def _require_finite_parameters(source: Source, model: LanguageModel | EncoderDecoder) -> None:
    """Check that every parameter in memory is finite."""
    broken = next((name for name, part in model.named_parameters() if not are_finite(part)), None)
    if broken is None:
        return
    require_finite_tensors(source)
    raise DataError(
        f"{source.name}: numbers of {broken} are not finite in {next(model.parameters()).dtype}, though the "
        "file's are: take another dtype"
    )


def open_language_model(
    source: str | Path, device: str = "auto", dtype: torch.dtype | None = None
) -> OpenedModel:
    """Open a model with one stack; see `open_model`."""
    opened = open_model(source, device, dtype)
    check_vocabulary(opened.language_model, opened.tokenizer)
    return opened


def open_translator(
    source: str | Path, device: str = "auto", languages: Languages | None = None
) -> OpenedModel:
    """Open a model with two stacks and a supported search; see `open_model`."""
    found = find_source(source)
    if not found.translates:
        raise _does_not_translate(found.name)
    opened = open_model(found, device, None, languages)
    opened.search_options()
    return opened


def _own_translator(source: Source) -> OpenedModel:
    folder = source.folder
    model = read_own_model(folder)
    assert isinstance(model, EncoderDecoder), "its configuration says so"
    tokenizers = TokenizerPair.load(folder)
    decoding = read_decoding(folder, tokenizers)
    sizes = tokenizers.source.vocab_size, tokenizers.target.vocab_size
    if sizes != (model.src_vocab_size, model.tgt_vocab_size):
        raise DataError(
            f"{folder}: the tokenizers have {sizes[0]} and {sizes[1]} tokens, the model "
            f"{model.src_vocab_size} and {model.tgt_vocab_size}: take all files from one run"
        )
    return OpenedModel(source.name, folder, model, tokenizers, decoding=decoding)


def _own_language_model(source: Source) -> OpenedModel:
    model = read_own_model(source.folder)
    assert isinstance(model, LanguageModel), "its configuration says so"
    if not (source.folder / TOKENIZER).exists():
        why = DataError(f"a text cannot be read: the folder of {source.name} has no {TOKENIZER}")
        return OpenedModel(source.name, source.folder, model, why)
    tokenizer = read_tokenizer(source.folder / TOKENIZER)
    if tokenizer.vocab_size != model.vocab_size:
        raise DataError(
            f"{source.folder}: the tokenizer has {tokenizer.vocab_size:,} tokens, the model "
            f"{model.vocab_size:,}: take all files from one run"
        )
    ends = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    return OpenedModel(source.name, source.folder, model, tokenizer, end_ids=ends)


def _others_translator(
    source: Source, device: torch.device, dtype: torch.dtype | None, languages: Languages | None
) -> OpenedModel:
    folder = source.folder
    try:
        found = read_translator(source, device, languages)
    except (DataError, UsageError) as error:
        if languages is not None or source.record.get("model_type") == "marian":
            raise
        return _unsearched(source, device, dtype, error)
    decoding = DecodingConfig.model_validate(found.search)
    return OpenedModel(source.name, folder, found.model.to(dtype=dtype), found.tokenizers, decoding=decoding)


def _unsearched(
    source: Source, device: torch.device, dtype: torch.dtype | None, why: TriptychError
) -> OpenedModel:
    """Open an encoder-decoder without a supported search: its targets have to be given."""
    start_id = source.record.get("decoder_start_token_id")
    if not isinstance(start_id, int):
        raise why
    model = load_encoder_decoder(source, device, dtype)
    folder = source.settings_folder
    tokenizer = _tokenizer_in(source.tokenizer_folder, model.src_vocab_size)
    return OpenedModel(source.name, folder, model, tokenizer, start_id=start_id, unsearched=why)


def _tokenizer_in(folder: Path, vocab_size: int) -> Tokenizer | DataError:
    """Return a checkpoint's tokenizer, or the error: the model still runs on token ids."""
    try:
        return load_tokenizer(folder, vocab_size=vocab_size)
    except DataError as error:
        return error


def _begin_id(generation: GenerationConfig, config: Mapping[str, Any], vocab_size: int) -> int | None:
    """Return the beginning-of-text token of the checkpoint's files if it is in the vocabulary."""
    found = config.get("bos_token_id") if generation.begin_id is None else generation.begin_id
    return found if isinstance(found, int) and 0 <= found < vocab_size else None


def _end_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the end-of-text tokens of `config.json`."""
    match config.get("eos_token_id"):
        case int(one):
            return (one,)
        case list(several):
            return tuple(token for token in several if isinstance(token, int))
    return ()
