"""Running a model: text in, text out, and everything between.

`text/` turns text into token ids and back. `opening/` makes a module with its tokenizers of any source, and a
`Reader` that runs it on texts. `decoding/` translates and generates. `changes.py` has the changes of a model,
`run.py` the record of one run, `opened_source.py` all that a model holds of its source. `measuring/` reads a
text window by window, with some heads off.
"""
