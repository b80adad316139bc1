"""`triptych` and `python -m triptych`: the command as a process of its own."""

import gc
import signal
from importlib import import_module

from triptych.cli.interrupts import end_interrupted


def run() -> None:
    """Entry point; Ctrl-C is handled from before the imports that take time until the process ends."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background job ignores it
        signal.signal(signal.SIGINT, end_interrupted)
    gc.disable()  # until all is imported: looking for garbage would take a fifth of that time
    try:
        import_module("triptych.cli.main").run()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done, and the interpreter cleans up


if __name__ == "__main__":
    run()
