"""Sizes at which one way to compute becomes faster than another, measured on one processor.

They choose between ways that give the same numbers. On another machine only the speed may be less than it
could be. `docs/contributing/log/` has the measurements; `benchmarks/attention_paths.py` repeats them.
"""

import torch

# What all of them were measured on.
MACHINE = "AMD EPYC (Zen 4, AVX-512 with bf16 and VNNI), two cores, 24 GB"
TORCH = "2.13.0+cpu"

# Attention (`core/attention/routes.py`), all on a CPU.
# Up to about this many keys, batched products beat the fused kernel, forward and backward together. With
# d_k ≠ d_v they do so in the forward pass alone too, or are level: the kernel must then be given padded
# copies. In bfloat16 they do so to 2,048 where malloc keeps what is freed, but the weights of a layer then
# outweigh all else that it keeps.
MAX_KEYS_WRITTEN_OUT = {torch.bfloat16: 512}
MAX_KEYS_WRITTEN_OUT_OTHERWISE = 128
# In float32 the kernel is as fast with heads this wide at any length, and with this many weights: to write
# them out, malloc as it is asks the system for new memory at every call.
WIDE_HEADS = 128
MANY_WEIGHTS = 1 << 21
# Without gradients, in bfloat16, products are up to twice as fast as the kernel, as long as what is held at a
# time fits into the processor's cache. With less to multiply than this it is the number of operations that
# counts; and a kernel that skips what is masked wins past some length.
BYTES_OF_A_PIECE = 1 << 23
MIN_PRODUCTS_IN_PIECES = 1 << 23
MIN_WIDTH_IN_PIECES = 32
MAX_KEYS_CAUSAL_IN_PIECES = 512
# torch's kernel is made for many queries. Given one in bfloat16, as a decoder's cache is read, products are 2
# to 4 times as fast from about this many keys in all heads of a batch together; of fewer heads than this it
# splits the keys better.
MIN_KEYS_OF_ALL_HEADS = 4096
MIN_HEADS_OF_A_BATCH = 4
# Where W_Q, W_K and W_V of one input are one product: a GPU waits for launches, and training is 1.1 times as
# fast (H100, the paper's base model); a CPU gains nothing.
ONE_PRODUCT_ON = {"cuda"}

# Decoding.
# Scores of all heads and texts that are held at a time.
SCORES_AT_A_TIME = 1 << 22
# Rows of a product that the layout of packed weights is chosen for; it serves all others as well.
PACKED_ROWS = 32
# Multiplications of a product that is computed to see which numbers of rows are alike
# (`running/decoding/row_counts.py`). Where more rows would need more,
# they are taken in pieces: 20 to 60 ms of a thread.
COMPARED_PRODUCTS = 1 << 31
# Packed weights are a copy. They are made of models whose weights take at most this share of the memory.
SHARE_PACKED = 0.125
# To see which pages of files are in memory takes 30 to 50 ms each time that a model is made ready. Models
# smaller than this give none back.
BYTES_GIVEN_BACK = 1 << 26
# Finished sentences are taken out of the batch when they are this share of it: each time, the caches of the
# others are copied.
SHARE_DONE = 0.2
# As many new rows of beams begin a batch of their own. A step of it reads the weights once more (4.3 ms of a
# small translator); joining others, each new text would read as many slots as the longest text has.
ROWS_APART = 48
# A step of a model with fewer weights takes a server longer with two threads than with one (7 million: 6.5 ms
# against 3.8; 35 million: 11 to 18 against 14).
WEIGHTS_WORTH_THREADS = 1 << 24
# A worker takes seconds to start: with fewer sentences to do, none is.
SENTENCES_WORTH_A_WORKER = 100

# Training.
# Logits alive at a time: about as many as the last cache holds, in enough rows for products at full speed.
# With 3,500 tokens and a vocabulary of 8,000, chunks of 128 rows take 1.1 times as long.
CHUNK_LOGITS = 1 << 22
# On a GPU, fewer and larger products: with 192 chunks a step it waited half of the time for launches (H100).
CHUNK_LOGITS_ON_GPU = 1 << 26
MIN_CHUNK_TOKENS = 128
MAX_CHUNK_TOKENS = 2048
