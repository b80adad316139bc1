"""Rewrites of attention, in memory and of checkpoints, with certificates.

A recipe (`recipe.py`) names rewrites of `algebra/rewrites/`. `planning.py` says before a run what each does
to each layer; `checkpoint.py` and `models.py` apply it layer by layer; `measuring.py` and `comparing.py`
measure the error on text; a `Certificate` (`certificate.py`) claims it, and `verification.py` checks it by
doing the rewrite again. Start with `planning.py`.
"""

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
