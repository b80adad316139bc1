"""GGUF files as checkpoints: metadata as a configuration, tensors under the names of `transformers`.

`architectures.toml` maps architectures of llama.cpp to families. Start with `GgufModel` (`gguf_model.py`).
"""
