"""Families: `NAME.toml` describes how a family stores attention, `NAME.py` has its hook, if it needs one."""

from collections.abc import Mapping

from triptych.checkpoints.families.deberta import DeBERTa
from triptych.checkpoints.families.deepseek import DeepSeek
from triptych.checkpoints.families.gpt2 import GPT2
from triptych.checkpoints.hook import Hook
from triptych.errors import UsageError

HOOKS: Mapping[str, Hook] = {"deberta": DeBERTa(), "deepseek": DeepSeek(), "gpt2": GPT2()}


def hook_of(name: str) -> Hook | None:
    """The hook that a family file names with `hook = "NAME"`; None for the empty name."""
    if not name:
        return None
    if name not in HOOKS:
        raise UsageError(f"hook is {name!r} in the family file: there are {', '.join(HOOKS)}")
    return HOOKS[name]
