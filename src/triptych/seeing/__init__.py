"""Analysis of heads: attention on a text, measures of matrices and cost, as tables, charts and pages.

`attending/` shows and explains where heads attend. `inspection/` measures the weights of a checkpoint by
`layer_measures.py`, `similarity.py` and `chance.py`. `costing/` counts parameters, FLOPs and memory.
`composition.py` and `sweep.py` compare heads with each other. `reports/` draws.
"""
