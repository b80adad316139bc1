"""The models: configuration, blocks, encoder-decoder and language model, and their files.

A configuration (`configuration.py`, validated) becomes an `Architecture` (`architecture.py`: as data, what
a model is made of), and `blocks.py` builds its modules. `EncoderDecoder` and `LanguageModel` run them.
`sites.py` finds the attention layers of any model; `storage.py` reads and writes the files.
Start with `architecture.py`.
"""

from triptych.core.models.configuration import PRESETS as PRESETS
from triptych.core.models.configuration import DecoderConfig as DecoderConfig
from triptych.core.models.configuration import EncoderConfig as EncoderConfig
from triptych.core.models.configuration import LanguageModelConfig as LanguageModelConfig
from triptych.core.models.configuration import ModelConfig as ModelConfig
from triptych.core.models.encoder_decoder import AnyModel as AnyModel
from triptych.core.models.encoder_decoder import EncoderDecoder as EncoderDecoder
from triptych.core.models.language_model import LanguageModel as LanguageModel
from triptych.core.models.model_configs import find_config as find_config
from triptych.core.models.model_configs import has_config as has_config
from triptych.core.models.site_configuration import AttentionConfig as AttentionConfig
from triptych.core.models.site_configuration import PositionsConfig as PositionsConfig
from triptych.core.models.sites import attention_sites as attention_sites
from triptych.core.models.sites import attention_weights as attention_weights
from triptych.core.models.storage import read_model as read_model
from triptych.core.models.storage import write_model as write_model
from triptych.core.models.with_attention import with_attention as with_attention
