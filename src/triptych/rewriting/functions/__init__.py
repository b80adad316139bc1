"""Rewrites: pure functions from `AttentionWeights` to new weights and a record.

Rewrites exist as functions (`fold`) and, with their options, as records (`Fold`) in the list `REWRITES`.
"""

from triptych.core.algebra.norm_folding import fold_norm as fold_norm
from triptych.rewriting.functions.biases import DropKeyBias as DropKeyBias
from triptych.rewriting.functions.biases import FoldValueBias as FoldValueBias
from triptych.rewriting.functions.biases import drop_key_bias as drop_key_bias
from triptych.rewriting.functions.biases import fold_value_bias as fold_value_bias
from triptych.rewriting.functions.channels import FORMS as FORMS
from triptych.rewriting.functions.channels import Form as Form
from triptych.rewriting.functions.folding import Expand as Expand
from triptych.rewriting.functions.folding import Factor as Factor
from triptych.rewriting.functions.folding import Fold as Fold
from triptych.rewriting.functions.folding import expand as expand
from triptych.rewriting.functions.folding import factor as factor
from triptych.rewriting.functions.folding import fold as fold
from triptych.rewriting.functions.gauge import GaugeFix as GaugeFix
from triptych.rewriting.functions.gauge import gauge_fix as gauge_fix
from triptych.rewriting.functions.head_order import PermuteHeads as PermuteHeads
from triptych.rewriting.functions.head_order import RepeatKVHeads as RepeatKVHeads
from triptych.rewriting.functions.head_order import SortHeads as SortHeads
from triptych.rewriting.functions.head_order import permute_heads as permute_heads
from triptych.rewriting.functions.head_order import repeat_kv_heads as repeat_kv_heads
from triptych.rewriting.functions.latent import ToLatent as ToLatent
from triptych.rewriting.functions.latent import to_latent as to_latent
from triptych.rewriting.functions.merging import MergeKVHeads as MergeKVHeads
from triptych.rewriting.functions.merging import merge_kv_heads as merge_kv_heads
from triptych.rewriting.functions.norms import FoldNorm as FoldNorm
from triptych.rewriting.functions.norms import FoldOtherNorms as FoldOtherNorms
from triptych.rewriting.functions.pruning import PruneHeads as PruneHeads
from triptych.rewriting.functions.pruning import (
    measure_importance as measure_importance,
)
from triptych.rewriting.functions.pruning import prune_heads as prune_heads
from triptych.rewriting.functions.rank import truncate as truncate
from triptych.rewriting.functions.registry import EXACT as EXACT
from triptych.rewriting.functions.registry import REWRITES as REWRITES
from triptych.rewriting.functions.registry import option_names as option_names
from triptych.rewriting.functions.registry import purpose as purpose
from triptych.rewriting.functions.registry import read_rewrite as read_rewrite
from triptych.rewriting.functions.registry import require_order as require_order
from triptych.rewriting.functions.registry import signature as signature
from triptych.rewriting.functions.rewrite import LayerRewrite as LayerRewrite
from triptych.rewriting.functions.rewrite import LayerToRewrite as LayerToRewrite
from triptych.rewriting.functions.rewrite import Rewrite as Rewrite
from triptych.rewriting.functions.truncation import Truncate as Truncate
