"""Training by many processes under `torchrun`: who takes part, and how the model lies on them."""

from triptych.training.parallel.choosing import choose_parallel
from triptych.training.parallel.computing import ONE_PROCESS, Computing, Kind, Layout, OneProcess, Unmade
from triptych.training.parallel.pieces import do_each
from triptych.training.parallel.striping import NotCounted, rows_of_rank
from triptych.training.parallel.world import Alone, Launched, World, code_digests, launched

__all__ = [
    "ONE_PROCESS",
    "Alone",
    "Computing",
    "Kind",
    "Launched",
    "Layout",
    "NotCounted",
    "OneProcess",
    "Unmade",
    "World",
    "choose_parallel",
    "code_digests",
    "do_each",
    "launched",
    "rows_of_rank",
]
