"""Attention of a model's heads on a text, and their behaviour over texts.

`attend` returns the attention weights of one text or several (`Attention`), from calls recorded by a
`Reader`; one row of attention weights step by step is a `HeadSteps`. `attend_over` measures the behaviour of
heads over a text (`OverText`). Start with `attention.py`. A text's layers are in
`running/measuring/stack_attention.py`, its page is in `attention_page.py`.
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
