"""The attention layer: the operation, masks, positions, the cache, and the ways to write a head.

`MultiHeadAttention` (`layer.py`) holds projections, made by a `Parameterisation` (`projections/`) of chains
of maps. `attention` (`operation.py`) computes softmax(QKᵀ)V by the kernel that `planning.py` chooses;
`written_out.py` is the slow reference. A `LayerCache` (`cache.py`) keeps what a parameterisation wants kept
of decoded tokens. Hidden states in, hidden states out. Start with `layer.py`, then `projections/table.py`.
"""

from triptych.algebra.semantics import Scores as Scores
from triptych.attention.cache import AttentionCache as AttentionCache
from triptych.attention.cache import DecoderCache as DecoderCache
from triptych.attention.cache import LayerCache as LayerCache
from triptych.attention.checks import check_qk_norm as check_qk_norm
from triptych.attention.checks import check_sizes as check_sizes
from triptych.attention.checks import scores_class as scores_class
from triptych.attention.checks import scores_name as scores_name
from triptych.attention.layer import ACTIVATIONS as ACTIVATIONS
from triptych.attention.layer import Activation as Activation
from triptych.attention.layer import Kept as Kept
from triptych.attention.layer import LayerOutput as LayerOutput
from triptych.attention.layer import LayerSteps as LayerSteps
from triptych.attention.layer import MultiHeadAttention as MultiHeadAttention
from triptych.attention.layer import Tap as Tap
from triptych.attention.operation import attention as attention
from triptych.attention.operation import four_way_attention as four_way_attention
from triptych.attention.positions import AlibiPositions as AlibiPositions
from triptych.attention.positions import AttentionPositions as AttentionPositions
from triptych.attention.positions import LearnedPositions as LearnedPositions
from triptych.attention.positions import NoPositions as NoPositions
from triptych.attention.positions import PositionIds as PositionIds
from triptych.attention.positions import RotaryPositions as RotaryPositions
from triptych.attention.positions import SinusoidalPositions as SinusoidalPositions
from triptych.attention.positions import TokenPlaces as TokenPlaces
from triptych.attention.positions import sinusoidal as sinusoidal
from triptych.attention.projections import PARAMETERISATIONS as PARAMETERISATIONS
from triptych.attention.projections import parameterisation as parameterisation
from triptych.attention.projections import parameterisation_class as parameterisation_class
from triptych.attention.projections.abstract import LayerSizes as LayerSizes
from triptych.attention.projections.abstract import Maps as Maps
from triptych.attention.projections.abstract import Parameterisation as Parameterisation
from triptych.attention.projections.composed import ScaledOutside as ScaledOutside
from triptych.attention.projections.composed import ScalePlace as ScalePlace
from triptych.attention.projections.maps import FromHeads as FromHeads
from triptych.attention.projections.maps import HeadMap as HeadMap
from triptych.attention.projections.maps import PerHead as PerHead
from triptych.attention.projections.maps import ToHeads as ToHeads
from triptych.attention.projections.table import Bilinear as Bilinear
from triptych.attention.projections.table import Collaborative as Collaborative
from triptych.attention.projections.table import Differential as Differential
from triptych.attention.projections.table import Direct as Direct
from triptych.attention.projections.table import Factored as Factored
from triptych.attention.projections.table import FourMatrix as FourMatrix
from triptych.attention.projections.table import Grouped as Grouped
from triptych.attention.projections.table import IdentityOutput as IdentityOutput
from triptych.attention.projections.table import IdentityOV as IdentityOV
from triptych.attention.projections.table import IdentityQuery as IdentityQuery
from triptych.attention.projections.table import IdentityValue as IdentityValue
from triptych.attention.projections.table import KeyValue as KeyValue
from triptych.attention.projections.table import Latent as Latent
from triptych.attention.projections.table import Shared as Shared
from triptych.attention.projections.table import Stacked as Stacked
from triptych.attention.projections.table import Symmetric as Symmetric
from triptych.attention.queries_keys import QueriesAndKeys as QueriesAndKeys
from triptych.attention.queries_keys import WeightBlock as WeightBlock
from triptych.attention.written_out import causal_mask as causal_mask
from triptych.attention.written_out import padding_mask as padding_mask
