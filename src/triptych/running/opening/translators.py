"""Translators of other libraries: encoder-decoders with tokenizers and search settings.

The model is read by its family file. A Marian model with an equivalent recipe gets this recipe, so it can be
converted, rewritten and trained further. Settings not supported by the search are refused.

Source: Junczys-Dowmunt et al. 2018, arXiv 1804.00344; `modeling_marian.py`, `GenerationConfig` and the
tokenizers of github.com/huggingface/transformers, version 5.23.0.
"""

from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from triptych.core.attention import shapes_only, sinusoidal
from triptych.core.checkpoints.source import Source, find_source
from triptych.core.checkpoints.stored_models import load_encoder_decoder, off_meta
from triptych.core.models import (
    EncoderDecoder,
    FeedForwardConfig,
    ModelConfig,
    attention_sites,
)
from triptych.errors import DataError, UsageError
from triptych.running.opening.marian_tokenizers import (
    MarianIds,
    longest_source,
    read_tokenizers,
)
from triptych.running.opening.reader import Reader
from triptych.running.opening.run_folder import DecodingConfig
from triptych.running.options import Languages
from triptych.running.text.framed import (
    Frame,
    FramedTokenizer,
)
from triptych.running.text.pretrained import (
    PretrainedTokenizer,
    load_tokenizer,
)
from triptych.running.text.sentence_tokenizers import TokenizerPair
from triptych.running.text.tokenizers import OutputRules
from triptych.untrusted import read_json, validated

# Position of the language token in multilingual tokenizers, relative to the text.
_LANGUAGE_PLACES: dict[str, Literal["before", "behind"]] = {
    "MBartTokenizer": "behind",
    "MBart50Tokenizer": "before",
    "NllbTokenizer": "before",
}
# Unsupported settings, with their values without an effect.
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

_ROUNDING = (
    2**-8
)  # largest difference of equal position tables; bfloat16 rounds by up to 2⁻⁹


class _MarianSettings(MarianIds):
    """The settings used from `config.json`, in addition to the family file's."""

    max_position_embeddings: int = Field(ge=2)
    scale_embedding: bool = False
    dropout: float = Field(0.1, ge=0, lt=1)
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    activation_dropout: float = Field(0.0, ge=0, lt=1)


def read_marian(
    source: Source | Path, device: torch.device | str = "cpu"
) -> tuple[EncoderDecoder, TokenizerPair]:
    """Read the model, in evaluation mode, and its source and target tokenizers."""
    # The special tokens index both vocabularies.
    files = find_source(source)
    folder = files.settings_folder
    path = folder / "config.json"
    settings = validated(_MarianSettings, read_json(path), path)
    smallest = min(settings.vocab_size, settings.tgt_vocab_size)
    for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
        if getattr(settings, name) >= smallest:
            raise DataError(
                f"{path}: {name} {getattr(settings, name)} is outside the vocabulary of {smallest}"
            )
    longest = longest_source(folder)
    model = _with_recipe(load_encoder_decoder(files), settings, longest, path)
    return model.to(device), read_tokenizers(folder, settings)


def _with_recipe(
    model: EncoderDecoder,
    settings: _MarianSettings,
    longest: int | float | None,
    path: Path,
) -> EncoderDecoder:
    """Rebuild the model from the equivalent recipe with the same tensors; unchanged without such a recipe."""
    blocks = chain.from_iterable(
        stack.architecture.blocks for stack in model.stacks.values()
    )
    first, *others = (block.feed_forward for block in blocks)
    if not settings.scale_embedding or any(other != first for other in others):
        return model
    if not isinstance(first, FeedForwardConfig) or first.activation not in (
        "relu",
        "gelu",
        "swish",
    ):
        return model
    found = dict(model.named_parameters(remove_duplicate=False))
    bias = "decoder.head.output.bias"
    for half in model.stacks:
        rows = found.pop(f"{half}.embeddings.positions.weight", None)
        if rows is not None:
            length, width = rows.shape
            if (
                not (rows.double() - sinusoidal(length, width, "halves")).abs().max()
                <= _ROUNDING
            ):
                return model
    if bias in found and not found[bias].any():
        del found[bias]
    positions = settings.max_position_embeddings
    most = positions if longest is None else int(min(positions, longest))
    try:
        config = _recipe(
            settings, model, first, most - 1, bias in found
        )  # the end takes a position too
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise DataError(f"{path}: {message}") from None
    if config.tie_embeddings == "none" and model.architecture.shared:
        # Recipes cannot tie source and target embeddings without the output: the encoder gets a copy.
        table = "encoder.embeddings.table.weight"
        found[table] = nn.Parameter(found[table].detach().clone())
    with shapes_only():
        ours = EncoderDecoder.of(
            config, model.src_vocab_size, model.tgt_vocab_size, model.pad_id
        )
    for name, _ in [*ours.named_parameters(remove_duplicate=False)]:
        if name not in found:
            raise DataError(
                f"{path.parent}: the tensor is missing that triptych names {name}"
            )
        module, _, own = name.rpartition(".")
        setattr(ours.get_submodule(module), own, found.pop(name))
    assert not found, f"{[*found]} are in no recipe"
    return off_meta(ours).eval()


def _recipe(
    settings: _MarianSettings,
    model: EncoderDecoder,
    feed_forward: FeedForwardConfig,
    max_source_tokens: int,
    output_bias: bool,
) -> ModelConfig:
    # Marian's cross-attention has as many heads as the decoder's self-attention.
    biases = dict.fromkeys(("q_bias", "k_bias", "v_bias", "o_bias"), True)
    encoder, decoder = (
        {
            "num_heads": sites[0].layer.num_heads,
            "dropout": settings.attention_dropout,
            **biases,
        }
        for sites in (
            [site for site in attention_sites(model) if site.stack == stack]
            for stack in model.stacks
        )
    )
    tie = "all" if model.architecture.shared else "target"
    return ModelConfig.model_validate(
        {
            "d_model": model.architecture.decoder.d_model,
            "d_ff": feed_forward.d_ff,
            "num_heads": encoder["num_heads"],
            "dropout": settings.dropout,
            "activation_dropout": settings.activation_dropout,
            "activation": feed_forward.activation,
            "norm": "post",
            "tie_embeddings": tie if model.head.config.tied else "none",
            "output_bias": output_bias,
            "max_source_tokens": max_source_tokens,
            "positions": {"scheme": "sinusoidal", "sinusoidal_layout": "halves"},
            "encoder": {"num_layers": len(model.encoder.blocks), "attention": encoder},
            "decoder": {
                "num_layers": len(model.decoder.blocks),
                "attention": decoder,
                "cross_attention": decoder,
            },
        }
    )


class _Generation(BaseModel):
    """The settings used from `generation_config.json`, or from `config.json` if it is missing."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    decoder_start_token_id: int | None = Field(None, ge=0)
    bos_token_id: int | None = Field(None, ge=0)
    eos_token_id: int | list[int] | None = None
    forced_bos_token_id: int | None = Field(None, ge=0)
    bad_words_ids: list[list[int]] | None = None
    min_length: int | None = Field(None, ge=0)
    no_repeat_ngram_size: int | None = Field(None, ge=0)
    num_beams: int | None = Field(None, ge=1, le=10_000)
    length_penalty: float | None = Field(None, ge=0, le=10)
    early_stopping: bool | str | None = None


def read_translator(
    source: Source | Path,
    device: torch.device | str = "cpu",
    languages: Languages | None = None,
) -> Reader:
    """Read an encoder-decoder with its tokenizers and search settings."""
    files = find_source(source)
    folder = files.settings_folder
    if (
        languages is None
        and read_json(folder / "config.json").get("model_type") == "marian"
    ):
        if files.tokenizer is not None:
            raise UsageError(
                f"{files.name} is a Marian translator, which has two tokenizers: leave out tokenizer"
            )
        return _read_marian(files, device)
    model = load_encoder_decoder(files, device)
    if model.decoder.head is None:
        raise UsageError(
            f"{files.name} has the head of a task and predicts no tokens: it does not translate"
        )
    tokenizer = load_tokenizer(
        files.tokenizer_folder,
        vocab_size=min(model.src_vocab_size, model.tgt_vocab_size),
    )
    generation = _read_generation(folder)
    reads, writes, start = _frames(folder, tokenizer, generation, languages)
    if not reads.after:
        raise DataError(
            f"{folder}: its tokenizer puts nothing behind a text, so that a source has no end"
        )
    end = _end_token(generation, folder)
    rules = OutputRules(
        start=start,
        end=end,
        never=(
            *_banned_tokens(generation, folder),
            *range(tokenizer.vocab_size, model.tgt_vocab_size),
        ),
        min_length=generation.min_length or 0,
        no_repeat=generation.no_repeat_ngram_size or 0,
    )
    # Forced first tokens are part of `start`, so the target frame must not repeat them.
    forced = start[1:]
    before = (
        writes.before[len(forced) :]
        if writes.before[: len(forced)] == forced
        else writes.before
    )
    pair = TokenizerPair(
        FramedTokenizer(tokenizer, reads, model.pad_id, rules),
        FramedTokenizer(tokenizer, Frame(before, (end,)), model.pad_id, rules),
    )
    return _searched(files, model, pair, generation)


def _searched(
    source: Source,
    model: EncoderDecoder,
    tokenizers: TokenizerPair,
    generation: _Generation,
) -> Reader:
    """Return the reader of a translator with the search settings of its files."""
    penalty = generation.length_penalty
    search: dict[str, Any] = {"alpha": 1.0 if penalty is None else penalty}
    if generation.num_beams is not None:
        search["beam_size"] = generation.num_beams
    if generation.early_stopping is True:
        search["stop"] = "full"
    decoding = DecodingConfig.model_validate(search)
    return Reader(
        source.name, source.settings_folder, model, tokenizers, decoding=decoding
    )


def _read_marian(files: Source, device: torch.device | str) -> Reader:
    """Read a Marian checkpoint and refuse search settings not supported by its tokenizers."""
    model, tokenizers = read_marian(files, device)
    folder = files.settings_folder
    generation = _read_generation(folder)
    # Marian's output rules already exclude padding and the decoder's first token.
    kept_out = (model.pad_id, tokenizers.target.bos_id)
    for name in ("min_length", "no_repeat_ngram_size", "forced_bos_token_id"):
        if getattr(generation, name):
            raise DataError(
                f"{folder}: {name} is not followed in searches with a Marian model: take it out"
            )
    if others := {*_banned_tokens(generation, folder)} - {*kept_out}:
        raise DataError(
            f"{folder}: bad_words_ids has {[min(others)]}; only the padding and the token that outputs begin "
            "with can be kept out of them"
        )
    return _searched(files, model, tokenizers, generation)


def _read_generation(folder: Path) -> _Generation:
    config = read_json(folder / "config.json")
    path = folder / "generation_config.json"
    record = read_json(path) if path.exists() else config
    path = path if path.exists() else folder / "config.json"
    for name, neutral in _NEUTRAL.items():
        value = record.get(name)
        if value is not None and value not in neutral:
            raise DataError(
                f"{path}: {name} is {value!r}, which the search here does not follow: take it out"
            )
    # Ids missing in `generation_config.json` are taken from `config.json`.
    ids = {
        name: config.get(name)
        for name in ("decoder_start_token_id", "bos_token_id", "eos_token_id")
    }
    return validated(_Generation, {**ids, **record}, path)


def _frames(
    folder: Path,
    tokenizer: PretrainedTokenizer,
    generation: _Generation,
    languages: Languages | None,
) -> tuple[Frame, Frame, tuple[int, ...]]:
    """Return the frames of source and target, and the decoder's first tokens."""
    # The decoder's first tokens are the start token and an optional forced first token of the output.
    own = Frame.of(tokenizer)
    first = generation.decoder_start_token_id
    name, place = _language_place(folder)
    if languages is None:
        start = generation.bos_token_id if first is None else first
        if start is None:
            raise DataError(
                f"{folder}/config.json: add decoder_start_token_id, with which outputs begin"
            )
        forced = generation.forced_bos_token_id
        named = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
        if place is not None and forced is None and start in named:
            raise UsageError(
                f"{folder} translates between languages: name them (--languages SOURCE TARGET)"
            )
        return own, own, (start,) if forced is None else (start, forced)
    if place is None:
        raise UsageError(
            f"{folder}: its tokenizer ({name}) has no languages to choose: leave out --languages"
        )
    source, target = (_token_of(tokenizer, language, folder) for language in languages)
    end = (_end_token(generation, folder),)
    if place == "behind":
        return Frame((), (*end, source)), Frame((), end), (target,)
    if first is None:
        raise DataError(
            f"{folder}/config.json: add decoder_start_token_id, with which outputs begin"
        )
    return Frame((source,), end), Frame((target,), end), (first, target)


def _language_place(folder: Path) -> tuple[str, Literal["before", "behind"] | None]:
    """Return the tokenizer class of a folder and the position of its language token, or None."""
    path = folder / "tokenizer_config.json"
    record = read_json(path) if path.exists() else {}
    name = str(record.get("tokenizer_class", "of no class")).removesuffix("Fast")
    return name, "behind" if record.get(
        "legacy_behaviour"
    ) is True else _LANGUAGE_PLACES.get(name)


def _token_of(tokenizer: PretrainedTokenizer, language: str, folder: Path) -> int:
    vocabulary = tokenizer.vocabulary
    for token in sorted(tokenizer.special_ids):
        if vocabulary[token] == language:
            return token
    known = [
        vocabulary[token]
        for token in sorted(tokenizer.special_ids)
        if "_" in vocabulary[token]
    ]
    shown = ", ".join(known[:6]) + (", …" if len(known) > 6 else "")
    raise UsageError(
        f"{folder} has no language {language!r}: its languages are {shown or 'none'}"
    )


def _end_token(generation: _Generation, folder: Path) -> int:
    match generation.eos_token_id:
        case int(end) | [int(end)]:
            return end
        case _:
            raise DataError(
                f"{folder}: eos_token_id is {generation.eos_token_id}: one token has to end outputs"
            )


def _banned_tokens(generation: _Generation, folder: Path) -> tuple[int, ...]:
    """Return the tokens of `bad_words_ids`, excluded from outputs."""
    words = generation.bad_words_ids or []
    if long := [word for word in words if len(word) != 1]:
        raise DataError(
            f"{folder}: bad_words_ids has {long[0]}: only single tokens can be kept out of outputs"
        )
    return tuple(token for (token,) in words)
