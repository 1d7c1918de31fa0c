"""Whether a rank still gets on: what each notes of itself, and who looks at it. No torch here.

A rank notes its phase, when it last did something, and whether it waits for the others, in a small file that is mapped into
memory: about a microsecond each time. The launcher reads the files. A rank that has noted nothing for `rank_timeout` seconds, and
does not say that it waits, hangs: every rank is made to write down its threads' stacks, the run says who hangs where, and ends.
A run of one rank looks at itself, from a thread.

A rank that waits may do so for any time while the one it waits for gets on. Before the first phase, where models and data are loaded and
nobody can say how long that takes, a rank hangs only where another one has waited for it that long. Ranks that have ended are not looked at,
and the others still are.
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

NOTES = "HYBRID_RL_NOTES"  # the folder of the ranks' notes
DUMP = signal.SIGUSR1  # asks a rank for its stacks
START = "start"  # the phase before the first that has a name
_FORM = struct.Struct("d?B64s")  # when, waits for the others, length of the phase's name, the name


Stacks = dict[
    int, list[str]
]  # of each rank the lines of its main thread, innermost first; empty where it gave no answer


@dataclass(frozen=True, slots=True)
class Note:
    rank: int
    phase: str
    at: float  # time.monotonic() of the last progress, which all processes of a machine share
    waits: bool  # for other ranks


class _Notes:
    """This process's own note."""

    def __init__(self, path: Path | None):
        """In a file, for others to read; or in memory."""
        if path is None:
            self.map = mmap.mmap(-1, _FORM.size)
        else:
            path.write_bytes(bytes(_FORM.size))
            with path.open("r+b") as file:
                self.map = mmap.mmap(file.fileno(), _FORM.size)
        self.name, self.waits = START.encode(), False
        self.put()

    def put(self) -> None:
        _FORM.pack_into(self.map, 0, time.monotonic(), self.waits, len(self.name), self.name)

    def read(self) -> Note:
        return Note(0, self.name.decode(errors="replace"), _FORM.unpack_from(self.map)[0], self.waits)


_own: _Notes | None = None


def progress() -> None:
    """Something was done: a completion, a row of the update, a step of a loop that may take long."""
    if _own:
        _own.put()


def begin() -> None:
    """This process is a rank: its launcher, where it is ours, reads its notes, and DUMP makes it write its stacks there; or to standard error."""
    global _own
    if folder := os.environ.get(NOTES):
        own = Path(folder, os.environ["RANK"])
        _own = _Notes(own)
        faulthandler.register(DUMP, own.with_suffix(".stacks").open("w"))
    else:
        faulthandler.register(DUMP)


@contextmanager
def phase(name: str, loading: bool = False) -> Iterator[None]:
    """Give the work that follows this name. `loading`: what comes after it is loading again, which may take any time."""
    if not _own:
        yield
        return
    before, _own.name = _own.name, name.encode()[:64]
    _own.put()
    try:
        yield
    finally:
        first = before == START.encode() and not loading
        _own.name = f"after {name}".encode()[:64] if first else before
        _own.put()


@contextmanager
def waiting() -> Iterator[None]:
    """What follows ends when the other ranks come."""
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


# ---- who looks --------------------------------------------------------------------------------------------------------


def hanging(notes: Sequence[Note], now: float, timeout: float) -> list[Note]:
    """The ranks that hang; all of them where each waits for the others."""
    old = [note for note in notes if now - note.at > timeout]
    waited_for = any(note.waits for note in old)
    found = [note for note in old if not note.waits and (note.phase != START or waited_for)]
    return found or (old if len(old) == len(notes) and all(note.waits for note in notes) else [])


class Hangs(Exception):
    """A rank does; the message is what to say of it."""


class Watch:
    """Of ranks that this process started, by their notes in `folder`; their stacks go to `stacks`."""

    def __init__(self, folder: Path, timeout: float, stacks: Path):
        self.folder, self.timeout, self.stacks = folder, timeout, stacks
        self._next = 0.0

    def look(self, pids: Mapping[int, int], ended: Sequence[int] = ()) -> None:
        """Look once a second at most. Raises Hangs, every rank's stacks collected, if one does not get on.

        `pids` are the processes of the ranks that run; `ended` are the ranks that do not run any more.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + 1
        notes = [note for rank in pids if (note := self._read(rank))]
        if len(notes) < len(pids) or not (hung := hanging(notes, now, self.timeout)):
            return
        stacks = self._collect(pids)
        if any(
            not note.waits for note in hung
        ):  # who is inside a collective of torch's own waits too, without having said so
            hung = [note for note in hung if not _in_collective(stacks[note.rank])] or hung
        else:  # one that does not even answer was stopped while it waited
            hung = [note for note in hung if not stacks[note.rank]] or hung
        raise Hangs(describe(notes, hung, stacks, self.timeout, self.stacks, ended))

    def _read(self, rank: int) -> Note | None:
        with suppress(OSError, struct.error):
            at, waits, length, name = _FORM.unpack((self.folder / str(rank)).read_bytes())
            return Note(rank, name[:length].decode(errors="replace"), at, waits) if at else None
        return None

    def _collect(self, pids: Mapping[int, int], patience: float = 5.0) -> Stacks:
        """Ask every rank for its stacks, wait until they are there, and put them where a person finds them."""
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
            (self.stacks / f"rank_{rank}.txt").write_text(
                text or "no answer: the process is stopped, or stuck in the kernel\n"
            )
            found[rank] = main_thread(text)
        return found

    def _text(self, rank: int) -> str:
        with suppress(OSError):
            return (self.folder / f"{rank}.stacks").read_text(errors="replace")
        return ""


def main_thread(text: str) -> list[str]:
    """The frames of the main thread, innermost first, of what faulthandler wrote: it comes last."""
    blocks = [
        block.strip().splitlines()[1:]
        for block in re.split(r"^(?=(?:Current t|T)hread 0x)", text, flags=re.MULTILINE)
        if block.strip()
    ]
    return [line.strip() for line in blocks[-1] if line.strip().startswith("File ")] if blocks else []


def _in_collective(frames: Sequence[str]) -> bool:
    return any("/torch/distributed/" in frame for frame in frames[:3])


def describe(
    notes: Sequence[Note], hung: Sequence[Note], stacks: Stacks, timeout: float, folder: Path, ended: Sequence[int] = (), most: int = 8
) -> str:  # fmt: skip
    """Who hangs, in which phase, since when; then the innermost frames of every rank that runs."""
    now = time.monotonic()

    def since(note: Note) -> str:
        return f"no progress since {time.strftime('%H:%M:%S', time.localtime(time.time() - now + note.at))} ({now - note.at:.0f} s)"

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
        lines += [f"    {frame}" for frame in stacks[note.rank][:most]] or [
            "    no answer: the process is stopped, or stuck in the kernel"
        ]
    return "\n".join([*lines, f"  every thread's stack: {folder}"])


def alone(timeout: float, folder: Path, end: Callable[[], object]) -> None:
    """A run of one rank watches itself; `end` is called after it has said where it hangs."""
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
