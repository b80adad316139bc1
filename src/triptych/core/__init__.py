"""The core: attention as matrices, Transformers of attention layers, and the reading of checkpoints.

Read the core in this order. `algebra/` has the two forms of a head, W_QK and W_OV (`forms.py`), the maps of a
layer (`weights.py`) and its computation besides the maps (`semantics.py`). `attention/` computes a layer,
with any parameterisation. `models/` builds Transformers of attention layers. `storage/` reads tensors from
files, and `checkpoints/` reads the model families of other libraries. `heads.py` has `Layer` and `Head`, and
`places.py` their names.
"""
