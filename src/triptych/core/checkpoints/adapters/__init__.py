"""Adapters of PEFT: a base model and the low-rank changes of its maps, read as one checkpoint.

An `Adapter` (`adapter.py`) has the factors of a folder with `adapter_config.json`. An `AdaptedModel`
(`adapted_model.py`) is a base with adapters: each tensor is merged when it is read. Start with `adapter.py`.
"""
