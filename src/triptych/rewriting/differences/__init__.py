"""The comparison of two models: proof of equal functions, or the first part where they differ.

`compare` (`comparing_models.py`) reads both models layer by layer (`sides.py`) and returns a `Difference`
(`difference_records.py`): a verdict, the rewrites that lead from the first model to the second, and what was
found in every part. `kinds.py` names the kind of a change. Start with `comparing_models.py`.

Interface: `comparing_models`, `difference_records`, `sides`.
"""
