"""The memory that torch's CPU kernels keep for themselves."""

import os

_KERNELS_KEPT = "16"


def limit_kernel_cache() -> None:
    """Let oneDNN keep few compiled kernels; must be called before the first product in bfloat16.

    It compiles one for every shape of a matrix product and keeps 1,024 with their buffers. Batches of
    sentences have hundreds of shapes, and a model of 5 million parameters came to 5 GB (docs/log.md);
    compiling anew costs no time that shows. What the environment already says is left alone.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, _KERNELS_KEPT)
