"""Running models: tokenization, inference, decoding, changes and measurements.

An `Opened` (`opened_source.py`) is the inside of a `Model`: a source, its opened parts, and the changes.
`opening/` opens a source as a `Reader`, for texts and the inputs of layers (`Recording`). `text/` converts
texts to token ids and back (`Tokenizer`). `decoding/` translates and generates (`Translator`,
`TextGenerator`). `changing.py` makes changed models by a `Change` (`changes.py`), and `run.py` the record of
a `Run`. `measuring/` runs a model over the windows of a text, with all heads or without some. Start with
`opened_source.py` and `opening/reader.py`.

Interface: `changing`, `decoding`, `measuring`, `memory`, `opened_source`, `opening`, `options`,
`run`, `text`.
"""
