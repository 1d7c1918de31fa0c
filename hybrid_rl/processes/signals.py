"""SIGTERM and Ctrl-C: the first one asks the run to end where it can be saved, a second one ends this process at once.

A signal is the process's own business, so these are functions and no object. No torch here: the launcher listens too.
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
ONE = 1.0  # seconds within which signals count as one: a terminal, a launcher and `timeout` may each deliver the same wish
_asked = 0


class Stopped(Exception):
    """The run was asked to end by signal `number`, and did so where it could be saved; the message says where."""

    def __init__(self, number: int, where: str):
        super().__init__(where)
        self.number = number


def asked() -> int:
    """The first signal that came, 0 if none did. Ranks must agree before they act on it: Session.stop_asked."""
    return _asked


@contextmanager
def listening(
    patience: float, speaks: bool = True, pass_on: Callable[[int], object] = lambda number: None
) -> Iterator[None]:
    """A signal requests a graceful stop while this lasts; `patience` seconds after the first one it is as if a second one came.

    `pass_on` is called with the first one.

    A thread receives them: the main thread may be in a long computation, or wait for a rank that is no more.
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
        if not received:  # nobody listens any more
            return
        now, number = time.monotonic(), received[0]
        if number in SIGNALS and not _asked:
            _asked, first = number, now
            pass_on(number)
            if speaks:
                name = signal.Signals(number).name
                line = f"hybrid_rl: {name}: the step ends and is saved, which may take up to {patience:g} s; a second one ends at once\n"
                sys.stdout.write(line)
                sys.stdout.flush()
        elif number in SIGNALS and now - first >= min(ONE, patience):
            end_now(128 + number)


def end_now(code: int) -> None:
    """End this process and all that it started, as SIGKILL would."""
    kill_children(os.getpid())
    sys.stdout.flush()
    os._exit(code)


def pass_to_busy_children(number: int) -> None:
    """Send the signal to each child process that has children of its own: another launcher's workers in which a job runs."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.children():
                child.send_signal(number)


def kill_children(pid: int) -> None:
    """SIGKILL for every descendant, but multiprocessing's tracker, which cleans up once its parent is gone and then ends."""
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                if "resource_tracker" not in " ".join(child.cmdline()):
                    child.kill()
