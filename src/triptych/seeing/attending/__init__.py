"""Attention of a model's heads on a text, and their behaviour over texts.

`attend` returns the attention weights of one text or several (`Attention`), from calls recorded by a
`Reader`; one row of attention weights step by step is a `HeadSteps`. `attend_over` measures the behaviour of
heads over a text (`OverText`). Start with `attention.py`. A text's layers are in
`running/measuring/stack_attention.py`, its page is in `attention_page.py`.
"""

from triptych.seeing.attending.alignment import AlignedWords as AlignedWords
from triptych.seeing.attending.alignment import Word as Word
from triptych.seeing.attending.attention import Attention as Attention
from triptych.seeing.attending.attention import AttentionBatch as AttentionBatch
from triptych.seeing.attending.attention import attend as attend
from triptych.seeing.attending.attention import attend_tokens as attend_tokens
from triptych.seeing.attending.attention import readable as readable
from triptych.seeing.attending.attention_files import Saved as Saved
from triptych.seeing.attending.attention_files import head_records as head_records
from triptych.seeing.attending.attention_files import (
    is_attention_csv as is_attention_csv,
)
from triptych.seeing.attending.attention_files import (
    is_attention_npz as is_attention_npz,
)
from triptych.seeing.attending.attention_files import json_pieces as json_pieces
from triptych.seeing.attending.attention_files import (
    write_attention_csv as write_attention_csv,
)
from triptych.seeing.attending.attention_files import write_npz as write_npz
from triptych.seeing.attending.attention_page import AttentionPage as AttentionPage
from triptych.seeing.attending.attention_page import HeadNote as HeadNote
from triptych.seeing.attending.attention_page import join_pages as join_pages
from triptych.seeing.attending.attention_page import viewer_data as viewer_data
from triptych.seeing.attending.head_steps import HeadSteps as HeadSteps
from triptych.seeing.attending.held_out import HeldOutText as HeldOutText
from triptych.seeing.attending.looks import looks_table as looks_table
from triptych.seeing.attending.looks import most_telling as most_telling
from triptych.seeing.attending.looks import written_table as written_table
from triptych.seeing.attending.over import OverText as OverText
from triptych.seeing.attending.over import attend_over as attend_over
from triptych.seeing.attending.picture import is_picture as is_picture
from triptych.seeing.attending.what_ifs import FOLD as FOLD
from triptych.seeing.attending.what_ifs import PYTHON_OF as PYTHON_OF
from triptych.seeing.attending.written_tokens import OutputTable as OutputTable
