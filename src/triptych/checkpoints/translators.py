"""Encoder-decoders of other libraries with their tokenizers, ready to be searched: BART, mBART, Pegasus, T5.

The model is read by its family file (`models.read_encoder_decoder`). Here is what its search has to know: how
a source is framed, what the decoder begins with, and what `generation_config.json` asks of an output. A
setting that our search does not follow is refused by name.

Source: `GenerationConfig` and the tokenizers of github.com/huggingface/transformers, version 5.23.0.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, final

import torch
from pydantic import BaseModel, ConfigDict, Field

from triptych.checkpoints.marian import read_marian
from triptych.checkpoints.models import load_encoder_decoder
from triptych.errors import DataError, UsageError
from triptych.models import EncoderDecoder
from triptych.storage.untrusted import read_json, validated
from triptych.text import (
    Frame,
    FramedTokenizer,
    OutputRules,
    PretrainedTokenizer,
    TokenizerPair,
    load_tokenizer,
)

# Where tokenizers of several languages put the language's token: before a text, or behind its end.
_LANGUAGE_STANDS: dict[str, Literal["before", "behind"]] = {
    "MBartTokenizer": "behind",
    "MBart50Tokenizer": "before",
    "NllbTokenizer": "before",
}
# Settings that change outputs, and the values with which they do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "do_sample": (False,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "penalty_alpha": (0.0,),
    "min_new_tokens": (0,),
    "exponential_decay_length_penalty": (),
    "sequence_bias": (),
    "force_words_ids": (),
    "constraints": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_decoder_ids": ([],),
    "guidance_scale": (1.0,),
}


class Languages(NamedTuple):
    """The languages of a translation, as a checkpoint's tokenizer writes them: "de_DE", "deu_Latn", "de"."""

    source: str  # of the text
    target: str  # of its translation


class _Generation(BaseModel):
    """What is read of `generation_config.json`, or of `config.json` where that is missing."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    decoder_start_token_id: int | None = Field(None, ge=0)
    bos_token_id: int | None = Field(None, ge=0)
    eos_token_id: int | list[int] | None = None
    forced_bos_token_id: int | None = Field(None, ge=0)
    bad_words_ids: list[list[int]] | None = None
    min_length: int | None = Field(None, ge=0)
    no_repeat_ngram_size: int | None = Field(None, ge=0)
    num_beams: int | None = Field(None, ge=1)
    length_penalty: float | None = Field(None, ge=0, le=10)
    early_stopping: bool | str | None = None


@final
@dataclass(frozen=True)
class TranslatorCheckpoint:
    """An encoder-decoder with its tokenizers, and how its files want it to be searched."""

    model: EncoderDecoder  # in evaluation mode
    tokenizers: TokenizerPair  # of both sides
    num_beams: int | None  # with how many beams it is to be searched; None if its files do not say
    length_penalty: float  # the exponent of the length by which scores are to be divided
    stops_when_full: bool  # whether the search ends when so many hypotheses have ended


def read_translator(
    folder: Path, device: torch.device | str = "cpu", languages: Languages | None = None
) -> TranslatorCheckpoint:
    """Read an encoder-decoder of a family that is run."""
    if languages is None and read_json(folder / "config.json").get("model_type") == "marian":
        return _read_marian(folder, device)
    model = load_encoder_decoder(folder, device)
    tokenizer = load_tokenizer(folder, vocab_size=min(model.src_vocab_size, model.tgt_vocab_size))
    generation = _read_generation(folder)
    source, target, start = _frames(folder, tokenizer, generation, languages)
    if not source.after:
        raise DataError(f"{folder}: its tokenizer puts nothing behind a text, so that a source has no end")
    end = _end_of(generation, folder)
    rules = OutputRules(
        start=start,
        end=end,
        never=(*_never(generation, folder), *range(tokenizer.vocab_size, model.tgt_vocab_size)),
        min_length=generation.min_length or 0,
        no_repeat=generation.no_repeat_ngram_size or 0,
    )
    forced = start[1:]
    before = target.before[len(forced) :] if target.before[: len(forced)] == forced else target.before
    pair = TokenizerPair(
        FramedTokenizer(tokenizer, source, model.pad_id, rules),
        FramedTokenizer(tokenizer, Frame(before, (end,)), model.pad_id, rules),
    )
    return _searched(model, pair, generation)


def _searched(
    model: EncoderDecoder, tokenizers: TokenizerPair, generation: _Generation
) -> TranslatorCheckpoint:
    return TranslatorCheckpoint(
        model,
        tokenizers,
        generation.num_beams,
        1.0 if generation.length_penalty is None else generation.length_penalty,
        generation.early_stopping is True,
    )


def _read_marian(folder: Path, device: torch.device | str) -> TranslatorCheckpoint:
    """A checkpoint whose tokenizers keep padding and the first token of the decoder out of outputs."""
    model, tokenizers = read_marian(folder, device)
    generation, kept_out = _read_generation(folder), (model.pad_id, tokenizers.target.bos_id)
    for name in ("min_length", "no_repeat_ngram_size", "forced_bos_token_id"):
        if getattr(generation, name):
            raise DataError(f"{folder}: {name} is not followed in searches with a Marian model: take it out")
    if others := {*_never(generation, folder)} - {*kept_out}:
        raise DataError(
            f"{folder}: bad_words_ids has {[min(others)]}; only the padding and the token that outputs begin "
            "with can be kept out of them"
        )
    return _searched(model, tokenizers, generation)


def _read_generation(folder: Path) -> _Generation:
    """How outputs are to be searched for."""
    config, path = read_json(folder / "config.json"), folder / "generation_config.json"
    record = read_json(path) if path.exists() else config
    path = path if path.exists() else folder / "config.json"
    for name, neutral in _NEUTRAL.items():
        value = record.get(name)
        if value is not None and value not in neutral:
            raise DataError(
                f"{path}: {name} is {value!r}, which the search here does not follow: take it out"
            )
    # Ids that only `config.json` has hold as well.
    ids = {name: config.get(name) for name in ("decoder_start_token_id", "bos_token_id", "eos_token_id")}
    return validated(_Generation, {**ids, **record}, path)


def _frames(
    folder: Path, tokenizer: PretrainedTokenizer, generation: _Generation, languages: Languages | None
) -> tuple[Frame, Frame, tuple[int, ...]]:
    """What stands around a source and around a target, and what the decoder reads first."""
    own, first = Frame.of(tokenizer), generation.decoder_start_token_id
    name, stands = _language_place(folder)
    if languages is None:
        start = generation.bos_token_id if first is None else first
        if start is None:
            raise DataError(f"{folder}/config.json: there is no decoder_start_token_id")
        forced = generation.forced_bos_token_id
        named = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
        if stands is not None and forced is None and start in named:
            raise UsageError(f"{folder} translates between languages: name them (--languages SOURCE TARGET)")
        return own, own, (start,) if forced is None else (start, forced)
    if stands is None:
        raise UsageError(
            f"{folder}: its tokenizer ({name}) has no languages to choose: leave out --languages"
        )
    source, target = (_token_of(tokenizer, language, folder) for language in languages)
    end = (_end_of(generation, folder),)
    if stands == "behind":
        return Frame((), (*end, source)), Frame((), end), (target,)
    if first is None:
        raise DataError(f"{folder}/config.json: there is no decoder_start_token_id")
    return Frame((source,), end), Frame((target,), end), (first, target)


def _language_place(folder: Path) -> tuple[str, Literal["before", "behind"] | None]:
    """The class of a folder's tokenizer, and where it puts the token of a language; None for nowhere."""
    path = folder / "tokenizer_config.json"
    record = read_json(path) if path.exists() else {}
    name = str(record.get("tokenizer_class", "of no class")).removesuffix("Fast")
    return name, "behind" if record.get("legacy_behaviour") is True else _LANGUAGE_STANDS.get(name)


def _token_of(tokenizer: PretrainedTokenizer, language: str, folder: Path) -> int:
    """The token of a language."""
    vocabulary = tokenizer.vocabulary
    for token in sorted(tokenizer.special_ids):
        if vocabulary[token] == language:
            return token
    known = [vocabulary[token] for token in sorted(tokenizer.special_ids) if "_" in vocabulary[token]]
    shown = ", ".join(known[:6]) + (", …" if len(known) > 6 else "")
    raise UsageError(f"{folder} has no language {language!r}: its languages are {shown or 'none'}")


def _end_of(generation: _Generation, folder: Path) -> int:
    """The token that ends an output."""
    match generation.eos_token_id:
        case int(end) | [int(end)]:
            return end
        case _:
            raise DataError(
                f"{folder}: eos_token_id is {generation.eos_token_id}: one token has to end outputs"
            )


def _never(generation: _Generation, folder: Path) -> tuple[int, ...]:
    """Tokens that no output is to have."""
    words = generation.bad_words_ids or []
    if long := [word for word in words if len(word) != 1]:
        raise DataError(
            f"{folder}: bad_words_ids has {long[0]}: only single tokens can be kept out of outputs"
        )
    return tuple(token for (token,) in words)
