"""Families: `NAME.toml` says where attention lies and how it is written, `NAME.py` what no data can say."""

from collections.abc import Mapping

from triptych.checkpoints.families.deberta import DeBERTa
from triptych.checkpoints.families.deepseek import DeepSeek
from triptych.checkpoints.families.gpt2 import GPT2
from triptych.checkpoints.hook import Hook

# By the name in `hook = "NAME"`.
HOOKS: Mapping[str, Hook] = {"deberta": DeBERTa(), "deepseek": DeepSeek(), "gpt2": GPT2()}
