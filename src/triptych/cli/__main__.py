"""`python -m triptych.cli`: the command, where the script is not on the path."""

from triptych.cli.main import run

run()
