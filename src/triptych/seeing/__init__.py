"""Seeing heads: attention on a text, measures of matrices, cost, as tables, charts and pages.

`attending/` shows where heads attend and explains it. `inspection/` measures the weights of a checkpoint by
`layer_measures.py`, `similarity.py` and `chance.py`. `costing/` counts parameters, FLOPs and memory.
`composition.py` and `sweep.py` compare heads with one another. `reports/` draws.
"""
