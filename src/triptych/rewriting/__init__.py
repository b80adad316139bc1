"""Rewrites of attention, in memory and of checkpoints, with certificates.

A recipe (`recipe.py`) names rewrites of `functions/`. The `Driver` (`driver.py`) applies them layer by layer
to a model in memory (`in_memory.py`) or to a checkpoint (`planning.py`), written by `whole_checkpoint.py`.
`measuring.py` and `whole_models.py` measure the error on text; a `Certificate` (`certificate.py`) states the
error, and `verification.py` checks it by repeating the rewrite. `opened_models.py` has the verbs of a model:
plan, rewrite, check and save. `differences/` finds the rewrites between two models. Start with `driver.py`.

Interface: `certificate`, `differences.comparing_models`, `differences.difference_records`, `functions`,
`opened_models`, `recipe`, `verification`.
"""

from triptych.rewriting.in_memory import RewriteResult as RewriteResult
from triptych.rewriting.in_memory import WeightsRewrite as WeightsRewrite
from triptych.rewriting.in_memory import rewrite as rewrite
