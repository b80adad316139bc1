"""The metadata of a GGUF file as a configuration of `transformers`, and the reverse."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from triptych.core.checkpoints.gguf.architectures import (
    Architecture,
    architecture_of,
    architectures,
    defaults,
)
from triptych.core.storage.copying import set_entry
from triptych.core.storage.gguf import nested
from triptych.core.storage.settings import Settings
from triptych.errors import DataError
from triptych.untrusted import shown

# Keys that change no number: sizes that the tensors have as well, and notes for programs.
_HARMLESS = frozenset(
    {
        "vocab_size",
        "rope.dimension_count",
        "rope.scaling.finetuned",
        "attention.causal",
        "tensor_data_layout",
        "attention.key_length",
        "attention.value_length",
        "attention.head_count_kv",
        "pooling_type",
        "expert_group_count",
        "expert_group_used_count",
    }
)
_OF_SCALING = (
    "type",
    "factor",
    "attn_factor",
    "original_context_length",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_log_multiplier",
)
# Words of conditions for the tensors of the first layer and of the second.
_LAYERS = ("there", "in_second")
_FACTORS = "rope_freqs.weight"
_LONG = "rope_factors_long.weight"
_SHORT = "rope_factors_short.weight"


def find_architecture(
    metadata: Mapping[str, Any], where: str, tensors: Collection[str]
) -> tuple[Architecture, Settings]:
    """Return the architecture of a file, and its metadata as nested records.

    Raises DataError if it is unknown.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise DataError(
            f"{where}: general.architecture is missing in its metadata: it is no model of llama.cpp"
        )
    if metadata.get("general.type") not in (None, "model"):
        kind = shown(metadata["general.type"])
        raise DataError(
            f"{where}: it holds no model of texts, but one of the type {kind}: give the model's file"
        )
    settings = Settings(
        {key: _plain(value) for key, value in nested(metadata, name).items()}, where
    )
    settings = settings.over(_missing(settings))
    # Conditions may depend on the tensors of the first two layers, in any stack.
    settings = settings.over(
        {
            word: _tensors_of_layer(number, tensors)
            for number, word in enumerate(_LAYERS)
        }
    )
    found = architecture_of(name, settings)
    if found is None:
        known = ", ".join(sorted({one.name for one in architectures()}))
        raise DataError(
            f"{where}: its architecture {shown(name)} is not read: {known} are; give the checkpoint that "
            "it was "
            "made of"
        )
    return found, settings


def _tensors_of_layer(number: int, tensors: Collection[str]) -> dict[str, bool]:
    """Return the names of the modules of a layer, for conditions."""
    rests = (one.partition(f"blk.{number}.")[2] for one in tensors)
    return {rest.partition(".")[0]: True for rest in rests if rest}


def _plain(value: Any) -> Any:
    """Return a value, and for a list with the same number for every layer that number."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list) and value and all(one == value[0] for one in value):
        return value[0]
    return value


def _missing(settings: Settings) -> dict[str, Any]:
    """Return what llama.cpp takes for missing keys."""
    record: dict[str, Any] = {}
    for key, expression in defaults().items():
        value = settings.value(key)
        value = settings.value(expression) if value is None else value
        if value is not None:
            set_entry(record, key, value)
    # `over` replaces nested records whole: keep their other entries.
    for name, value in record.items():
        held = settings.record.get(name)
        if isinstance(value, dict) and isinstance(held, dict):
            held.update(value)
    return record


def read_configuration(
    architecture: Architecture,
    settings: Settings,
    tensors: Mapping[str, tuple[int, ...]],
    factors: Any,
) -> dict[str, Any]:
    """Return the configuration of the model as computed by llama.cpp.

    `tensors`: shapes by their names in the file. `factors`: reads a vector of the file by its name.
    """
    record: dict[str, Any] = {
        "architectures": [architecture.types[architecture.model_type]],
        "model_type": architecture.model_type,
        "dtype": "float32",
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if "token_embd.weight" not in tensors:
        raise DataError(
            f"{settings.where}: there is no tensor token_embd.weight: it is no whole model"
        )
    record["vocab_size"] = tensors["token_embd.weight"][0]
    for key, expression in architecture.fields.items():
        path = _first(expression)
        value = settings.value(key)
        if key in architecture.by_layer and isinstance(value, int):
            value = [value] * settings.count("block_count")
        if isinstance(value, list) and key not in architecture.by_layer:
            raise DataError(
                f"{settings.where}: {key} differs between its layers, which is not read"
            )
        if value is not None and path[0].isalpha():
            set_entry(record, path, value)
    for path, expression in architecture.config.items():
        value = settings.value(expression)
        if value is not None:
            set_entry(record, path, value)
    # Without an entry, `transformers` would use another value than null.
    for path in architecture.nulls:
        record.setdefault(path, None)
    for path, name in architecture.there.items():
        set_entry(record, path, f"blk.0.{name}" in tensors)
    for path, name in architecture.rows.items():
        set_entry(record, path, tensors[name][0] if name in tensors else 0)
    _read_positions(record, architecture, settings, tensors, factors)
    if architecture.windows:
        record["layer_types"] = _layer_types(settings)
    _require_derived(record, architecture, settings)
    return record


def unfollowed(architecture: Architecture, settings: Settings) -> list[str]:
    """Return the unsupported keys of the architecture's metadata."""
    known = {*architecture.fields, *architecture.derived, *_HARMLESS, *defaults()}
    known |= architecture.columns.keys()
    known |= {f"rope.scaling.{name}" for name in _OF_SCALING}
    if architecture.windows:
        known.add("attention.sliding_window_pattern")
    found = [
        key
        for key in _keys(settings.record)
        if key not in known and key.partition(".")[0] not in _LAYERS
    ]
    return [key for key in found if settings.value(key) not in (0, 0.0, False)]


def _keys(record: Mapping[str, Any], above: str = "") -> list[str]:
    found = []
    for name, value in record.items():
        found += (
            _keys(value, f"{above}{name}.")
            if isinstance(value, dict)
            else [above + name]
        )
    return found


# The first alternative of an expression, a path in the configuration.
def _first(expression: str) -> str:
    return expression.split("|")[0].strip().removesuffix("[]")


def _read_positions(
    record: dict[str, Any],
    architecture: Architecture,
    settings: Settings,
    tensors: Mapping[str, tuple[int, ...]],
    factors: Any,
) -> None:
    if not architecture.has_rotary:
        return
    width = settings.count("attention.key_length")
    rotated = settings.value("rope.dimension_count")
    if architecture.rotary and rotated is not None:
        set_entry(
            record,
            _first(architecture.rotary),
            settings.count("rope.dimension_count") / width,
        )
    elif (
        rotated not in (None, width)
        and "rope.dimension_count" not in architecture.fields
    ):
        raise DataError(
            f"{settings.where}: rope.dimension_count is {shown(rotated)} of {width} channels, which its "
            "architecture does not do"
        )
    scaling = _scaling(architecture, settings)
    length = settings.value("context_length")
    if _FACTORS in tensors:
        if not architecture.rope_factors or scaling:
            raise DataError(
                f"{settings.where}: {_FACTORS} is in the file, which {architecture.name} does not follow here"
            )
        divisors = factors(_FACTORS)
        base = settings.positive("rope.freq_base")
        scaling = _as_llama3(divisors, base) or _factors_as_scaling(divisors, length)
    # Divisors for long and for short texts (LongRoPE) have precedence over the metadata's scaling.
    if _LONG in tensors and _SHORT in tensors:
        attention = settings.value("rope.scaling.attn_factor")
        original = settings.value(
            "rope.scaling.original_context_length | context_length"
        )
        scaling = {
            "rope_type": "longrope",
            "long_factor": factors(_LONG),
            "short_factor": factors(_SHORT),
            "original_max_position_embeddings": original,
        }
        if attention is not None:
            scaling["attention_factor"] = attention
        record["original_max_position_embeddings"] = original
    parameters = record.get("rope_parameters", {})
    if "rope_type" in parameters:
        base = settings.value("rope.freq_base")
        record["rope_parameters"] = {**parameters, "rope_theta": base, **scaling}
    elif scaling:
        record["rope_scaling"] = scaling


def _scaling(architecture: Architecture, settings: Settings) -> dict[str, Any]:
    kind = settings.value("rope.scaling.type")
    # The divisors of LongRoPE are tensors (`_read_positions`).
    if kind in (None, "none") or kind == "longrope":
        return {}
    factor = settings.value("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise DataError(
            f"{settings.where}: rope.scaling.type is {shown(kind)}: linear and yarn are read"
        )
    found = {"rope_type": "yarn", "factor": factor, "truncate": True}
    for key, name in (
        ("original_context_length", "original_max_position_embeddings"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if (value := settings.value(f"rope.scaling.{key}")) is not None:
            found[name] = value
    # llama.cpp multiplies scores by this factor of the logarithm, and leaves rotations at their length.
    if (log_factor := settings.value("rope.scaling.yarn_log_multiplier")) is not None:
        every = log_factor if architecture.plain_mscale else round(10 * log_factor, 6)
        found["mscale"] = 1.0 if architecture.plain_mscale else every
        found["mscale_all_dim"] = every
    return found


def _as_llama3(divisors: list[float], base: float) -> dict[str, Any]:
    """Return the scaling of Llama 3 with these divisors of the frequencies, or {}.

    Frequencies of wavelengths below O / 4 are kept, above O divided by the largest divisor F, and between
    them divided by `1 / ((1 − s) / F + s)`, where `s = (O / wavelength − 1) / 3`. Any of these determines O.
    """
    most = max(divisors, default=1.0)
    waves = [
        2 * math.pi * base ** (pair / len(divisors)) for pair in range(len(divisors))
    ]
    pairs = [pair for pair in zip(waves, divisors, strict=True) if 1 < pair[1] < most]
    if most <= 1 or not pairs:
        return {}
    # Solve the formula above for s, then for O. Divisors of 1 or F do not determine O.
    wave, divisor = pairs[0]
    share = (1 / divisor - 1 / most) / (1 - 1 / most)
    original = round(wave * (3 * share + 1))

    def expected(wave: float) -> float:
        share = min(1.0, max(0.0, (original / wave - 1) / 3))
        return float(1 / ((1 - share) / most + share))

    found = zip(waves, divisors, strict=True)
    if not all(
        math.isclose(expected(wave), divisor, rel_tol=1e-5) for wave, divisor in found
    ):
        return {}
    return {
        "rope_type": "llama3",
        "factor": most,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }


def _factors_as_scaling(factors: list[float], length: Any) -> dict[str, Any]:
    """Return the scaling with these divisors of the frequencies, the same for all lengths."""
    return {
        "rope_type": "longrope",
        "long_factor": factors,
        "short_factor": factors,
        "attention_factor": 1.0,
        "factor": 1.0,
        "original_max_position_embeddings": length,
    }


def _layer_types(settings: Settings) -> list[str]:
    pattern = settings.value("attention.sliding_window_pattern")
    layers = settings.count("block_count")
    if isinstance(pattern, bool):
        pattern = [pattern] * layers
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise DataError(
            f"{settings.where}: attention.sliding_window_pattern is {shown(pattern)}: a truth for each of "
            f"{layers} layers is needed"
        )
    return ["sliding_attention" if window else "full_attention" for window in pattern]


def _require_derived(
    record: dict[str, Any], architecture: Architecture, settings: Settings
) -> None:
    """Check that derived keys of the metadata have the values derived from other keys."""
    made = Settings(record, settings.where)
    for key, expression in architecture.derived.items():
        said = settings.value(key)
        follows = made.value(expression)
        if said is not None and follows is not None and said != follows:
            raise DataError(
                f"{settings.where}: {key} is {shown(said)}, and {shown(follows)} follows from the rest: "
                "such models "
                "are not read"
            )


def written_metadata(
    architecture: Architecture, settings: Settings, width: int
) -> dict[str, Any]:
    """Return the metadata of a configuration, without the architecture's name and without RoPE scaling.

    `width`: width of a head.
    """
    found = {}
    for key, expression in {**architecture.fields, **architecture.derived}.items():
        if key == "rope.freq_base":
            # The same order as in family files: `rope_theta` may be a default of the class.
            expression = f"rope_parameters.rope_theta | {expression}"
        value = settings.value(expression)
        if value is not None:
            found[key] = value
    if architecture.has_rotary and "rope.dimension_count" not in found:
        share = settings.number(architecture.rotary) if architecture.rotary else 1.0
        found["rope.dimension_count"] = int(share * width)
    return found
