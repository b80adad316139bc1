"""The comparison of two models: one function in two writings, or the place where they part.

`compare` (`comparing_models.py`) reads both models layer by layer (`sides.py`) and gives a `Difference`
(`difference_records.py`): a verdict, the rewrites that lead from the first model to the second, and what was
found in every part. `kinds.py` names the kind of a change. Start with `comparing_models.py`.

Interface: `comparing_models`, `difference_records`, `sides`.
"""
