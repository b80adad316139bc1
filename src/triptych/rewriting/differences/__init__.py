"""The comparison of two models: one function in two writings, or the place where they part.

`compare` (`comparing.py`) reads both models layer by layer (`sides.py`) and gives a `Difference`
(`records.py`): a verdict, the rewrites that lead from the first model to the second, and what was found in
every part. `kinds.py` names the kind of a change. Start with `comparing.py`.

Interface: `comparing`, `records`, `sides`.
"""
