"""Others' checkpoints: configuration, weights and tokenizers, read into our models and written back.

`find_source` (`source.py`) says what a path or name is. A `Family` (`family.py`, `families/NAME.toml`)
describes a type of checkpoint as data: an `AttentionSpec` and a `ModelSpec` (`specs.py`) of what its
configuration says, and a `LayerMap` (`layer_map.py`) of invertible steps from its tensors to W_Q, W_K, W_V
and W_O. A `Checkpoint` (`checkpoint.py`) reads layers by their bytes; `stored_models.py` builds and writes
whole models. Start with `family.py` and `families/gpt2.toml`.
"""
