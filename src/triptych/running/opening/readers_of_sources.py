"""Opening of readers: runs, converted models, and checkpoints of other libraries."""

from pathlib import Path

import torch

from triptych.core.algebra.forms import are_finite
from triptych.core.checkpoints.made_files import MadeFiles
from triptych.core.checkpoints.source import Source, find_source
from triptych.core.checkpoints.stored_models import (
    load_encoder_decoder,
    load_language_model,
)
from triptych.core.models import (
    AnyModel,
    EncoderDecoder,
    LanguageModel,
    find_device,
    read_own_model,
)
from triptych.errors import DataError, TriptychError, UsageError
from triptych.running.input_limits import check_vocabulary
from triptych.running.opening.generation_config import (
    GenerationConfig,
    begin_id,
    end_ids,
)
from triptych.running.opening.reader import Reader, translates_not
from triptych.running.opening.run_folder import TOKENIZER, read_decoding
from triptych.running.opening.translators import read_translator
from triptych.running.options import Languages
from triptych.running.text.pretrained import (
    load_tokenizer,
    read_tokenizer,
)
from triptych.running.text.sentence_tokenizers import TokenizerPair
from triptych.running.text.tokenizers import Tokenizer
from triptych.untrusted import shown


def open_reader(
    source: str | Path | Source,
    device: str = "auto",
    dtype: torch.dtype | None = None,
    languages: Languages | None = None,
) -> Reader:
    """Open a run, a converted model, a checkpoint of another library, or a model of the Hub."""
    found = find_source(source)
    where = find_device(device)
    if found.module is not None:
        return _of_module(found, where, dtype)
    reader = _open_found(found, where, dtype, languages)
    _require_finite_parameters(found, reader.model)
    # A model of another form without a tokenizer runs on token ids only.
    if isinstance(found.found, MadeFiles) and not found.found.has_tokenizer:
        why = UsageError(
            f"{found.name} has no tokenizer: load(model, tokenizer=…) reads texts"
        )
        return reader.without_tokenizer(why)
    return reader


def _of_module(
    source: Source, where: torch.device, dtype: torch.dtype | None
) -> Reader:
    """Return the reader of a module of this library in memory; it stays the same module."""
    model: AnyModel = source.module.to(where, dtype)
    folder = source.tokenizer
    if folder is None:
        why = UsageError(
            f"{source.name} has no tokenizer: load(module, tokenizer=FOLDER) reads texts"
        )
        if isinstance(model, EncoderDecoder):
            raise why
        return Reader(source.name, Path(), model, why)
    tokenizers: Tokenizer | TokenizerPair = (
        TokenizerPair.load(folder)
        if isinstance(model, EncoderDecoder)
        else load_tokenizer(folder, vocab_size=model.vocab_size)
    )
    return Reader(source.name, folder, model, tokenizers)


def _open_found(
    found: Source,
    where: torch.device,
    dtype: torch.dtype | None,
    languages: Languages | None,
) -> Reader:
    if found.is_own:
        if languages is not None:
            raise UsageError(
                f"{found.name} is a run of one pair of languages: leave out --languages"
            )
        if found.tokenizer is not None:
            raise UsageError(
                f"{found.name} is a run, which is read with its own tokenizers: leave out tokenizer"
            )
        reader = (
            _own_translator(found) if found.translates else _own_language_model(found)
        )
        reader.model.to(where, dtype)
        return reader
    if found.translates:
        return _others_translator(found, where, dtype, languages)
    if languages is not None:
        raise UsageError(f"{found.name} does not translate: leave out --languages")
    model = load_language_model(found, where, dtype)
    tokenizer = _tokenizer_in(found.tokenizer_folder, model.vocab_size)
    generation = GenerationConfig.read(found.settings_folder)
    readable = None if isinstance(tokenizer, DataError) else tokenizer
    first = begin_id(generation, found.record)
    return Reader(
        found.name,
        found.settings_folder,
        model,
        tokenizer,
        end_ids=end_ids(generation, found.record, readable),
        begin_id=None if first is None or not 0 <= first < model.vocab_size else first,
        generation=generation,
    )


class NotFiniteError(DataError):
    """The error for weights with NaN or infinite values."""


def require_finite_tensors(source: Source) -> None:
    """Check that the tensors of a checkpoint are finite; the error names the first bad tensor."""
    tensors = source.tensors(mapped=True)
    for name, info in tensors.infos.items():
        if info.dtype.is_floating_point and not are_finite(
            tensor := tensors.read(name)
        ):
            count = int((~tensor.isfinite()).sum())
            raise NotFiniteError(
                f"{source.name}: tensor {shown(name)} has {count:,} of {tensor.numel():,} numbers that are "
                "not finite (NaN or infinite): the model cannot be run"
            )


def _require_finite_parameters(source: Source, model: AnyModel) -> None:
    """Check that every parameter in memory is finite."""
    broken = next(
        (name for name, part in model.named_parameters() if not are_finite(part)), None
    )
    if broken is None:
        return
    require_finite_tensors(source)
    raise DataError(
        f"{source.name}: numbers of {broken} are not finite in {next(model.parameters()).dtype}, though the "
        "file's are: take another dtype"
    )


def open_language_model(
    source: str | Path, device: str = "auto", dtype: torch.dtype | None = None
) -> Reader:
    """Open a model with one stack; see `open_reader`."""
    reader = open_reader(source, device, dtype)
    check_vocabulary(reader.language_model, reader.tokenizer)
    return reader


def open_translator(
    source: str | Path | Source,
    device: str = "auto",
    languages: Languages | None = None,
) -> Reader:
    """Open a model with two stacks and a supported search; see `open_reader`."""
    found = find_source(source)
    if not found.translates:
        raise translates_not(found.name)
    reader = open_reader(found, device, None, languages)
    reader.search_options()
    return reader


def _own_translator(source: Source) -> Reader:
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
    return Reader(source.name, folder, model, tokenizers, decoding=decoding)


def _own_language_model(source: Source) -> Reader:
    model = read_own_model(source.folder)
    assert isinstance(model, LanguageModel), "its configuration says so"
    if not (source.folder / TOKENIZER).exists():
        why = DataError(
            f"a text cannot be read: the folder of {source.name} has no {TOKENIZER}"
        )
        return Reader(source.name, source.folder, model, why)
    tokenizer = read_tokenizer(source.folder / TOKENIZER)
    if tokenizer.vocab_size != model.vocab_size:
        raise DataError(
            f"{source.folder}: the tokenizer has {tokenizer.vocab_size:,} tokens, the model "
            f"{model.vocab_size:,}: take all files from one run"
        )
    ends = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    return Reader(source.name, source.folder, model, tokenizer, end_ids=ends)


def _others_translator(
    source: Source,
    device: torch.device,
    dtype: torch.dtype | None,
    languages: Languages | None,
) -> Reader:
    try:
        reader = read_translator(source, device, languages)
    except (DataError, UsageError) as error:
        if languages is not None or source.record.get("model_type") == "marian":
            raise
        return _unsearched(source, device, dtype, error)
    reader.model.to(dtype=dtype)
    return reader


def _unsearched(
    source: Source, device: torch.device, dtype: torch.dtype | None, why: TriptychError
) -> Reader:
    """Open an encoder-decoder without a supported search: its targets have to be given."""
    start_id = source.record.get("decoder_start_token_id")
    if start_id is None and isinstance(own := source.record.get("decoder"), dict):
        start_id = own.get("bos_token_id")  # T5Gemma has it nowhere else
    model = load_encoder_decoder(source, device, dtype)
    task = model.decoder.task
    # The decoder of some heads begins with the last token of its text.
    if not isinstance(start_id, int) and not (task is not None and task.config.wraps):
        if source.family is None:
            raise why
        raise DataError(
            f"{source.where}: there is no decoder_start_token_id, the token that every target begins with: "
            "add it"
        )
    folder = source.settings_folder
    tokenizer = _tokenizer_in(source.tokenizer_folder, model.src_vocab_size)
    return Reader(
        source.name, folder, model, tokenizer, start_id=start_id, unsearched=why
    )


def _tokenizer_in(folder: Path, vocab_size: int) -> Tokenizer | DataError:
    """Return a checkpoint's tokenizer, or the error: the model still runs on token ids."""
    try:
        return load_tokenizer(folder, vocab_size=vocab_size)
    except DataError as error:
        return error
