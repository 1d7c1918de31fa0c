"""Whether a rank still gets on: what each notes of itself, and who looks at it. No torch here.

A rank notes its phase, when it last did something, and whether it waits for the others, in a small file that is mapped into
memory: about a microsecond each time. Who started the ranks reads the files. A rank that has not noted anything for
`rank_timeout` seconds, and does not say that it waits for another, hangs: every rank is made to write down the stacks of
its threads, the run says who hangs where, and ends.
"""

from __future__ import annotations

import mmap
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NOTES = "HYBRID_RL_NOTES"  # the folder of the ranks' notes
DUMP = signal.SIGUSR1  # asks a rank for its stacks
START = "start"  # the phase before the first that has a name
_FORM = struct.Struct("d?B64s")  # when, waits for the others, length of the phase's name, the name


@dataclass(frozen=True, slots=True)
class Note:
    rank: int
    phase: str
    at: float  # time.monotonic() of the last progress, which all processes of a machine share
    waits: bool  # for other ranks


class _Notes:
    """This process's own note."""

    def __init__(self, path: Path):
        path.write_bytes(bytes(_FORM.size))
        with path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), _FORM.size)
        self.name, self.waits = START.encode(), False
        self.put()

    def put(self) -> None:
        _FORM.pack_into(self.map, 0, time.monotonic(), self.waits, len(self.name), self.name)


_own: _Notes | None = None


def progress() -> None:
    """Something was done: a completion, a row of the update, a step of a loop that may take long."""
    if _own:
        _own.put()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """The work that follows has this name."""
    if not _own:
        yield
        return
    before, _own.name = _own.name, name.encode()[:64]
    _own.put()
    try:
        yield
    finally:
        _own.name = before
        _own.put()


@contextmanager
def waiting() -> Iterator[None]:
    """What follows ends when the other ranks come: a rank that waits does not hang, however long."""
    if not _own:
        yield
        return
    _own.waits = True
    _own.put()
    try:
        yield
    finally:
        _own.waits = False
        _own.put()
