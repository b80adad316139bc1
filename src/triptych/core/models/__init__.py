"""The models: configuration, blocks, encoder-decoder and language model, and their files.

A configuration (`configuration.py`, validated) becomes an `Architecture` (`architecture.py`: as data, what
a model is made of), and `blocks.py` builds its modules. `EncoderDecoder` and `LanguageModel` run them.
`sites.py` finds the attention layers of any model; `storage.py` reads and writes the files.
Start with `architecture.py`.
"""

from triptych.core.models.architecture import BlockConfig as BlockConfig
from triptych.core.models.architecture import (
    EncoderDecoderArchitecture as EncoderDecoderArchitecture,
)
from triptych.core.models.architecture import ExpertsConfig as ExpertsConfig
from triptych.core.models.architecture import FeedForwardConfig as FeedForwardConfig
from triptych.core.models.architecture import (
    LanguageModelArchitecture as LanguageModelArchitecture,
)
from triptych.core.models.architecture import NormConfig as NormConfig
from triptych.core.models.architecture import SublayerConfig as SublayerConfig
from triptych.core.models.blocks import Block as Block
from triptych.core.models.blocks import NewTokens as NewTokens
from triptych.core.models.blocks import OffsetNorm as OffsetNorm
from triptych.core.models.blocks import Residual as Residual
from triptych.core.models.blocks import norm_of_part as norm_of_part
from triptych.core.models.blocks import recompute_activations as recompute_activations
from triptych.core.models.blocks import sharing_copy as sharing_copy
from triptych.core.models.configuration import PRESETS as PRESETS
from triptych.core.models.configuration import DecoderConfig as DecoderConfig
from triptych.core.models.configuration import EncoderConfig as EncoderConfig
from triptych.core.models.configuration import (
    LanguageModelConfig as LanguageModelConfig,
)
from triptych.core.models.configuration import ModelConfig as ModelConfig
from triptych.core.models.device import find_device as find_device
from triptych.core.models.device import has_fast_bf16 as has_fast_bf16
from triptych.core.models.device import to_device as to_device
from triptych.core.models.embedding import Embeddings as Embeddings
from triptych.core.models.encoder_decoder import AnyModel as AnyModel
from triptych.core.models.encoder_decoder import EncoderDecoder as EncoderDecoder
from triptych.core.models.experts import Experts as Experts
from triptych.core.models.feed_forward import FeedForward as FeedForward
from triptych.core.models.language_model import LanguageModel as LanguageModel
from triptych.core.models.language_model import LanguageModelHead as LanguageModelHead
from triptych.core.models.model_configs import find_config as find_config
from triptych.core.models.model_configs import has_config as has_config
from triptych.core.models.model_records import describe_model as describe_model
from triptych.core.models.overflow import NumbersOverflowError as NumbersOverflowError
from triptych.core.models.overflow import overflow_again as overflow_again
from triptych.core.models.overflow import require_finite_logits as require_finite_logits
from triptych.core.models.overflow import require_finite_values as require_finite_values
from triptych.core.models.site_configuration import AttentionConfig as AttentionConfig
from triptych.core.models.site_configuration import PositionsConfig as PositionsConfig
from triptych.core.models.sites import AttentionSite as AttentionSite
from triptych.core.models.sites import attention_sites as attention_sites
from triptych.core.models.sites import attention_weights as attention_weights
from triptych.core.models.sites import blocks_of as blocks_of
from triptych.core.models.sites import require_lengths as require_lengths
from triptych.core.models.storage import load_tensors as load_tensors
from triptych.core.models.storage import model_tensors as model_tensors
from triptych.core.models.storage import read_model as read_model
from triptych.core.models.storage import read_own_model as read_own_model
from triptych.core.models.storage import read_tensors as read_tensors
from triptych.core.models.storage import stored_parameters as stored_parameters
from triptych.core.models.storage import write_config as write_config
from triptych.core.models.storage import write_model as write_model
from triptych.core.models.storage import write_weights as write_weights
from triptych.core.models.with_attention import ModelT as ModelT
from triptych.core.models.with_attention import require_held as require_held
from triptych.core.models.with_attention import with_attention as with_attention
