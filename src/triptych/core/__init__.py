"""The core: attention as matrices, Transformers of attention layers, and the reading of checkpoints.

Read it in this order. `algebra/` has the two forms of a head, W_QK and W_OV (`BilinearForm`), the maps of a
layer (`AttentionWeights`) and its computation besides the maps (`Semantics`). `attention/` computes a layer
(`MultiHeadAttention`), with any parameterisation. `models/` builds Transformers of attention layers
(`LanguageModel`, `EncoderDecoder`). `storage/` reads tensors from files, and `checkpoints/` reads the model
families of other libraries: a `Source` has files, a `Checkpoint` their layers. `heads.py` has `Layer` and
`Head`, and `places.py` defines their names. Start with `algebra/forms.py`.

Interface: `algebra.centring`, `algebra.cost`, `algebra.forms`, `algebra.function`, `algebra.legality`,
`algebra.norm_folding`, `algebra.pictures`, `algebra.positions`, `algebra.resampling`, `algebra.rewritten`,
`algebra.semantics`, `algebra.spectrum`, `algebra.weights`, `attention`, `checkpoints.checkpoint`,
`checkpoints.family`, `checkpoints.fitted_weights`, `checkpoints.gguf`, `checkpoints.gguf.architectures`,
`checkpoints.latents`, `checkpoints.layer_map`, `checkpoints.made_files`, `checkpoints.model_map`,
`checkpoints.model_parts`, `checkpoints.module_layers`, `checkpoints.norm_readers`, `checkpoints.source`,
`checkpoints.stored_layers`, `checkpoints.stored_models`, `heads`, `models`, `models.initial`,
`models.vectors`, `models.with_attention`, `places`, `storage`.
"""
