"""`python -m triptych`: the command, as `torchrun -m triptych` starts it."""

from triptych.cli.main import run

run()
