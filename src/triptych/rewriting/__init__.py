"""Rewrites of attention, in memory and of checkpoints, with certificates.

A recipe (`recipe.py`) names rewrites of `functions/`. The `Driver` (`driver.py`) applies them layer by layer
to a model in memory (`in_memory.py`) or to a checkpoint (`planning.py`), written by `whole_checkpoint.py`.
`measuring.py` and `whole_models.py` measure the error on text; a `Certificate` (`certificate.py`) states the
error, and `verification.py` checks it by repeating the rewrite. Start with `driver.py`.
"""

from triptych.rewriting.in_memory import RewriteResult, rewrite

__all__ = ["RewriteResult", "rewrite"]
