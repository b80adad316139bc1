"""Checkpoints of other libraries, read into models of this library and written back.

`find_source` (`source.py`) resolves a path or a name on the Hub. A `Family` (`family.py`,
`families/NAME.toml`) describes a type of checkpoint as data: `AttentionSpec` and `ModelSpec` (`specs.py`)
interpret its configuration, and a `LayerMap` (`layer_map.py`) converts its tensors to W_Q, W_K, W_V and W_O
by invertible steps. A `Checkpoint` (`checkpoint.py`) reads single layers; `stored_models.py` builds and
writes whole models. Start with `family.py` and `families/gpt2.toml`.
"""
