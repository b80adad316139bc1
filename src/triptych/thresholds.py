"""Thresholds between implementations of different speed, measured on a single processor.

The implementations give the same results; on other machines, a choice may only be slower than necessary. The
measurements are in `docs/contributing/log/`; `benchmarks/attention_paths.py` repeats them.
"""

import torch

# Processor and version of torch in the measurements.
MACHINE = "AMD EPYC (Zen 4, AVX-512 with bf16 and VNNI), two cores, 24 GB"
TORCH = "2.13.0+cpu"

# Attention on CPUs (`core/attention/routes.py`).
# Maximum number of keys for which batched products are faster than the fused kernel, forward and backward
# together. If d_k ≠ d_v, they are at least as fast in the forward pass alone, too, since the kernel needs
# padding. In bfloat16 they are faster up to 2,048 keys if malloc keeps freed memory, but then most of
# a layer's memory is attention weights.
MAX_KEYS_WRITTEN_OUT = {torch.bfloat16: 512}
MAX_KEYS_WRITTEN_OUT_OTHERWISE = 128
# Minimum width of heads, and minimum number of attention weights, for which the kernel is as fast in
# float32. The products' weights then cost a request for new system memory at every call (malloc's defaults).
WIDE_HEADS = 128
MANY_WEIGHTS = 1 << 21
# In bfloat16 without gradients, products in pieces of the size of the processor's cache are up to twice as
# fast as the kernel. If there are few multiplications, the number of operations decides; if attention is
# causal and long, the kernel is faster, since it skips masked keys.
BYTES_OF_A_PIECE = 1 << 23
MIN_PRODUCTS_IN_PIECES = 1 << 23
MIN_WIDTH_IN_PIECES = 32
MAX_KEYS_CAUSAL_IN_PIECES = 512
# torch's kernel is optimised for many queries. For a single query in bfloat16, as in decoding, products are 2
# to 4 times as fast from about this many keys in all heads of a batch together. The kernel splits the keys
# of fewer heads better.
MIN_KEYS_OF_ALL_HEADS = 4096
MIN_HEADS_OF_A_BATCH = 4
# Devices on which W_Q, W_K and W_V of one input are a joint product: a GPU has fewer launches, and training
# is 1.1 times as fast (H100, base model of the Transformer paper). CPUs do not gain.
ONE_PRODUCT_ON = {"cuda"}

# Decoding.
# Maximum number of attention scores computed at a time, over all heads and texts.
SCORES_AT_A_TIME = 1 << 22
# Number of rows for which the layout of packed weights is chosen; other row counts use the same layout.
PACKED_ROWS = 32
# Maximum number of multiplications of a product in the comparison of row counts
# (`running/decoding/row_counts.py`): 20 to 60 ms of a thread. Row counts beyond are split.
COMPARED_PRODUCTS = 1 << 31
# Packed weights are a copy, so weights are packed only if they take at most this share of the memory.
SHARE_PACKED = 0.125
# Minimum size of a model, in bytes, to release its pages of mapped files: reading the mappings takes 30 to
# 50 ms whenever a model is prepared.
BYTES_GIVEN_BACK = 1 << 26
# Minimum share of finished texts to remove them from a batch: the caches of the other texts are then copied.
SHARE_DONE = 0.2
# Minimum number of new beam rows that start another batch. Every step of that batch reads the weights again
# (4.3 ms for a small translator), but in a joint batch every new text reads the slots of the longest text.
ROWS_APART = 48
# Minimum number of weights for several threads in a server. Steps of smaller models are slower with two
# threads than with one (7 million: 6.5 ms against 3.8; 35 million: 11 to 18 against 14).
WEIGHTS_WORTH_THREADS = 1 << 24
# Minimum number of waiting sentences to start workers (the start takes seconds).
SENTENCES_WORTH_A_WORKER = 100

# Training.
# Number of logits in memory at a time: about the size of the last-level cache, and enough rows for products
# at full speed. With 3,500 tokens and a vocabulary of 8,000, chunks of 128 rows take 1.1 times as long.
CHUNK_LOGITS = 1 << 22
# A GPU needs fewer and larger products: it waited for launches half of the time at 192 chunks a step (H100).
CHUNK_LOGITS_ON_GPU = 1 << 26
MIN_CHUNK_TOKENS = 128
MAX_CHUNK_TOKENS = 2048
