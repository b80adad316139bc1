"""Entry point of `triptych` and `python -m triptych`."""

import gc
import signal
from importlib import import_module

from triptych.cli.interrupts import end_interrupted


def run() -> None:
    """Run the command; Ctrl-C is handled from before the slow imports until the process ends."""
    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):  # background jobs ignore the signal
        signal.signal(signal.SIGINT, end_interrupted)
    gc.disable()  # until imports are done: garbage collection would take a fifth of their time
    try:
        import_module("triptych.cli.main").run()
    finally:
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # the work is done, and the interpreter cleans up


if __name__ == "__main__":
    run()
