"""Rewrites: pure functions from `AttentionWeights` to new weights and a record.

Rewrites exist as functions (`fold`) and, with their options, as records (`Fold`) in the list `REWRITES`.
"""

from triptych.core.algebra.norm_folding import fold_norm
from triptych.rewriting.functions.biases import DropKeyBias, FoldValueBias, drop_key_bias, fold_value_bias
from triptych.rewriting.functions.channels import FORMS, Form
from triptych.rewriting.functions.folding import Expand, Factor, Fold, expand, factor, fold
from triptych.rewriting.functions.gauge import GaugeFix, gauge_fix
from triptych.rewriting.functions.head_order import (
    PermuteHeads,
    RepeatKVHeads,
    SortHeads,
    permute_heads,
    repeat_kv_heads,
)
from triptych.rewriting.functions.latent import ToLatent, to_latent
from triptych.rewriting.functions.merging import MergeKVHeads, merge_kv_heads
from triptych.rewriting.functions.norms import FoldNorm, FoldOtherNorms
from triptych.rewriting.functions.pruning import PruneHeads, measure_importance, prune_heads
from triptych.rewriting.functions.rank import truncate
from triptych.rewriting.functions.registry import EXACT, REWRITES, read_rewrite, require_order
from triptych.rewriting.functions.rewrite import LayerRewrite, LayerToRewrite, Rewrite
from triptych.rewriting.functions.truncation import Truncate

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
    "PermuteHeads",
    "PruneHeads",
    "RepeatKVHeads",
    "Rewrite",
    "SortHeads",
    "ToLatent",
    "Truncate",
    "drop_key_bias",
    "expand",
    "factor",
    "fold",
    "fold_norm",
    "fold_value_bias",
    "gauge_fix",
    "measure_importance",
    "merge_kv_heads",
    "permute_heads",
    "prune_heads",
    "read_rewrite",
    "repeat_kv_heads",
    "require_order",
    "to_latent",
    "truncate",
]
