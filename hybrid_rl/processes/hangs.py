"""Detect ranks that hang, from the progress that each rank records. This module does not import torch.

Each rank records its phase, the time of its last progress and whether it waits for other ranks in a small memory-mapped
file (about a microsecond per record). The launcher reads the files. A rank hangs when it has recorded no progress for
`rank_timeout` seconds and is not waiting: the launcher then collects the stacks of all ranks, prints which rank hangs
in which phase, and ends the run. A run with one rank checks itself from a thread.

A rank may wait as long as another rank makes progress. Before the first phase, while models and data load, the duration
is unknown: a rank then hangs only if another rank has waited for it for `rank_timeout`. Ranks that have ended are not
checked.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import re
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

NOTES = "HYBRID_RL_NOTES"  # environment variable: the folder with one progress file per rank
DUMP = signal.SIGUSR1  # makes a rank write its stacks
START = "start"  # the phase before the first named one
_FORM = struct.Struct("d?B64s")  # time, waits for other ranks, length of the phase name in bytes, phase name

# rank → stack lines of its main thread, innermost first; empty if the rank did not answer
Stacks = dict[int, list[str]]


@dataclass(frozen=True, slots=True)
class Note:
    """The last progress record of one rank."""

    rank: int
    phase: str
    at: float  # time.monotonic() of the last progress; all processes of a machine share this clock
    waits: bool  # whether it waits for other ranks


class _Notes:
    """The progress record of this process."""

    def __init__(self, path: Path | None):
        """Keep the record in the file at `path`, for the launcher to read, or in memory if it is None."""
        if path is None:
            self.map = mmap.mmap(-1, _FORM.size)
        else:
            path.write_bytes(bytes(_FORM.size))
            with path.open("r+b") as file:
                self.map = mmap.mmap(file.fileno(), _FORM.size)
        self.name, self.waits = START.encode(), False
        self.put()

    def put(self) -> None:
        """Write the record with the current time."""
        _FORM.pack_into(self.map, 0, time.monotonic(), self.waits, len(self.name), self.name)

    def read(self) -> Note:
        """Return the record."""
        return Note(0, self.name.decode(errors="replace"), _FORM.unpack_from(self.map)[0], self.waits)


_own: _Notes | None = None


def progress() -> None:
    """Record that this process made progress: a finished completion, a row of an update, one pass of a long loop."""
    if _own:
        _own.put()


def current() -> str:
    """Return the name of this process's phase, "" if it records none."""
    return _own.name.decode(errors="replace") if _own else ""


def begin() -> None:
    """Start recording the progress of this rank.

    DUMP makes the rank write its stacks beside its record, or to standard error under another launcher than
    hybrid_rl's.
    """
    global _own
    if folder := os.environ.get(NOTES):
        own = Path(folder, os.environ["RANK"])
        _own = _Notes(own)
        faulthandler.register(DUMP, own.with_suffix(".stacks").open("w"))
    else:
        faulthandler.register(DUMP)


@contextmanager
def phase(name: str, loading: bool = False) -> Iterator[None]:
    """Name the work inside the context as phase `name`.

    `loading`: what follows is loading again, which may take any time.
    """
    if not _own:
        yield
        return
    before, _own.name = _own.name, name.encode()[:64]
    _own.put()
    try:
        yield
    finally:
        # after the first phase the rank no longer counts as loading
        first = before == START.encode() and not loading
        _own.name = f"after {name}".encode()[:64] if first else before
        _own.put()


@contextmanager
def waiting() -> Iterator[None]:
    """Record that the work inside the context waits for other ranks."""
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


# ---- detection -----------------------------------------------------------------------------------------------------


def hanging(notes: Sequence[Note], now: float, timeout: float) -> list[Note]:
    """Return the ranks that hang at `now` (seconds, time.monotonic()); all of them if each waits for the others."""
    old = [note for note in notes if now - note.at > timeout]
    waited_for = any(note.waits for note in old)
    found = [note for note in old if not note.waits and (note.phase != START or waited_for)]
    return found or (old if len(old) == len(notes) and all(note.waits for note in notes) else [])


class Hangs(Exception):
    """A rank hangs; the message names the rank, its phase and the stacks."""


class HangDetector:
    """A detector for the ranks that this process started: reads records in `folder`, writes stacks to `stacks`."""

    def __init__(self, folder: Path, timeout: float, stacks: Path):
        self.folder, self.timeout, self.stacks = folder, timeout, stacks
        self._next = 0.0

    def check(self, pids: Mapping[int, int], ended: Sequence[int] = ()) -> None:
        """Check the ranks, at most once a second. Raises Hangs after collecting the stacks of all ranks if one hangs.

        `pids` maps each running rank to its process id; `ended` holds the ranks that have ended.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + 1
        notes = [note for rank in pids if (note := self._read(rank))]
        if len(notes) < len(pids) or not (hung := hanging(notes, now, self.timeout)):
            return
        stacks = self._collect(pids)
        if any(not note.waits for note in hung):
            # a rank inside a collective that torch itself started waits too, without having recorded it
            hung = [note for note in hung if not _in_collective(stacks[note.rank])] or hung
        else:  # a rank that does not answer was stopped while it waited
            hung = [note for note in hung if not stacks[note.rank]] or hung
        raise Hangs(describe(notes, hung, stacks, self.timeout, self.stacks, ended))

    def _read(self, rank: int) -> Note | None:
        with suppress(OSError, struct.error):
            at, waits, length, name = _FORM.unpack((self.folder / str(rank)).read_bytes())
            return Note(rank, name[:length].decode(errors="replace"), at, waits) if at else None
        return None

    def _collect(self, pids: Mapping[int, int], patience: float = 5.0) -> Stacks:
        """Ask every rank for its stacks, wait up to `patience` seconds for them, and write them to `self.stacks`."""
        for pid in pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, DUMP)
        until, before = time.monotonic() + patience, ""
        while time.monotonic() < until:
            time.sleep(0.3)
            now = [self._text(rank) for rank in pids]
            if all(now) and "".join(now) == before:
                break
            before = "".join(now)
        self.stacks.mkdir(parents=True, exist_ok=True)
        found: Stacks = {}
        for rank in pids:
            text = self._text(rank)
            (self.stacks / f"rank_{rank}.txt").write_text(text or f"{NO_ANSWER}\n")
            found[rank] = main_thread(text)
        return found

    def _text(self, rank: int) -> str:
        with suppress(OSError):
            return (self.folder / f"{rank}.stacks").read_text(errors="replace")
        return ""


def main_thread(text: str) -> list[str]:
    """Return the frames of the main thread, innermost first, from faulthandler's output, where it comes last."""
    blocks = [
        block.strip().splitlines()[1:]
        for block in re.split(r"^(?=(?:Current t|T)hread 0x)", text, flags=re.MULTILINE)
        if block.strip()
    ]
    return [line.strip() for line in blocks[-1] if line.strip().startswith("File ")] if blocks else []


def _in_collective(frames: Sequence[str]) -> bool:
    return any("/torch/distributed/" in frame for frame in frames[:3])


NO_ANSWER = "no answer: the process is stopped, or stuck in the kernel"
FRAMES = 8  # innermost frames of each rank that are printed


def describe(
    notes: Sequence[Note],
    hung: Sequence[Note],
    stacks: Stacks,
    timeout: float,
    folder: Path,
    ended: Sequence[int] = (),
) -> str:
    """Return a message with the ranks that hang, their phase and since when, and the frames of every running rank."""
    now = time.monotonic()

    def since(note: Note) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(time.time() - now + note.at))
        return f"no progress since {clock} ({now - note.at:.0f} s)"

    lines = [
        f"hybrid_rl: rank {note.rank} hangs in phase {note.phase}: {since(note)}, rank_timeout={timeout:g}"
        for note in hung
    ]
    mutual = all(note.waits and stacks[note.rank] for note in hung)
    if mutual:
        whom = f"rank {', '.join(map(str, ended))} (ended)" if ended else "each other"
        who = "all ranks wait" if len(notes) > 1 else f"rank {notes[0].rank} waits"
        lines = [f"hybrid_rl: {who} for {whom}: {since(max(hung, key=lambda n: n.at))}, rank_timeout={timeout:g}"]
    for note in notes:
        doing = "hangs" if note in hung and not mutual else "waits for the others"
        lines.append(f"  rank {note.rank}, phase {note.phase}, {doing}:")
        lines += [f"    {frame}" for frame in stacks[note.rank][:FRAMES]] or [f"    {NO_ANSWER}"]
    return "\n".join([*lines, f"  every thread's stack: {folder}"])


def alone(timeout: float, folder: Path, end: Callable[[], object]) -> None:
    """Start a thread in which a run of one rank checks itself; it calls `end` after printing where the rank hangs."""
    global _own
    _own = _Notes(None)
    threading.Thread(target=_look_at_own, args=(_own, timeout, folder, end), daemon=True).start()


def _look_at_own(own: _Notes, timeout: float, folder: Path, end: Callable[[], object]) -> None:
    while not hanging([note := own.read()], time.monotonic(), timeout):
        time.sleep(min(1.0, timeout / 4))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rank_0.txt"
    with path.open("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        stacks = {0: main_thread(file.read())}
    print(describe([note], [note], stacks, timeout, folder), file=sys.stderr, flush=True)
    end()
