"""Process-wide settings of the command; the library never changes them."""

import ctypes
import gc
import os
import platform
import sys
from io import TextIOWrapper

# Read by the OpenMP runtime when torch loads it (`make bench TABLE=busy` measures it).
SPIN_BRIEFLY = {"GOMP_SPINCOUNT": "10000"}
# With any of these in the environment the user has decided.
_DECIDED_BY = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")

_STDOUT = 1
_STDERR = 2

# Compiling kernels anew takes a tenth of the decoding time with 16 kernels, and hardly any with 64.
_KERNELS_KEPT = 16
KERNELS_KEPT_DECODING = 64

# Constants of glibc's <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER_TRIMMED = (1 << 31) - 1
_LARGEST_KEPT = 1 << 30


def open_streams() -> None:
    """Reopen closed standard streams, to keep files off their descriptors, and let all text be printed.

    Output to a closed stream is dropped; `sys.stdin` stays None. Characters that the encoding of
    standard output does not have become escapes, as on standard error.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(opened)
    sys.stdout = sys.stdout or open(_STDOUT, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (for good)
    sys.stderr = sys.stderr or open(_STDERR, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def limit_spinning() -> None:
    """Let OpenMP's threads spin only briefly before they sleep; must be called before torch is imported.

    A waiting thread spins so that the next parallel region begins at once, by default for milliseconds. Next
    to another busy process it then occupies the processor that the thread it waits for needs, and training
    falls to a twentieth of its speed. 10,000 rounds have no measurable cost on a quiet machine. Sleeping at
    once (`OMP_WAIT_POLICY=PASSIVE`) is better next to busy processes and costs 5 to 35 % on a quiet machine
    (docs/contributing/log/). OpenMP runtimes other than GNU's ignore the variable.
    """
    if not any(name in os.environ for name in _DECIDED_BY):
        os.environ.update(SPIN_BRIEFLY)


def prepare_training() -> None:
    """Set how memory is kept while training; must be called before the first product in bfloat16."""
    limit_kernel_cache()
    keep_freed_memory()


def limit_kernel_cache(kept: int = _KERNELS_KEPT) -> None:
    """Let oneDNN keep few compiled kernels; must be called before the first product.

    It compiles a kernel for every shape of a matrix product and keeps 1,024 with their buffers. Batches of
    sentences have hundreds of shapes, and a model of 5 million parameters occupied 5 GB
    (docs/contributing/log/); compiling anew costs no measurable time. Environment variables have precedence.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(kept))


def keep_libraries() -> None:
    """Exclude imported objects from garbage collection: a collection stops a server.

    torch and its like have 400,000 objects, through which a collection takes a tenth of a second.
    """
    gc.collect()
    gc.freeze()


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, instead of giving it back to the kernel to be faulted in anew.

    Every update frees its activations and asks for as many again. One thread, Multi30k, target tokens per CPU
    second: 1.5 to 3 % more in bfloat16 with the preset `small` (4,096 tokens a batch), 1 to 6 % with `tiny`
    (1,024), not measurable in float32 with 4,096; peak memory up by 5 % at most. `verify` of a large
    checkpoint takes half of the time, and 15 to 30 % more memory (docs/contributing/log/). Blocks past 1 GiB
    are still given back. Other C libraries, other allocators and environment variables for malloc are left
    alone.
    """
    if platform.libc_ver()[0] != "glibc" or _malloc_is_chosen():
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIMMED)


def _malloc_is_chosen() -> bool:
    """Return True if the environment configures or replaces malloc."""
    return (
        any(name.startswith("MALLOC_") for name in os.environ)
        or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
        or "malloc" in os.environ.get("LD_PRELOAD", "")
    )
