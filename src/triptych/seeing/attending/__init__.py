"""Where the heads of a model look on a text, and what they do there.

`attend` gives the attention weights of one text or several (`Attention`), from what a `Reader` recorded; one
row of them step by step is a `HeadSteps`. `attend_over` measures what heads do over a text (`OverText`).
Start with `attention.py`. A text's layers are in `running/measuring/stack_attention.py`, its page is in
`attention_page.py`.
"""

from triptych.seeing.attending.attention import Attention, AttentionBatch, attend, attend_tokens
from triptych.seeing.attending.held_out import HeldOutText
from triptych.seeing.attending.over import attend_over

__all__ = [
    "Attention",
    "AttentionBatch",
    "HeldOutText",
    "attend",
    "attend_over",
    "attend_tokens",
]
