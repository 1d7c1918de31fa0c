"""Handle SIGTERM and Ctrl-C: the first requests a graceful stop, a second ends the process at once.

Signals belong to the process, so the state here is global. This module does not import torch: the launcher uses it too.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# seconds within which signals count as one: a terminal, a launcher and `timeout` may each deliver the same request
ONE = 1.0
_asked = 0


class Stopped(Exception):
    """The run stopped gracefully because of signal `number` and was saved; the message says at which step."""

    def __init__(self, number: int, where: str):
        super().__init__(where)
        self.number = number


def asked() -> int:
    """Return the first signal received, 0 if none. Ranks must agree before they act on it: Session.stop_asked."""
    return _asked


@contextmanager
def listening(
    patience: float, speaks: bool = True, pass_on: Callable[[int], object] = lambda number: None
) -> Iterator[None]:
    """Receive signals inside the context: the first requests a graceful stop, a second ends the process at once.

    `patience` seconds after the first signal the process ends as if a second one had arrived. `pass_on` is called with
    the first signal. `speaks` prints a line when it arrives. A thread receives the signals, because the main thread may
    be in a long computation, or wait for a rank that has died.
    """
    global _asked
    _asked = 0
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher = threading.Thread(target=_watch, args=(reader, patience, speaks, pass_on), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writer)
        watcher.join(ONE)
        os.close(reader)


def _watch(reader: int, patience: float, speaks: bool, pass_on: Callable[[int], object]) -> None:
    global _asked
    first = 0.0
    while True:
        wait = max(0.0, first + patience - time.monotonic()) if _asked else None
        received = os.read(reader, 1) if select.select([reader], [], [], wait)[0] else bytes([_asked])
        if not received:  # the context has ended
            return
        now, number = time.monotonic(), received[0]
        if number in SIGNALS and not _asked:
            _asked, first = number, now
            pass_on(number)
            if speaks:
                name = signal.Signals(number).name
                sys.stdout.write(
                    f"hybrid_rl: {name}: the run stops after this step and saves it, within {patience:g} s; "
                    "a second signal ends it at once\n"
                )
                sys.stdout.flush()
        elif number in SIGNALS and now - first >= min(ONE, patience):
            end_now(128 + number)


def end_now(code: int) -> None:
    """Kill all descendants of this process, then end it with exit code `code`, without cleaning up."""
    kill_children(os.getpid())
    sys.stdout.flush()
    os._exit(code)


def pass_to_busy_children(number: int) -> None:
    """Send a signal to each child process that has children itself: workers of another launcher that run a job."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.children():
                child.send_signal(number)


def kill_children(pid: int) -> None:
    """Kill (SIGKILL) every descendant of process `pid` except multiprocessing's resource tracker.

    The tracker cleans up when its parent has ended, and then ends itself.
    """
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                if "resource_tracker" not in " ".join(child.cmdline()):
                    child.kill()
