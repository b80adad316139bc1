"""Training by many processes under `torchrun`: who takes part, and how the model lies on them."""

from triptych.training.parallel.computing import (
    ONE_PROCESS,
    Computing,
    Kind,
    Layout,
    LazyParameters,
    NotCounted,
    OneProcess,
    choose_parallel,
    rows_of_rank,
)
from triptych.training.parallel.world import (
    Turns,
    World,
    code_digests,
    do_each,
    launched,
)

__all__ = [
    "ONE_PROCESS",
    "Computing",
    "Kind",
    "Layout",
    "LazyParameters",
    "NotCounted",
    "OneProcess",
    "Turns",
    "World",
    "choose_parallel",
    "code_digests",
    "do_each",
    "launched",
    "rows_of_rank",
]
