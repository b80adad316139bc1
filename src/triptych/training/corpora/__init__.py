"""Training text: corpora, their token ids on the disk, and batches.

Parallel corpora are read from files, datasets of Hugging Face or the corpus that the package generates
(`corpora.py`, `generated.py`). Tokenizers are trained (`tokenizer_training.py`). The ids of pairs are
compact arrays, cached on the disk (`encoded.py`), and `pair_batches.py` makes batches of pairs of similar
length within a budget of tokens. Documents of language models become memory-mapped shards
(`token_shards.py`) and rows of one length (`packing.py`).
"""
