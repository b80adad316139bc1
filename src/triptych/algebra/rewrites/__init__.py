"""Rewrites: pure functions from `AttentionWeights` to new ones and a record of what was done."""

from triptych.algebra.rewrites.biases import drop_key_bias, fold_value_bias
from triptych.algebra.rewrites.channels import FORMS, Form
from triptych.algebra.rewrites.data import measure_energies, truncate_on_data
from triptych.algebra.rewrites.folding import FoldedSide, Keep, Measure, expand, factor, fold
from triptych.algebra.rewrites.gauge import gauge_fix
from triptych.algebra.rewrites.heads import (
    leave_heads,
    measure_heads,
    measure_importance,
    permute_heads,
    prune_heads,
    repeat_kv_heads,
)
from triptych.algebra.rewrites.merging import merge_kv_heads, merge_rotary_kv_heads
from triptych.algebra.rewrites.norms import (
    OtherReaders,
    fold_norm,
    fold_norm_into_map,
    require_readers_foldable,
)
from triptych.algebra.rewrites.planes import measure_plane_energies, plane_scores, truncate_planes
from triptych.algebra.rewrites.rank import to_latent, truncate
from triptych.algebra.rewrites.record import RewriteRecord, RewriteRefusedError, Rewritten, of_groups
from triptych.algebra.rewrites.rotary_maps import measure_rotary_energies, truncate_rotary_maps

__all__ = [
    "FORMS",
    "FoldedSide",
    "Form",
    "Keep",
    "Measure",
    "OtherReaders",
    "RewriteRecord",
    "RewriteRefusedError",
    "Rewritten",
    "drop_key_bias",
    "expand",
    "factor",
    "fold",
    "fold_norm",
    "fold_norm_into_map",
    "fold_value_bias",
    "gauge_fix",
    "leave_heads",
    "measure_energies",
    "measure_heads",
    "measure_importance",
    "measure_plane_energies",
    "measure_rotary_energies",
    "merge_kv_heads",
    "merge_rotary_kv_heads",
    "of_groups",
    "permute_heads",
    "plane_scores",
    "prune_heads",
    "repeat_kv_heads",
    "require_readers_foldable",
    "to_latent",
    "truncate",
    "truncate_on_data",
    "truncate_planes",
    "truncate_rotary_maps",
]
