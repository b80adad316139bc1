"""Rewrites of attention, in memory and of checkpoints, with certificates."""

from triptych.rewriting.models import (
    RewriteResult,
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

__all__ = [
    "RewriteResult",
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
]
