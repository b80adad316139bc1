"""The core: attention as matrices, the models made of it, and the checkpoints that they are read from.

Read it in this order. `algebra/` has the two forms of a head, W_QK and W_OV (`forms.py`), the maps that a
layer writes them with (`weights.py`) and the meaning of a layer besides its maps (`semantics.py`).
`attention/` computes a layer, with any parameterisation. `models/` builds Transformers of such layers.
`storage/` reads the tensors of files, `checkpoints/` the families of other libraries. `heads.py` has the
layers and heads that a person holds, `places.py` their names.
"""
