"""Handles SIGTERM and Ctrl-C, after which a run writes a checkpoint and ends."""

import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """Stores the first SIGTERM or Ctrl-C for the loop. A second one ends the process at once.

    Python handles signals only in the main thread; in other threads, nothing is stored.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __enter__(self) -> "Interruption":
        handles = threading.current_thread() is threading.main_thread()
        self._previous_handlers = {each: signal.getsignal(each) for each in SIGNALS if handles}
        for each in self._previous_handlers:
            signal.signal(each, self._keep_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._previous_handlers.items():
            signal.signal(each, handler)

    def _keep_signal(self, number: int, _: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
