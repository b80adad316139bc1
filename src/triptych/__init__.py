"""Train, run, inspect and rewrite Transformers, with the attention matrices of every head at hand.

Names are imported when they are first used, so that `triptych --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triptych.algebra import BilinearForm
    from triptych.attention import (
        Alibi,
        Bilinear,
        Collaborative,
        Direct,
        Factored,
        FourMatrix,
        Grouped,
        KeyValue,
        Latent,
        MultiHeadAttention,
        Rotary,
        Shared,
        Stacked,
        Symmetric,
        four_way_attention,
    )
    from triptych.costing import CostSpec, measure_cost, measure_times
    from triptych.errors import DataError, TriptychError, UsageError
    from triptych.models import PRESETS, EncoderDecoder, ModelConfig
    from triptych.rewriting import (
        drop_key_bias,
        expand,
        factor,
        fold,
        fold_norm,
        fold_value_bias,
        gauge_fix,
        merge_kv_heads,
        permute_heads,
        prune_heads,
        repeat_kv_heads,
        rewrite,
        to_latent,
        truncate,
    )
    from triptych.runs import Run, load, resume, train
    from triptych.training import Recipe, read_recipe

_MODULES = {
    "triptych.algebra": ("BilinearForm",),
    "triptych.attention": (
        "Alibi",
        "Bilinear",
        "Collaborative",
        "Direct",
        "Factored",
        "FourMatrix",
        "Grouped",
        "KeyValue",
        "Latent",
        "MultiHeadAttention",
        "Rotary",
        "Shared",
        "Stacked",
        "Symmetric",
        "four_way_attention",
    ),
    "triptych.costing": (
        "CostSpec",
        "measure_cost",
        "measure_times",
    ),
    "triptych.errors": (
        "DataError",
        "TriptychError",
        "UsageError",
    ),
    "triptych.models": (
        "PRESETS",
        "EncoderDecoder",
        "ModelConfig",
    ),
    "triptych.rewriting": (
        "drop_key_bias",
        "expand",
        "factor",
        "fold",
        "fold_norm",
        "fold_value_bias",
        "gauge_fix",
        "merge_kv_heads",
        "permute_heads",
        "prune_heads",
        "repeat_kv_heads",
        "rewrite",
        "to_latent",
        "truncate",
    ),
    "triptych.runs": (
        "Run",
        "load",
        "resume",
        "train",
    ),
    "triptych.training": (
        "Recipe",
        "read_recipe",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "PRESETS",
    "Alibi",
    "Bilinear",
    "BilinearForm",
    "Collaborative",
    "CostSpec",
    "DataError",
    "Direct",
    "EncoderDecoder",
    "Factored",
    "FourMatrix",
    "Grouped",
    "KeyValue",
    "Latent",
    "ModelConfig",
    "MultiHeadAttention",
    "Recipe",
    "Rotary",
    "Run",
    "Shared",
    "Stacked",
    "Symmetric",
    "TriptychError",
    "UsageError",
    "drop_key_bias",
    "expand",
    "factor",
    "fold",
    "fold_norm",
    "fold_value_bias",
    "four_way_attention",
    "gauge_fix",
    "load",
    "measure_cost",
    "measure_times",
    "merge_kv_heads",
    "permute_heads",
    "prune_heads",
    "read_recipe",
    "repeat_kv_heads",
    "resume",
    "rewrite",
    "to_latent",
    "train",
    "truncate",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
