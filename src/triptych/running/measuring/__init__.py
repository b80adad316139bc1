"""Measuring a model on a text: windows of it, the attention of every layer, the loss without each head."""
