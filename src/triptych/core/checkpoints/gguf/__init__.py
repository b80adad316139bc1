"""GGUF files as checkpoints: metadata as a configuration, tensors under the names of `transformers`.

`architectures.toml` maps architectures of llama.cpp to families. Start with `GgufModel` (`gguf_model.py`).
"""

from triptych.core.checkpoints.gguf.gguf_model import in_transformers as in_transformers
from triptych.core.checkpoints.gguf.metadata import (
    find_architecture as find_architecture,
)
from triptych.core.checkpoints.gguf.metadata import (
    read_configuration as read_configuration,
)
from triptych.core.checkpoints.gguf.metadata import written_metadata as written_metadata
from triptych.core.checkpoints.gguf.names import entry_of as entry_of
from triptych.core.checkpoints.gguf.names import name_in_gguf as name_in_gguf
from triptych.core.checkpoints.gguf.row_orders import Heads as Heads
from triptych.core.checkpoints.gguf.row_orders import Layout as Layout
from triptych.core.checkpoints.gguf.row_orders import layout_of as layout_of
from triptych.core.checkpoints.gguf.row_orders import split as split
from triptych.core.checkpoints.gguf.token_lists import CONTROL as CONTROL
from triptych.core.checkpoints.gguf.token_lists import NAMED as NAMED
from triptych.core.checkpoints.gguf.token_lists import SPACE as SPACE
from triptych.core.checkpoints.gguf.token_lists import USER_DEFINED as USER_DEFINED
from triptych.core.checkpoints.gguf.token_lists import PreTokenizer as PreTokenizer
from triptych.core.checkpoints.gguf.token_lists import Vocabulary as Vocabulary
from triptych.core.checkpoints.gguf.token_lists import pre_tokenizers as pre_tokenizers
