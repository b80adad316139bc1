"""Rewrites of attention, in memory and of checkpoints, with certificates.

A recipe (`recipe.py`) names rewrites of `functions/`. The `Driver` (`driver.py`) takes them through
layers, one at a time: of a model in memory (`in_memory.py`), or of a checkpoint (`planning.py`), which
`whole_checkpoint.py` writes. `measuring.py` and `whole_models.py` measure the error on text; a `Certificate`
(`certificate.py`) claims it, and `verification.py` checks it by doing the rewrite again. Start with
`driver.py`.
"""

from triptych.rewriting.in_memory import RewriteResult, rewrite

__all__ = ["RewriteResult", "rewrite"]
