"""Start the ranks of a run on this machine, and make sure that none outlives the others or the launcher.

The ranks find each other through torchrun's environment variables, so they work under any launcher that sets those.
All sockets of ranks started here listen on the loopback interface only. torch is imported only when ranks start.

`accelerate` is a dependency because transformers loads models through it, and experiment trackers use it. Its launcher
and device detection are not used: its launcher does not detect hanging ranks, collect their stacks or pass a signal on
for a graceful stop, and its state object would create the process group with other backends and timeouts than
processes/ranks.py.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from hybrid_rl.processes import hangs
from hybrid_rl.processes.signals import SIGNALS, asked, end_now, kill_children, listening

LAUNCHER = "HYBRID_RL_LAUNCHER"  # environment variable: process id of the launcher that started this rank
# multiprocessing warns about what a rank that a signal ended has left for it to clean up
WARNINGS = "ignore:resource_tracker:UserWarning"
AT_A_SIGNAL = tuple(128 + number for number in SIGNALS)  # exit codes of a graceful stop
MARGIN = 10.0  # seconds that the launcher waits beyond the limit within which ranks should stop by themselves
TOGETHER = 10.0  # seconds within which all ranks should end after a graceful stop
SPEAK = 2.0  # seconds that other ranks wait for rank 0 to print a message that all of them have


def world() -> int | None:
    """Return the number of ranks that a launcher (torchrun or another) started, with this process; None without one."""
    size = os.environ.get("WORLD_SIZE")
    return int(size) if size else None


def environment_problem() -> str:
    """Return what is wrong with the environment variables that a launcher sets, or "".

    With wrong variables, ranks would wait for each other forever.
    """
    e = os.environ
    if not e.get("WORLD_SIZE"):
        return "RANK is set and WORLD_SIZE is not: start ranks with torchrun, or unset RANK" if e.get("RANK") else ""
    number = {name: int(e[name]) for name in (*NUMBERS, "MASTER_PORT") if e.get(name, "").isdecimal()}
    wanted = (*NUMBERS, "MASTER_ADDR", "MASTER_PORT") if number.get("WORLD_SIZE", 2) > 1 else NUMBERS[:1]
    for name in wanted:
        if not e.get(name):
            return (
                f"WORLD_SIZE={e['WORLD_SIZE']} is set and {name} is not: start ranks with torchrun, or unset WORLD_SIZE"
            )
        if name != "MASTER_ADDR" and name not in number:
            return f"{name}={e[name]}: must be a whole number of at least 0"
    for name, (low, limit) in {
        "WORLD_SIZE": (1, None),
        "RANK": (0, "WORLD_SIZE"),
        "LOCAL_RANK": (0, "LOCAL_WORLD_SIZE"),
    }.items():
        if name in wanted and (number[name] < low or (limit and number[name] >= number[limit])):
            return f"{name}={number[name]}: must be at least {low}" + (
                f" and below {limit}={number[limit]}" if limit else ""
            )
    return ""


NUMBERS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def launched() -> bool:
    """Return whether this process is one rank of several."""
    return (world() or 1) > 1


def after_rank_0() -> None:
    """Wait, on ranks other than 0, before printing a message that rank 0 prints too.

    Rank 0 prints it and ends, and the launcher ends the other ranks while they wait here: the message appears once.
    """
    if launched() and os.environ["RANK"] != "0":
        time.sleep(SPEAK)


def end_with_launcher() -> None:
    """Start a thread that ends this rank and its child processes within two seconds after its launcher has died."""
    launcher = int(os.environ.get(LAUNCHER, os.getppid()))
    threading.Thread(target=_watch, args=(launcher,), daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1)
    end_now(1)


def launch(count: int, arguments: Sequence[str], run_folder: Path, timeout: float, patience: float = 60.0) -> int:
    """Run python with `arguments` as `count` ranks and return the exit code of the run.

    The code is that of the first rank that fails, or 128 + n if signal n ended the run. When a rank fails, the others
    are ended. When a rank makes no progress for `timeout` seconds, stacks are written to run_folder/stacks and all
    ranks are ended. SIGTERM and Ctrl-C are passed on to the ranks, which have `patience` seconds to end.
    """
    from torch.distributed import TCPStore

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        LAUNCHER: str(os.getpid()),
        "PYTHONWARNINGS": f"{os.environ.get('PYTHONWARNINGS', '')},{WARNINGS}".strip(","),
    }
    if sys.platform == "linux":
        shared |= {name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    with tempfile.TemporaryDirectory() as notes:
        detector = hangs.HangDetector(Path(notes), timeout, run_folder / "stacks")
        environments = [
            {**shared, hangs.NOTES: notes, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)
        ]
        code = attend(environments, arguments, patience, detector)
    del store  # it must live as long as the ranks
    return code


class Watcher(Protocol):
    """Looks after processes while they run, like hangs.HangDetector."""

    def check(self, pids: Mapping[int, int], ended: Sequence[int]) -> None:
        """Look at the running processes, `pids` by rank, and at the ranks that have `ended`."""


def attend(
    environments: Sequence[dict[str, str]],
    arguments: Sequence[str],
    patience: float,
    watcher: Watcher | None = None,
) -> int:
    """Run python with `arguments` once for each of `environments`, at the same time, until all end or one fails.

    Returns the exit code as `launch` does; `watcher` is called again and again while they run.
    """
    processes: list[subprocess.Popen[bytes]] = []
    with listening(patience + MARGIN, speaks=False):
        try:
            for environment in environments:
                # each in a new session, so that a terminal's signals reach it only through this process
                processes.append(
                    subprocess.Popen([sys.executable, *arguments], env=os.environ | environment, start_new_session=True)
                )
            failed = _wait(processes, watcher)
        except hangs.Hangs as error:
            print(error, file=sys.stderr)
            return 1
        finally:
            _end(processes)
        codes = [process.returncode for process in processes]
        if failed is None:
            return 0
        if codes[failed] >= 0:
            return codes[failed]
        if asked():
            return 128 + asked()
    hint = "; did the machine run out of memory?" if codes[failed] == -signal.SIGKILL else ""
    print(f"hybrid_rl: rank {failed} was ended by {signal.Signals(-codes[failed]).name}{hint}", file=sys.stderr)
    return 1


def _wait(processes: Sequence[subprocess.Popen[bytes]], watcher: Watcher | None) -> int | None:
    """Wait until all processes have ended or one has failed; return the index of the first that failed, or None.

    After a graceful stop, wait for the others up to TOGETHER seconds. Raises what `watcher` raises, like Hangs.
    """
    passed_on, since, pids = False, 0.0, {i: process.pid for i, process in enumerate(processes)}
    while True:
        ended = {i: code for i, process in enumerate(processes) if (code := process.poll()) is not None}
        failed = {i: code for i, code in ended.items() if code not in (0, *AT_A_SIGNAL)}
        if failed:
            return next(iter(failed))
        stopped = next((i for i, code in ended.items() if code), None)
        if stopped is not None:
            since = since or time.monotonic()
        if len(ended) == len(processes) or (since and time.monotonic() - since > TOGETHER):
            return stopped
        if asked() and not passed_on:
            passed_on = True
            for i, process in enumerate(processes):
                if i not in ended:
                    process.send_signal(asked())
        if watcher:
            watcher.check({rank: pid for rank, pid in pids.items() if rank not in ended}, sorted(ended))
        time.sleep(0.05)


def _end(processes: Sequence[subprocess.Popen[bytes]], grace: float = 2.0) -> None:
    """End all processes and their descendants.

    Processes that a killed rank left behind have `grace` seconds to end by themselves. They are found by process group:
    once their parent is dead, psutil can no longer tell that they are its descendants.
    """
    for process in processes:
        if process.poll() is None:
            kill_children(process.pid)
            process.kill()
            process.wait(MARGIN)
    deadline = time.monotonic() + grace
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):  # the group is empty
            while time.monotonic() < deadline:
                os.killpg(process.pid, 0)
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGKILL)
