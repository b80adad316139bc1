"""Running models: tokenization, inference, decoding, changes and measurements.

`text/` converts texts to token ids and back. `opening/` opens any source as a module with tokenizers, and
runs it on texts with a `Reader`. `decoding/` translates and generates, by the options of
`decoding_options.py`. `changes.py` has the changes of a model, `run.py` the record of a run, and
`opened_source.py` the opened parts of a model's source. `measuring/` runs a model over the windows of a text,
with all heads or without some. `batching.py`, `input_limits.py` and `memory.py` serve all of them.
"""
