"""Rewrites: pure functions from `AttentionWeights` to new ones and a record of what was done.

Each is a function (`fold`) and, with its options, a record (`Fold`) in the list `REWRITES`.
"""

from triptych.algebra.rewrites.biases import DropKeyBias, FoldValueBias, drop_key_bias, fold_value_bias
from triptych.algebra.rewrites.channels import FORMS, Form
from triptych.algebra.rewrites.folding import Expand, Factor, Fold, expand, factor, fold
from triptych.algebra.rewrites.gauge import GaugeFix, gauge_fix
from triptych.algebra.rewrites.heads import (
    PermuteHeads,
    RepeatKVHeads,
    SortHeads,
    permute_heads,
    repeat_kv_heads,
)
from triptych.algebra.rewrites.latent import ToLatent, to_latent
from triptych.algebra.rewrites.merging import MergeKVHeads, merge_kv_heads
from triptych.algebra.rewrites.norm_folding import (
    OtherReaders,
    fold_norm,
    fold_norm_into_map,
    require_readers_foldable,
)
from triptych.algebra.rewrites.norms import FoldNorm, FoldOtherNorms
from triptych.algebra.rewrites.pruning import PruneHeads, measure_importance, prune_heads
from triptych.algebra.rewrites.rank import truncate
from triptych.algebra.rewrites.record import RewriteRecord, RewriteRefusedError, Rewritten
from triptych.algebra.rewrites.registry import EXACT, REWRITES, read_rewrite, require_order
from triptych.algebra.rewrites.rewrite import LayerRewrite, LayerToRewrite, Rewrite
from triptych.algebra.rewrites.truncation import Truncate

__all__ = [
    "EXACT",
    "FORMS",
    "REWRITES",
    "DropKeyBias",
    "Expand",
    "Factor",
    "Fold",
    "FoldNorm",
    "FoldOtherNorms",
    "FoldValueBias",
    "Form",
    "GaugeFix",
    "LayerRewrite",
    "LayerToRewrite",
    "MergeKVHeads",
    "OtherReaders",
    "PermuteHeads",
    "PruneHeads",
    "RepeatKVHeads",
    "Rewrite",
    "RewriteRecord",
    "RewriteRefusedError",
    "Rewritten",
    "SortHeads",
    "ToLatent",
    "Truncate",
    "drop_key_bias",
    "expand",
    "factor",
    "fold",
    "fold_norm",
    "fold_norm_into_map",
    "fold_value_bias",
    "gauge_fix",
    "measure_importance",
    "merge_kv_heads",
    "permute_heads",
    "prune_heads",
    "read_rewrite",
    "repeat_kv_heads",
    "require_order",
    "require_readers_foldable",
    "to_latent",
    "truncate",
]
