"""Measurements of a model on a text: windows, attention of every layer, loss without each head."""
