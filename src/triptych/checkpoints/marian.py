"""Marian checkpoints in Hugging Face's format (`MarianMTModel`): a folder becomes a model with tokenizers.

Of the folder are read `config.json`, `generation_config.json`, `tokenizer_config.json`,
`special_tokens_map.json`, the weights (`tensors.open_tensors`), `source.spm`, `target.spm`,
`vocab.json` and `target_vocab.json`, as far as they are there; in place of the last four, tokenizers of
ours as `marian_writing` leaves them. Nothing is cast: the model has the dtype
of the file.

Source: Junczys-Dowmunt et al. 2018, arXiv 1804.00344; `modeling_marian.py` and `tokenization_marian.py`
of github.com/huggingface/transformers, version 5.23.0.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from pydantic import ValidationError
from torch import Tensor

from triptych.attention import sinusoidal
from triptych.checkpoints.marian_names import (
    OUTPUT,
    OUTPUT_BIAS,
    POSITIONS,
    SHARED,
    SOURCE,
    TARGET,
    layer_tensors,
)
from triptych.checkpoints.marian_settings import (
    MARIAN_ACTIVATIONS,
    MarianSettings,
    read_generation,
    read_tokenizer_settings,
    validated,
)
from triptych.checkpoints.marian_tokenizers import read_tokenizers
from triptych.checkpoints.models import load_encoder_decoder
from triptych.errors import DataError
from triptych.models import (
    AttentionConfig,
    DecoderConfig,
    EncoderConfig,
    EncoderDecoder,
    ModelConfig,
    PositionsConfig,
)
from triptych.models.storage import load_tensors
from triptych.storage.tensors import Tensors, open_tensors
from triptych.storage.untrusted import read_json
from triptych.text import TokenizerPair

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@final
@dataclass(frozen=True)
class MarianCheckpoint:
    """A checkpoint that was read.

    Attributes:
        model: in evaluation mode.
        tokenizers: of both sides; the same object twice where the two are the same.
        num_beams: with how many beams the checkpoint wants to be searched; None if it does not say.
        length_penalty: the exponent of the length by which it wants scores divided. Our penalty,
            `((5 + n) / 6)^α`, with the same exponent comes closest.
    """

    model: EncoderDecoder
    tokenizers: TokenizerPair
    num_beams: int | None
    length_penalty: float


def model_type(folder: Path) -> str | None:
    """The architecture that a folder's `config.json` names in Hugging Face's way; None without one."""
    path = folder / "config.json"
    found = read_json(path).get("model_type") if path.exists() else None
    return found if isinstance(found, str) else None


def read_marian(folder: Path) -> MarianCheckpoint:
    """Read a checkpoint."""
    config_path = folder / "config.json"
    record = read_json(config_path)
    settings = validated(MarianSettings, record, config_path)
    if reason := settings.unfit():
        raise DataError(f"{config_path}: {reason}")
    generation = read_generation(folder, record, settings)
    if settings.has_recipe:
        # The sizes of config.json are held against those of the tensors before anything is made after them.
        model = _model(settings, _max_source_tokens(folder, settings), open_tensors(folder), config_path)
    else:
        model = load_encoder_decoder(folder)
    return MarianCheckpoint(
        model,
        read_tokenizers(folder, settings),
        generation.num_beams,
        generation.length_penalty,
    )


def _max_source_tokens(folder: Path, settings: MarianSettings) -> int:
    """The longest source: the end of the sentence takes a position too."""
    longest = read_tokenizer_settings(folder).model_max_length
    positions = settings.max_position_embeddings
    return (positions if longest is None else int(min(positions, longest))) - 1


def _model(
    settings: MarianSettings, max_source_tokens: int, tensors: Tensors, config_path: Path
) -> EncoderDecoder:
    """The model; every tensor of the file is in it, or known to say nothing new."""
    left = _Tensors(tensors)
    ours: dict[str, Tensor] = {}
    # In the order of the layers, and before a model is made: a number of layers that is far too large
    # ends at the first that is not there.
    for expected in layer_tensors(settings):
        ours[expected.ours] = left.take(expected.theirs, expected.shape)
    source, target, output = _tables(settings, left)
    ours["tgt_embedding.weight"] = target
    if not settings.share_encoder_decoder_embeddings or not settings.tie_word_embeddings:
        ours["src_embedding.weight"] = source
    if not settings.tie_word_embeddings:
        ours["output.weight"] = output
    bias = left.take_if_there(OUTPUT_BIAS, (1, settings.tgt_vocab_size))
    if bias is not None and bias.any():
        ours["output.bias"] = bias[0]
    _check_positions(settings, left)
    left.check_empty()
    try:
        config = _model_config(settings, max_source_tokens, "output.bias" in ours)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise DataError(f"{config_path}: {message}") from None
    with torch.random.fork_rng(devices=[]):  # fresh weights are drawn only to be overwritten
        model = EncoderDecoder.of(config, settings.vocab_size, settings.tgt_vocab_size, settings.pad_token_id)
    model = model.to(target.dtype)
    load_tensors(model, ours, tensors.name)
    return model.eval()


def _model_config(settings: MarianSettings, max_source_tokens: int, output_bias: bool) -> ModelConfig:
    """Our configuration of the same model."""
    biases = dict.fromkeys(("q_bias", "k_bias", "v_bias", "o_bias"), True)

    def site(num_heads: int) -> AttentionConfig:
        return AttentionConfig.model_validate(
            {"num_heads": num_heads, "dropout": settings.attention_dropout, **biases}
        )

    tie = "target" if not settings.share_encoder_decoder_embeddings else "all"
    of_encoder, of_decoder = site(settings.encoder_attention_heads), site(settings.decoder_attention_heads)
    return ModelConfig.model_validate(
        {
            "d_model": settings.d_model,
            "d_ff": settings.encoder_ffn_dim,
            "num_heads": settings.encoder_attention_heads,
            "dropout": settings.dropout,
            "activation_dropout": settings.activation_dropout,
            "activation": MARIAN_ACTIVATIONS[settings.activation_function],
            "norm": "post",
            "tie_embeddings": tie if settings.tie_word_embeddings else "none",
            "output_bias": output_bias,
            "max_source_tokens": max_source_tokens,
            "positions": PositionsConfig(scheme="sinusoidal", sinusoidal_layout="halves"),
            "encoder": EncoderConfig(num_layers=settings.encoder_layers, attention=of_encoder),
            "decoder": DecoderConfig(
                num_layers=settings.decoder_layers, attention=of_decoder, cross_attention=of_decoder
            ),
        }
    )


def _tables(settings: MarianSettings, left: "_Tensors") -> tuple[Tensor, Tensor, Tensor]:
    """The embeddings of source and target, and the output's weight.

    Where the configuration says that some are one, one of them is enough, and others are copies of it.
    Where it ties nothing, each stack may have its own.
    """
    of_source = settings.vocab_size, settings.d_model
    of_target = settings.tgt_vocab_size, settings.d_model
    of_output = [OUTPUT] if settings.tie_word_embeddings else []
    if settings.share_encoder_decoder_embeddings and not settings.tie_word_embeddings:
        shared = left.take_if_there(SHARED, of_source)
        own = (left.take_if_there(name, of_source) for name in (SOURCE, TARGET))
        source, target = (shared if table is None else table for table in own)
        if source is None or target is None:
            raise DataError(f"{left.path}: {SHARED} is missing; config.json calls for {list(of_source)}")
    elif settings.share_encoder_decoder_embeddings:
        source = target = left.take_one_of([SHARED, SOURCE, TARGET, OUTPUT], of_source)
    else:
        source = left.take(SOURCE, of_source)
        target = left.take_one_of([TARGET, *of_output], of_target)
    return source, target, target if of_output else left.take(OUTPUT, of_target)


def _check_positions(settings: MarianSettings, left: "_Tensors") -> None:
    """Sinusoidal tables need not be read, if that is what they are."""
    shape = settings.max_position_embeddings, settings.d_model
    for name in POSITIONS:
        table = left.take_if_there(name, shape)
        if table is None:
            continue
        off = (table.double() - sinusoidal(*shape, "halves")).abs().max()
        # The rounding of a table in bfloat16 is 2⁻⁹.
        if not off <= 2**-8:
            raise DataError(
                f"{left.path}: {name} is not the table of sinusoidal positions (it is off by {off:.3g}): "
                "other positions cannot be read"
            )


@final
class _Tensors:
    """The tensors of a file that have not been accounted for."""

    def __init__(self, tensors: Tensors) -> None:
        self.path = tensors.name
        self._left = {name: tensors.read(name) for name in tensors.infos}
        self._dtype: torch.dtype | None = None

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found = self.take_if_there(name, shape)
        if found is None:
            raise DataError(f"{self.path}: {name} is missing; config.json calls for {list(shape)}")
        return found

    def take_if_there(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        found = self._left.pop(name, None)
        if found is None:
            return None
        if tuple(found.shape) != shape:
            raise DataError(
                f"{self.path}: {name} is {list(found.shape)}, config.json calls for {list(shape)}"
            )
        if found.dtype not in _DTYPES or (self._dtype is not None and found.dtype != self._dtype):
            raise DataError(
                f"{self.path}: {name} is {found.dtype}, others {self._dtype or _DTYPES[0]}: "
                "convert the file first; reading does not cast"
            )
        self._dtype = found.dtype
        return found

    def take_one_of(self, names: list[str], shape: tuple[int, ...]) -> Tensor:
        """The tensor that has these names, of which one is enough."""
        found = {name: tensor for name in names if (tensor := self.take_if_there(name, shape)) is not None}
        if not found:
            raise DataError(f"{self.path}: {names[0]} is missing; config.json calls for {list(shape)}")
        (first, tensor), *others = found.items()
        for name, other in others:
            if not torch.equal(other, tensor):
                raise DataError(f"{self.path}: {name} and {first} differ, but config.json ties them")
        return tensor

    def check_empty(self) -> None:
        if self._left:
            name, tensor = next(iter(self._left.items()))
            raise DataError(
                f"{self.path}: {name} {list(tensor.shape)} is not known in a Marian model, "
                f"nor {len(self._left) - 1} other tensors: reading on would lose them"
            )
