"""Where the heads of a model look on a text, and what they do there.

`attend` gives the attention weights of one text or several (`Attention`), from what a `Reader` recorded.
`attend_over` measures what heads do over a whole text (`OverText`). Start with `attention.py`.
"""

from triptych.attending.attention import (
    Attention,
    AttentionBatch,
    HeadNote,
    LayerAttention,
    Part,
    Stack,
    attend,
    read_attention,
)
from triptych.attending.over import attend_over

__all__ = [
    "Attention",
    "AttentionBatch",
    "HeadNote",
    "LayerAttention",
    "Part",
    "Stack",
    "attend",
    "attend_over",
    "read_attention",
]
