"""The trainer's side of SGLang's process: start it, talk to it within time limits, end it with its children."""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import psutil

from hybrid_rl.engine.base import EngineDied, EngineError
from hybrid_rl.engine.sglang.interface import installed, withheld

Died = TypeVar("Died", bound=EngineError)
# variables that describe the trainer's ranks, not the engine's
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
TAIL = 20  # lines of its log that a traceback repeats
CAUSE = re.compile(r"[\w.]*(Error|Exception|Exit)\b.*")  # the last line of a traceback


class HostProcess:
    """Start `hybrid_rl.engine.sglang.host` with an engine of these arguments, and talk to it.

    `facts` is what the process reported when it was ready. Raises EngineError if that takes longer than `start_timeout`
    seconds. Afterwards an answer or a sign of progress must come every `timeout` seconds. A process that is silent for
    longer is killed with all its children; then, or if it ended by itself, every call raises EngineDied. An error is
    one line with the cause, and names the file `log`, to which the process writes.
    """

    def __init__(self, arguments: Mapping[str, Any], start_timeout: float, timeout: float, log: Path | None = None):
        self.timeout, self._path = timeout, log
        self._dead: EngineError | None = None
        self._log = log.open("ab+") if log else tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        self._begin = self._log.seek(0, os.SEEK_END)  # an earlier process may have written before
        self._process, self.connection = _start(dict(arguments), self._log.fileno(), max(timeout, 1.0))
        self._family: list[psutil.Process] = []
        self._end = weakref.finalize(self, _end, self._process, self.connection, self._family)  # also at exit
        kind, self.facts = self._first(start_timeout)
        if kind != "ready":
            self.close()
            raise self._noted(EngineError(f"{self._failed} {self.facts.splitlines()[0]}{self._place}"))
        self._family += psutil.Process(self._process.pid).children(recursive=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def family(self) -> list[psutil.Process]:
        """SGLang's own processes, among them those that hold weights and KV cache."""
        return list(self._family)

    def _first(self, limit: float) -> Any:
        try:
            return self.receive(limit)
        except EngineDied as error:
            said = str(error).replace("engine.timeout", "engine.start_timeout")
            raise self._noted(EngineError(f"{self._failed} {said}")) from None

    def tell(self, *message: object) -> None:
        """Send a message without waiting for an answer."""
        self._alive()
        try:
            self.connection.send(message)
        except BlockingIOError:
            raise self._hangs(self.timeout) from None
        except OSError:
            raise self._ended() from None

    def receive(self, limit: float | None = None) -> Any:
        """Return the next message, ("progress", …) included; wait at most `limit` seconds, by default `timeout`."""
        self._alive()
        limit = self.timeout if limit is None else limit
        try:
            if not self.connection.poll(limit):
                raise self._hangs(limit)
            return self.connection.recv()
        except BlockingIOError:  # it stopped in the middle of a message
            raise self._hangs(self.timeout) from None
        except (EOFError, OSError):
            raise self._ended() from None

    def waits(self) -> bool:
        """Return whether a message has arrived."""
        with suppress(OSError):
            return self.connection.poll(0)
        return True  # the process has ended, and receive() will raise

    def call(self, operation: str, *arguments: object, limit: float | None = None) -> None:
        """Run an operation and wait for its end, at most `limit` seconds between two messages, by default `timeout`."""
        self.tell(operation, *arguments)
        while (answer := self.receive(limit))[0] not in ("done", "failed"):  # left from a run that ended in an error
            pass
        kind, value = answer
        if kind == "failed":
            raise EngineError(f"SGLang answered: {value}")

    def resident(self) -> int:
        """Return the bytes that its processes hold in memory."""
        with suppress(psutil.NoSuchProcess):  # the next call will raise
            return sum(child.memory_info().rss for child in psutil.Process(self._process.pid).children(recursive=True))
        return 0

    @property
    def dead(self) -> bool:
        """Return whether it was found dead; a closed one is not dead."""
        return isinstance(self._dead, EngineDied)

    def close(self) -> None:
        self._dead = EngineError("the engine is closed")
        self._end()

    # ---- the end ----------------------------------------------------------------------------------------------------

    def _alive(self) -> None:
        if self._dead:
            raise self._dead

    def _hangs(self, limit: float) -> EngineDied:
        return self._died(
            f"SGLang has neither answered nor made progress for {limit:g} s (engine.timeout), and was ended"
        )

    def _ended(self) -> EngineDied:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        return self._died(f"SGLang's process has ended with code {self._process.poll()}")

    def _died(self, how: str) -> EngineDied:
        _kill(self._process, self._family)
        cause = next((f": {line}" for line in reversed(self._output()) if CAUSE.match(line)), "")
        self._dead = died = self._noted(EngineDied(f"{how}{cause}{self._place}"))
        self._end()
        return died

    @property
    def _failed(self) -> str:
        return f"SGLang {installed()} did not start (engine=local runs without it):"

    @property
    def _place(self) -> str:
        return f"; its output is in {self._path}" if self._path else ""

    def _output(self) -> list[str]:
        self._log.seek(self._begin)
        return self._log.read().decode(errors="replace").strip().splitlines()

    def _noted(self, error: Died) -> Died:
        """Return the error with a note for its traceback: the end of the process's output."""
        error.add_note("\n".join(["The last lines of SGLang's process:", *self._output()[-TAIL:]]))
        return error


def environment() -> dict[str, str]:
    """Return the environment of SGLang's process: this one's, without what could change SGLang's results."""
    left_out = {*LAUNCHERS, *withheld()}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in left_out and not name.startswith("TORCHELASTIC")
    }
    paths = (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH"))
    kept["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return kept


def _start(arguments: dict[str, Any], log: int, timeout: float) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start the process in a session of its own: the trainer alone handles a Ctrl-C."""
    ours, theirs = socket.socketpair()
    limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # they hold in the middle of a message too
        ours.setsockopt(socket.SOL_SOCKET, option, limit)
    command = [sys.executable, "-m", "hybrid_rl.engine.sglang.host", str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        )
    connection = Connection(ours.detach())
    connection.send((bytes(multiprocessing.current_process().authkey), arguments))
    return process, connection


def _kill(process: subprocess.Popen[bytes], family: Iterable[psutil.Process]) -> None:
    """Kill the process and everything it started, stopped ones too; their memory is free when this returns."""
    found = list(family)
    with suppress(psutil.NoSuchProcess):
        found += psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for child in found:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
    psutil.wait_procs(found, timeout=10)


def _end(process: subprocess.Popen[bytes], connection: Connection, family: list[psutil.Process]) -> None:
    connection.close()  # the process then ends by itself
    with suppress(subprocess.TimeoutExpired):
        process.wait(30)
    _kill(process, family)
