"""Attention of a model on a text: where its heads look, and what they do."""
