"""Analysis of heads: attention on a text, measures of matrices and cost, as tables, charts and pages.

`attending/` shows and explains attention on a text (`Attention`, `OverText`). `inspection/` measures the
weights of a checkpoint (`Inspection`) by `layer_measures.py`, `similarity.py` and `chance.py`. `costing/`
counts parameters, FLOPs and memory of parameterisations, and `model_cost.py` of a model. `composition.py`
and `sweep.py` compare heads with each other, `adapter_effects.py` heads with and without an adapter, and
`difference.py` shows the comparison of two models (`Difference`). `lens.py` shows the predictions
of each layer and the parts of a logit (`Lens`).
`reports/` draws. Start with `attending/attention.py`.

Interface: `adapter_effects`, `attending`, `composition`, `costing`, `costing.cost_pages`, `difference`,
`inspection`, `lens`, `model_cost`, `reports`, `sweep`.
"""
