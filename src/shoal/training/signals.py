"""Ctrl-C and SIGTERM: the first saves and leaves, the second leaves at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shoal.spec import TerminatedError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def on_signals(act: Callable[[int], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM are handed to `act`, once; the second stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []

    def catch(number: int, _: Any) -> None:
        if caught:
            raise TerminatedError if number == signal.SIGTERM else KeyboardInterrupt
        caught.append(number)
        act(number)

    before = {s: signal.signal(s, catch) for s in SIGNALS}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
