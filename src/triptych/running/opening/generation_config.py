"""Settings of a checkpoint for continuing texts: `generation_config.json`, as in `transformers` 5.23."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from triptych.errors import DataError, GenerationNote, UsageError
from triptych.running.decoding_options import GenerationOptions, SamplingOptions
from triptych.running.text.tokenizers import Tokenizer
from triptych.running.token_rules import TokenRules
from triptych.untrusted import read_json, shown

FILE = "generation_config.json"
# Default of `transformers` for `top_k` in files with `do_sample`.
_TOP_K = 50
# Unsupported settings, with their values without an effect. The value None never has an effect.
_NOT_FOLLOWED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "diversity_penalty": (0,),
    "sequence_bias": (),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "guidance_scale": (1,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "stop_strings": ([],),
    "max_time": (),
    "constraints": ([],),
    "force_words_ids": ([],),
    "dola_layers": (),
    "watermarking_config": (),
    "token_healing": (False,),
}
# Unsupported settings with an effect on sampling only.
_OF_DRAWS = ("epsilon_cutoff", "eta_cutoff", "top_h")
_ENDS = "eos_token_id"
# Settings without an effect on texts, or read together with `config.json`.
_OF_THE_FILE = frozenset(
    {
        *("transformers_version", "_from_model_config", "use_cache", "pad_token_id"),
        *("output_attentions", "output_hidden_states", "return_dict_in_generate"),
        *("output_scores", "output_logits", "cache_implementation"),
        *(_ENDS, "bos_token_id"),
    }
)
_DRAWING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
_RULES = (
    "no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "min_new_tokens",
    "min_length",
)


@final
@dataclass(frozen=True)
class Asked:
    """Arguments of a continuation; None means the value of the file, or else the default."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    beam_size: int = 1


@final
@dataclass(frozen=True)
class GenerationConfig:
    """The settings of `generation_config.json` under their names in `transformers`.

    Settings without an effect are left out.
    """

    where: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    begin_id: int | None = None  # beginning-of-text token
    unfit: Mapping[str, str] = field(
        default_factory=dict
    )  # error message by name of an invalid setting

    @classmethod
    def read(cls, folder: Path) -> "GenerationConfig":
        """Read the file of a folder; a missing file sets no option.

        An invalid value is an error only when a continuation depends on it: see `require_followed`.
        """
        path = folder / FILE
        if not path.exists():
            return cls()
        record = read_json(path)
        unfit = {
            name: f"{path}: {name} is {shown(record[name])}: it must be {what}"
            for name, (check, what) in _KINDS.items()
            if record.get(name) is not None and not check(record[name])
        }
        if _ENDS in unfit:  # every reader depends on it
            raise DataError(unfit[_ENDS])
        begins = record.get("bos_token_id")
        return cls(
            str(path),
            {
                name: value
                for name, value in record.items()
                if name not in unfit and _matters(name, value)
            },
            begins if isinstance(begins, int) else None,
            unfit,
        )

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The end-of-text tokens; empty if the file does not name any."""
        found = self.settings.get(_ENDS, ())
        return tuple(found) if isinstance(found, list | tuple) else (found,)

    def sampling(self, asked: Asked) -> SamplingOptions:
        """Return the sampling options: the arguments, or else the file's settings."""
        given = {name: getattr(asked, name, None) for name in _DRAWING}
        draws = self._draws(asked)
        drawn: dict[str, Any] = {}
        if draws:
            usual: dict[str, Any] = {"temperature": 1.0}
            if self.settings.get("do_sample"):
                usual["top_k"] = _TOP_K
            drawn = {
                name: self.settings.get(name, usual.get(name)) for name in _DRAWING
            }
            drawn["top_k"] = drawn["top_k"] or None  # 0 means all tokens
        drawn |= {name: value for name, value in given.items() if value is not None}
        penalty = asked.repetition_penalty
        penalty = (
            self.settings.get("repetition_penalty", 1.0) if penalty is None else penalty
        )
        return SamplingOptions(repetition_penalty=penalty, rules=self._rules(), **drawn)

    def _draws(self, asked: Asked) -> bool:
        """Return True if tokens are sampled."""
        if asked.beam_size > 1:
            return False
        return bool(
            asked.temperature
            if asked.temperature is not None
            else self.settings.get("do_sample")
        )

    def _rules(self) -> TokenRules:
        found = {name: self.settings[name] for name in _RULES if name in self.settings}
        ends = {(token,) for token in self.end_ids}
        words = [tuple(word) for word in found.get("bad_words_ids", ())]
        return TokenRules(
            found.get("no_repeat_ngram_size", 0),
            tuple(word for word in words if word not in ends),
            tuple(found.get("suppress_tokens", ())),
            tuple(found.get("begin_suppress_tokens", ())),
            found.get("min_new_tokens", 0),
            found.get("min_length", 0),
        )

    def lengths(self, asked: Asked) -> dict[str, Any]:
        """Return `max_new_tokens`, and `max_length` if the file sets it, by option."""
        if asked.max_new_tokens is not None:
            return {"max_new_tokens": asked.max_new_tokens}
        if (most := self.settings.get("max_new_tokens")) is not None:
            return {"max_new_tokens": most}
        if (whole := self.settings.get("max_length")) is not None:
            return {"max_new_tokens": whole, "max_length": whole}
        return {"max_new_tokens": GenerationOptions.max_new_tokens}

    def require_followed(self, asked: Asked) -> None:
        """Refuse unsupported or invalid settings if they would affect the continuation."""
        # An argument overrides its setting, and sampling settings count only when tokens are sampled.
        for name, message in self.unfit.items():
            if getattr(asked, name, None) is None and (
                name not in _DRAWING or self._draws(asked)
            ):
                raise DataError(
                    f"{message} (--generation-config ignore leaves out the file's settings)"
                )
        refused = [name for name in _NOT_FOLLOWED if name in self.settings]
        refused = [
            name for name in refused if name not in _OF_DRAWS or self._draws(asked)
        ]
        if asked.beam_size > 1:
            refused = [name for name in refused if name != "num_beams"]
            rules = [
                name
                for name in (*_RULES, "repetition_penalty")
                if name in self.settings
            ]
            refused += [name for name in rules if getattr(asked, name, None) is None]
        if refused:
            name = refused[0]
            with_beam = " with a beam" if asked.beam_size > 1 else ""
            raise UsageError(
                f"{self.where}: {name} is {shown(self.settings[name])}, which is not followed{with_beam}: "
                'generation_config="ignore" (--generation-config ignore) leaves out the file\'s settings'
            )

    def say(self, asked: Asked, sampling: SamplingOptions) -> None:
        """Report the settings of the file in effect for a continuation in one `GenerationNote`, if any."""
        followed = [
            name for name in (*_RULES, "repetition_penalty") if name in self.settings
        ]
        followed += [
            name for name in ("max_new_tokens", "max_length") if name in self.settings
        ][:1]
        drawn = [name for name in ("do_sample", *_DRAWING) if name in self.settings]
        followed += [] if sampling.is_greedy else drawn
        # An argument overrides its setting, and `max_new_tokens` also overrides `max_length`.
        kept = [name for name in followed if getattr(asked, name, None) is None]
        kept = [
            name
            for name in kept
            if asked.max_new_tokens is None or name != "max_length"
        ]
        parts = []
        if kept:
            parts.append(
                ", ".join(f"{name} {_in_words(self.settings[name])}" for name in kept)
            )
        if (
            sampling.top_k == _TOP_K
            and asked.top_k is None
            and "top_k" not in self.settings
        ):
            parts.append(f"top_k {_TOP_K}, which is usual in transformers")
        unused = [name for name in drawn if name in _DRAWING]
        if (
            sampling.is_greedy
            and unused
            and asked.temperature is None
            and asked.beam_size == 1
        ):
            parts.append(
                f"the most probable token each time, since do_sample is not true ({', '.join(unused)} only "
                "count then)"
            )
        if parts:
            warnings.warn(f"{FILE}: {'; '.join(parts)}", GenerationNote, stacklevel=5)


def effective_settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file with an effect on the output, supported here or not."""
    return {
        name: value
        for name, value in record.items()
        if name not in _OF_THE_FILE
        and (_matters(name, value) or _is_unknown(name, value))
    }


def end_ids(
    generation: GenerationConfig,
    config: Mapping[str, Any],
    tokenizer: Tokenizer | None,
) -> tuple[int, ...]:
    """Return the end-of-text tokens of a checkpoint.

    Tokens in `generation_config.json` take precedence over `config.json` and the tokenizer.
    """
    if generation.end_ids:
        return generation.end_ids
    own = None if tokenizer is None else tokenizer.eos_id
    return (*_ends_of(config), *(() if own is None else (own,)))


def begin_id(generation: GenerationConfig, config: Mapping[str, Any]) -> int | None:
    """Return the beginning-of-text token of a checkpoint's files."""
    found = (
        config.get("bos_token_id")
        if generation.begin_id is None
        else generation.begin_id
    )
    return found if isinstance(found, int) else None


def _ends_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the end-of-text tokens of `config.json`."""
    match config.get(_ENDS):
        case int(one):
            return (one,)
        case list(several):
            return tuple(token for token in several if isinstance(token, int))
    return ()


def _is_unknown(name: str, value: Any) -> bool:
    """Return True for an unknown setting with a value."""
    is_set = not (value is None or value is False or value == [])
    return is_set and name not in _KINDS and name not in _NOT_FOLLOWED


def _matters(name: str, value: Any) -> bool:
    """Return True if a setting can change the output."""
    if value is None or value == [] or value is False:
        return False
    if name in _NOT_FOLLOWED:
        return not any(value == nothing for nothing in _NOT_FOLLOWED[name])
    return name in _KINDS and value != _KINDS_NOTHING.get(name)


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"({len(value)})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 < value <= 1


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(word and _are_tokens(word) for word in value)


_COUNT = (_is_count, "a whole number, 0 or more")
_SHARE = (_is_share, "above 0 and at most 1")
_POSITIVE = (lambda value: _is_number(value) and value > 0, "a number above 0")
_TOKENS = (_are_tokens, "a list of token ids")
# Supported settings, with a check of the value and the expected value in words.
_KINDS: dict[str, tuple[Any, str]] = {
    "do_sample": (lambda value: isinstance(value, bool), "true or false"),
    "temperature": _POSITIVE,
    "repetition_penalty": _POSITIVE,
    "top_k": _COUNT,
    "top_p": _SHARE,
    "min_p": (lambda value: _is_number(value) and 0 <= value <= 1, "from 0 to 1"),
    "typical_p": _SHARE,
    "no_repeat_ngram_size": _COUNT,
    "bad_words_ids": (_are_words, "a list of lists of token ids"),
    "suppress_tokens": _TOKENS,
    "begin_suppress_tokens": _TOKENS,
    "min_new_tokens": _COUNT,
    "min_length": _COUNT,
    "max_new_tokens": (
        lambda value: _is_count(value) and value > 0,
        "a whole number above 0",
    ),
    "max_length": (
        lambda value: _is_count(value) and value > 0,
        "a whole number above 0",
    ),
    "eos_token_id": (
        lambda value: _is_count(value) or _are_tokens(value),
        "a token id, or a list of them",
    ),
}
# Values of supported settings without an effect.
_KINDS_NOTHING: dict[str, Any] = {
    "repetition_penalty": 1,
    "top_p": 1,
    "typical_p": 1,
    "min_p": 0,
    "no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
    "min_length": 0,
}
