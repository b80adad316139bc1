"""The attention layer: the operation, masks, positions, the cache, and the parameterisations of heads.

`MultiHeadAttention` (`layer.py`) contains projections, built by a `Parameterisation` (`projections/`) from
chains of maps. `attention` (`operation.py`) computes softmax(QKᵀ)V by the kernel that `routes.py` chooses;
the steps of `steps.py` are the slow reference. A `LayerCache` (`layer_cache.py`) stores decoded tokens in the
form that the parameterisation needs. Hidden states in, hidden states out. Start with `layer.py`, then
`projections/table.py`.
"""

from triptych.core.algebra.semantics import Scores as Scores
from triptych.core.attention.layer import ACTIVATIONS as ACTIVATIONS
from triptych.core.attention.layer import Kept as Kept
from triptych.core.attention.layer import LayerOutput as LayerOutput
from triptych.core.attention.layer import LayerSteps as LayerSteps
from triptych.core.attention.layer import MultiHeadAttention as MultiHeadAttention
from triptych.core.attention.layer_cache import AttentionCache as AttentionCache
from triptych.core.attention.layer_cache import DecoderCache as DecoderCache
from triptych.core.attention.layer_cache import LayerCache as LayerCache
from triptych.core.attention.operation import attention as attention
from triptych.core.attention.operation import four_way_attention as four_way_attention
from triptych.core.attention.position_modules import AlibiPositions as AlibiPositions
from triptych.core.attention.position_modules import (
    AttentionPositions as AttentionPositions,
)
from triptych.core.attention.position_modules import (
    LearnedPositions as LearnedPositions,
)
from triptych.core.attention.position_modules import NoPositions as NoPositions
from triptych.core.attention.position_modules import PositionIds as PositionIds
from triptych.core.attention.position_modules import RotaryPositions as RotaryPositions
from triptych.core.attention.position_modules import (
    SinusoidalPositions as SinusoidalPositions,
)
from triptych.core.attention.position_modules import TokenPositions as TokenPositions
from triptych.core.attention.position_modules import sinusoidal as sinusoidal
from triptych.core.attention.projections import PARAMETERISATIONS as PARAMETERISATIONS
from triptych.core.attention.projections import parameterisation as parameterisation
from triptych.core.attention.projections import (
    parameterisation_class as parameterisation_class,
)
from triptych.core.attention.projections.abstract import LayerSizes as LayerSizes
from triptych.core.attention.projections.abstract import Maps as Maps
from triptych.core.attention.projections.abstract import (
    Parameterisation as Parameterisation,
)
from triptych.core.attention.projections.composed import ScaledOutside as ScaledOutside
from triptych.core.attention.projections.composed import ScalePlace as ScalePlace
from triptych.core.attention.projections.maps import FromHeads as FromHeads
from triptych.core.attention.projections.maps import HeadMap as HeadMap
from triptych.core.attention.projections.maps import PerHead as PerHead
from triptych.core.attention.projections.maps import ToHeads as ToHeads
from triptych.core.attention.projections.table import Bilinear as Bilinear
from triptych.core.attention.projections.table import Collaborative as Collaborative
from triptych.core.attention.projections.table import Differential as Differential
from triptych.core.attention.projections.table import Direct as Direct
from triptych.core.attention.projections.table import Factored as Factored
from triptych.core.attention.projections.table import FourMatrix as FourMatrix
from triptych.core.attention.projections.table import Grouped as Grouped
from triptych.core.attention.projections.table import IdentityOutput as IdentityOutput
from triptych.core.attention.projections.table import IdentityOV as IdentityOV
from triptych.core.attention.projections.table import IdentityQuery as IdentityQuery
from triptych.core.attention.projections.table import IdentityValue as IdentityValue
from triptych.core.attention.projections.table import KeyValue as KeyValue
from triptych.core.attention.projections.table import Latent as Latent
from triptych.core.attention.projections.table import Shared as Shared
from triptych.core.attention.projections.table import Stacked as Stacked
from triptych.core.attention.projections.table import Symmetric as Symmetric
from triptych.core.attention.queries_keys import QueriesAndKeys as QueriesAndKeys
from triptych.core.attention.queries_keys import WeightBlock as WeightBlock
from triptych.core.attention.requirements import check_qk_norm as check_qk_norm
from triptych.core.attention.requirements import check_sizes as check_sizes
from triptych.core.attention.requirements import scores_class as scores_class
from triptych.core.attention.requirements import scores_name as scores_name
from triptych.core.attention.routes import Inputs as Inputs
from triptych.core.attention.routes import beyond_kernels as beyond_kernels
from triptych.core.attention.routes import make_plan as make_plan
from triptych.core.attention.shapes import shapes_only as shapes_only
from triptych.core.attention.steps import AFTER_SCALE as AFTER_SCALE
from triptych.core.attention.steps import BEFORE_ROTATION as BEFORE_ROTATION
from triptych.core.attention.steps import LOCATE as LOCATE
from triptych.core.attention.steps import ROTATE as ROTATE
from triptych.core.attention.steps import SIDE_STEPS as SIDE_STEPS
from triptych.core.attention.steps import TEMPER as TEMPER
from triptych.core.attention.steps import TO_WEIGHTS as TO_WEIGHTS
from triptych.core.attention.steps import Tap as Tap
from triptych.core.attention.steps import causal_mask as causal_mask
from triptych.core.attention.steps import compare as compare
from triptych.core.attention.steps import compares_positions as compares_positions
from triptych.core.attention.steps import for_heads as for_heads
from triptych.core.attention.steps import padding_mask as padding_mask
from triptych.core.attention.steps import prepare as prepare
from triptych.core.attention.steps import slice_broadcast as slice_broadcast
from triptych.core.attention.steps import steps_on as steps_on
from triptych.core.attention.steps import walk as walk
