"""SIGINT and SIGTERM as a request to stop at the next safe place."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, final


@final
class StopRequest:
    """While entered, notes the first signal; a second one of either kind interrupts at once.

    Attributes:
        signal_number: of the signal that came; None as long as none has.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is not threading.main_thread():
            return self  # Python hands signals to the main thread alone
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:
            raise KeyboardInterrupt
        self.signal_number = number
